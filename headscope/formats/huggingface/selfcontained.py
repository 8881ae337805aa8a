"""Writing Hugging Face folders: in the stored types, with their own code if heads are removed, or as a plain class.

transformers runs the copy of `narrowing.py` beside the weights (`trust_remote_code=True`); headscope runs no code of a
folder, and narrows the plain class by `narrowed` of config.json. A plain class can have fewer heads if its config has
both the number and the width of heads.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.auto import modeling_auto

from headscope.errors import CheckpointError, ConfigError, flag, reason_of
from headscope.files.writing import write_failure
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface import narrowing
from headscope.formats.huggingface.companions.folder import CONFIG, copy_companions, json_object, local_folder
from headscope.formats.huggingface.narrowing import EMPTY, Narrowed
from headscope.model.attention import ScoreOptions, attend
from headscope.model.interface import quiet_transformers
from headscope.model.removal_plan import RemovalPlan, padded_plan
from headscope.model.stored_weights import copy_sharing_weights, written_type

MODULE = "modeling_headscope"


def attend_without_heads(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Call `attend` with 0 heads, so that layers without heads are counted as well."""
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    if mask is not None and mask.shape[1] > 1:  # that of Doge has all heads
        mask = mask[:, :1]
    _, weights = attend(module, query[:, :0], key[:, :0], value[:, :0], ScoreOptions(mask))
    return query.new_zeros(query.shape[0], query.shape[2], 1, value.shape[3]), weights


AttentionInterface.register(EMPTY, attend_without_heads)


def is_narrowed(config: Any) -> bool:
    """Whether a config describes a model with fewer heads than its plain class has."""
    return getattr(config, "narrowed", None) is not None


@cache
def narrowed_class(plain: Any) -> Any:
    """The subclass of a transformers class that is narrowed by its config."""
    return type(plain.__name__, (Narrowed, plain), {"__module__": __name__})


def write_code(folder: Path, config: Any, model: Any) -> dict[str, str]:
    """Write the modelling file of a narrowed model; return the `auto_map` for config.json."""
    classes = dict[str, str]()
    for auto, cls in vars(modeling_auto).items():
        mapping = getattr(cls, "_model_mapping", None)
        if re.fullmatch(r"AutoModel\w*", auto) and mapping is not None and type(config) in mapping:
            model_class = mapping[type(config)]
            model_class = model_class[0] if isinstance(model_class, tuple) else model_class
            if hasattr(transformers, model_class.__name__):
                classes[auto] = model_class.__name__
    names = sorted({*classes.values(), plain_name(model)})
    subclasses = "# The classes that config.json names in auto_map.\n\nimport transformers  # noqa: E402\n" + "".join(
        f'\n\nclass {name}(Narrowed, transformers.{name}):\n    """{name} with the heads that config.json lists."""\n'
        for name in names
    )
    (folder / f"{MODULE}.py").write_text(f"{inspect.getsource(narrowing)}\n\n{subclasses}", encoding="utf-8")
    return {auto: f"{MODULE}.{name}" for auto, name in classes.items()}


def plain_name(model: Any) -> str:
    """The name of a model's class in transformers, or of the one that its class derives from."""
    for cls in type(model).__mro__:
        if cls.__module__.startswith("transformers.") and hasattr(transformers, cls.__name__):
            return cls.__name__
    raise AssertionError(f"{type(model).__name__} is no class of transformers")


STORED_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def write_folder(checkpoint: Checkpoint, folder: Path) -> bool:
    """Write weights in the stored types, config, tokenizer and companions; return whether it wrote a modelling file."""
    model: Any = stored_copy(checkpoint, allows_mixed=True).model
    config = model.config
    has_narrow_config = is_narrowed(config)
    if has_narrow_config:
        config.auto_map = write_code(folder, config, model)
    elif hasattr(config, "auto_map"):
        del config.auto_map
    with quiet_transformers():
        try:
            model.save_pretrained(folder)
        except Exception as error:  # whatever transformers may raise
            if write_failure(error):
                raise
            raise CheckpointError(f"it cannot be saved: {reason_of(error, max_length=200)}") from error
        tokenizer = getattr(checkpoint, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    if (source := local_folder(checkpoint.path)) is not None:
        copy_companions(source, folder)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        content = json.loads(settings.read_text(encoding="utf-8"))
        if content.pop("auto_map", None) is not None:
            settings.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return has_narrow_config


def stored_copy(checkpoint: Checkpoint, *, allows_mixed: bool = False) -> Checkpoint:
    """The checkpoint in its stored type; `allows_mixed`: also in several types, which cannot be computed with."""
    types = {
        name: written_type(name, part, checkpoint.stored_dtype) for name, part in checkpoint.model.named_parameters()
    }
    if {*types.values()} == {checkpoint.dtype} or (len({*types.values()}) > 1 and not allows_mixed):
        return checkpoint
    model = copy_sharing_weights(checkpoint.model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(written_type(name, tensor, checkpoint.stored_dtype))
    return checkpoint.with_model(model)


def stored_types(path: str) -> dict[str, torch.dtype]:
    """The stored types of weights by name; under "" if safetensors have one type, or only config.json states it."""
    if (folder := local_folder(path)) is None:
        return {}
    if files := list(folder.glob("*.safetensors")):
        type_by_name: dict[str, torch.dtype] = {}
        for file in files:
            with safe_open(file, framework="pt") as weights_file:
                types = {key: STORED_TYPES.get(weights_file.get_slice(key).get_dtype()) for key in weights_file.keys()}  # noqa: SIM118
                type_by_name |= {key: dtype for key, dtype in types.items() if dtype is not None}
        kinds = {*type_by_name.values()}
        return {"": kinds.pop()} if len(kinds) == 1 else type_by_name
    config = json_object(folder / CONFIG)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return {"": dtype} if isinstance(dtype, torch.dtype) else {}


WIDTHS = ("d_kv", "head_dim")
COUNTS = ("num_heads", "num_attention_heads")
STAND_INS = {"LlamaForCausalLM": {"MistralForCausalLM": {"sliding_window": None}}}
"""Equivalent classes, with settings, for a class that refuses heads that do not divide its width."""


def in_plain_class(shrunk: Checkpoint, removal: RemovalPlan) -> Checkpoint:
    """A shrunk checkpoint as a class of transformers without code of its own; ConfigError if no class expresses it."""
    model: Any = shrunk.model
    name, config = plain_name(model), model.config
    counts = set(removal.layout.values())
    groups = {len(groups_kept) for groups_kept in removal.groups.values()}
    refusals = {
        "has one number of heads for all layers, and they differ here": {0} >= counts or len(counts) + len(groups) > 2,
        "shares one position bias, so every layer has to keep the same heads": any(
            config.narrowed["bias_heads"].values()
        ),
        "has no biases in output projections, and the refit added some": config.narrowed["added_biases"],
    }
    if why := next((why for why, holds in refusals.items() if holds), None):
        how = f"one {flag.merge_kv} N" if removal.merged else f"heads of `prune rank --allocate uniform`, {flag.pad}"
        raise ConfigError(f"{flag.export} native: class {name} {why}; take {how}, or self-contained")
    return shrunk.with_model(_rebuilt(model, name, heads=counts.pop(), groups=groups.pop()))


def says_head_width(checkpoint: Checkpoint) -> bool:
    """Whether the config of a model's class, or of its stand-in, has the width of heads, so that it can have fewer."""
    model: Any = checkpoint.model
    settings = model.config.to_dict()
    return plain_name(model) in STAND_INS or any(settings.get(name) for name in WIDTHS)


def padded_in_plain_class(intact: Checkpoint, removal: RemovalPlan) -> Checkpoint:
    """The whole checkpoint as a plain class with as many heads in every layer: zeros in the place of removed ones."""
    zero_padded = intact.alter_heads(removal, "zero")
    plan = padded_plan(intact.attention_sites, removal)
    if plan.removed:
        smaller: Any = zero_padded.alter_heads(plan, "shrink")
        if not any(smaller.model.config.narrowed["bias_heads"].values()):
            return in_plain_class(smaller, plan)
        plan = padded_plan(intact.attention_sites, removal, same_heads=True)
    return in_plain_class(zero_padded.alter_heads(plan, "shrink"), plan) if plan.removed else zero_padded


def _rebuilt(model: Any, name: str, *, heads: int, groups: int) -> Any:
    weights, reasons = model.state_dict(), list[str]()
    settings = {**model.config.to_dict(), **_sizes(model.config, heads, groups)}
    for entry in ("narrowed", "kept_heads", "auto_map", "model_type", "architectures"):
        settings.pop(entry, None)
    for class_name, more in {name: {}, **STAND_INS.get(name, {})}.items():
        cls: Any = getattr(transformers, class_name)
        try:
            with quiet_transformers(), torch.device("meta"):
                config = cls.config_class.from_dict({**settings, **more})
                shapes = {key: values.shape for key, values in cls(config).state_dict().items()}
        except Exception as error:  # whatever the config's own checks, and sizes that do not fit one another, raise
            reasons.append(reason_of(error))
            continue
        if shapes == {key: values.shape for key, values in weights.items()}:
            return _fill_class(cls, config, model, weights)
    reason = reasons[0] if reasons else "it cannot say how wide a head is"
    raise ConfigError(
        f"{flag.export} native: a config of type {model.config.model_type!r} does not take {heads} heads and {groups} "
        f"key/value heads of the width that they have ({reason}); take self-contained"
    )


def _sizes(config: Any, heads: int, groups: int) -> dict[str, int]:
    settings = config.to_dict()
    number = next((name for name in COUNTS if name in settings), COUNTS[1])
    width = next((name for name in WIDTHS if settings.get(name)), WIDTHS[1])
    sizes = {number: heads} | ({"num_key_value_heads": groups} if settings.get("num_key_value_heads") else {})
    if settings.get(width):
        sizes[width] = int(settings[width])
    elif isinstance(settings.get("hidden_size"), int) and settings.get(number):
        sizes[width] = settings["hidden_size"] // settings[number]
    return sizes


def _fill_class(cls: Any, config: Any, model: Any, weights: dict[str, Any]) -> Any:
    own = model.config
    with quiet_transformers():
        filled_model = cls._from_config(config, dtype=model.dtype, attn_implementation=own._attn_implementation)
    if filled_model.config._experts_implementation != own._experts_implementation:
        filled_model.set_experts_implementation(own._experts_implementation)  # in double precision an eager one
    filled_model = filled_model.to(model.device)
    filled_model.load_state_dict(weights)
    if getattr(model, "generation_config", None) is not None:
        filled_model.generation_config = model.generation_config
    return filled_model.train(model.training)
