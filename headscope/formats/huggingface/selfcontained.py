"""Hugging Face folders with fewer heads than a plain class can have: how they are written and recognised.

Such a folder opens in two ways. transformers runs the copy of `narrowing.py` that lies beside the weights
(`trust_remote_code=True`). headscope runs nothing that lies there: it reads the entry `narrowed` of config.json and
narrows the plain class with its own code.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.auto import modeling_auto

from headscope.formats.huggingface import narrowing
from headscope.formats.huggingface.narrowing import Narrowed, narrow
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
    text = inspect.getsource(narrowing) + "\n\n" + _subclasses(names)
    (folder / f"{MODULE}.py").write_text(text, encoding="utf-8")
    return {auto: f"{MODULE}.{name}" for auto, name in classes.items()}


def _subclasses(names: list[str]) -> str:
    start = "# The classes that config.json names in auto_map.\n\nimport transformers  # noqa: E402\n"
    return start + "".join(
        f'\n\nclass {name}(Narrowed, transformers.{name}):\n    """{name} with the heads that config.json lists."""\n'
        for name in names
    )


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
