"""Hugging Face folders as they are written: in the type of the source, self-contained where heads are removed.

A folder with fewer heads than a plain class can have opens in two ways. transformers runs the copy of `narrowing.py`
that lies beside the weights (`trust_remote_code=True`). headscope runs nothing that lies there: it reads the entry
`narrowed` of config.json and narrows the plain class with its own code.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.auto import modeling_auto

from headscope.errors import CheckpointError, reason_of
from headscope.files.writing import write_failure
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface import narrowing
from headscope.formats.huggingface.narrowing import Narrowed, narrow
from headscope.formats.huggingface.native_models.from_native import quiet_transformers
from headscope.model.attention import attend

MODULE = "modeling_headscope"
EMPTY = "headscope-no-heads"


def attend_without_heads(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """`attend` over no heads, so that a layer without any keeps its place in the count of layers."""
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    if mask is not None and mask.shape[1] > 1:  # that of Doge has all heads
        mask = mask[:, :1]
    _, weights = attend(module, query[:, :0], key[:, :0], value[:, :0], mask=mask)
    return query.new_zeros(query.shape[0], query.shape[2], 1, value.shape[3]), weights


AttentionInterface.register(EMPTY, attend_without_heads)


def is_narrowed(config: Any) -> bool:
    """Whether a config describes a model with fewer heads than its plain class has."""
    return getattr(config, "narrowed", None) is not None


@cache
def narrowed_class(plain: Any) -> Any:
    """The subclass of a transformers class that is narrowed as its config says; `plain_shapes` are those before."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, config, *args, **kwargs)
        self.plain_shapes = {name: tuple(weight.shape) for name, weight in self.base_model.named_parameters()}
        narrow(self, getattr(config, "narrowed", None), empty=EMPTY)

    attributes = {"__init__": build, "is_custom_code": classmethod(lambda cls: False), "__module__": __name__}
    return type(plain.__name__, (plain,), attributes)


def write_code(folder: Path, config: Any, model: Any) -> dict[str, str]:
    """Write the modelling file of a narrowed model; returns what `auto_map` in config.json must say."""
    classes = _classes(config)
    names = sorted({*classes.values(), plain_name(model)})
    start = "# The classes that config.json names in auto_map.\n\nimport transformers  # noqa: E402\n"
    subclasses = start + "".join(
        f'\n\nclass {name}(Narrowed, transformers.{name}):\n    """{name} with the heads that config.json lists."""\n'
        for name in names
    )
    (folder / f"{MODULE}.py").write_text(f"{inspect.getsource(narrowing)}\n\n{subclasses}", encoding="utf-8")
    return {auto: f"{MODULE}.{name}" for auto, name in classes.items()}


def plain_name(model: Any) -> str:
    """The name of the class in transformers that a model is of, or derives from."""
    for cls in type(model).__mro__:
        if cls.__module__.startswith("transformers.") and hasattr(transformers, cls.__name__):
            return cls.__name__
    raise AssertionError(f"{type(model).__name__} is no class of transformers")


def _classes(config: Any) -> dict[str, str]:
    """What each AutoModel of transformers makes of a config: {auto class: class}."""
    classes = {}
    for auto, cls in vars(modeling_auto).items():
        mapping = getattr(cls, "_model_mapping", None)
        if not re.fullmatch(r"AutoModel\w*", auto) or mapping is None or type(config) not in mapping:
            continue
        model_class = mapping[type(config)]
        model_class = model_class[0] if isinstance(model_class, tuple) else model_class
        if hasattr(transformers, model_class.__name__):
            classes[auto] = model_class.__name__
    return classes


__all__ = ["EMPTY", "MODULE", "Narrowed", "is_narrowed", "narrowed_class", "plain_name", "write_code"]


STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def write_folder(checkpoint: Checkpoint, folder: Path) -> bool:
    """Write weights in the type that the source stores them in, config, and tokenizer.

    Returns whether there is a modelling file too, because the class in transformers cannot hold the model.
    """
    model: Any = with_stored_dtype(checkpoint)
    config = model.config
    narrowed = is_narrowed(config)
    if narrowed:
        config.auto_map = write_code(folder, config, model)
    elif hasattr(config, "auto_map"):
        del config.auto_map
    with quiet_transformers():
        try:
            model.save_pretrained(folder)
        except Exception as error:  # whatever transformers may raise
            if write_failure(error):
                raise
            raise CheckpointError(f"it cannot be saved: {reason_of(error, most=200)}") from error
        tokenizer = getattr(checkpoint, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path := Path(checkpoint.path) / name).is_file():
            shutil.copyfile(path, folder / name)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        content = json.loads(settings.read_text(encoding="utf-8"))
        if content.pop("auto_map", None) is not None:
            settings.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return narrowed


def with_stored_dtype(checkpoint: Checkpoint) -> nn.Module:
    """The model in the type that its checkpoint stores, where it was widened to compute with it."""
    stored = _stored_dtype(checkpoint.path)
    if stored is None or torch.promote_types(stored, checkpoint.dtype) != checkpoint.dtype:
        return checkpoint.model
    if stored == checkpoint.dtype:
        return checkpoint.model
    return copy.deepcopy(checkpoint.model).to(stored)


def _stored_dtype(path: str) -> torch.dtype | None:
    """The one type of all weights of a local folder, what config.json says elsewhere; None if there are several."""
    from transformers import AutoConfig

    if files := list(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []:
        dtypes = set()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                dtypes |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
        return STORED.get(dtypes.pop()) if len(dtypes) == 1 else None
    try:
        with quiet_transformers():
            dtype = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True).dtype
    except (OSError, ValueError):
        return None
    return dtype if isinstance(dtype, torch.dtype) else None
