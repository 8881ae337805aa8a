"""Fewer heads in a class of transformers as it stands: where its config has a place for their number and width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers

from headscope.errors import ConfigError, reason_of
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.native_models.from_native import quiet_transformers
from headscope.formats.huggingface.selfcontained import plain_name
from headscope.model.removal_plan import RemovalPlan, padded_plan

WIDTHS = ("d_kv", "head_dim")
COUNTS = ("num_heads", "num_attention_heads")
STAND_INS = {"LlamaForCausalLM": ("MistralForCausalLM", {"sliding_window": None})}
"""Classes that compute the same where the first refuses a width that its heads do not divide, and what they need."""


def in_plain_class(shrunk: Checkpoint, removal: RemovalPlan) -> Checkpoint:
    """A shrunk checkpoint as a class of transformers without code of its own; ConfigError where there is none."""
    model: Any = shrunk.model
    name, config = plain_name(model), model.config
    counts = set(removal.layout.values())
    groups = {len(kept) for kept in removal.groups.values()}
    if len(counts) != 1 or 0 in counts or len(groups) != 1:
        raise ConfigError(
            f"--export native: class {name} has one number of heads for all layers, and they differ here; remove as "
            "many everywhere (prune rank --allocate uniform), "
            "fill up with heads of zeros (--pad), or take self-contained"
        )
    if config.narrowed["bias_heads"]:
        raise ConfigError(
            "--export native: the layers share one position bias, so the plain class needs the same heads removed "
            "from every layer; do that, fill up with heads of zeros (--pad), or take self-contained"
        )
    if config.narrowed["added_biases"]:
        raise ConfigError(
            f"--export native: the refit added biases to output projections, which class {name} "
            "has not; say --export native when the heads are removed, or take self-contained"
        )
    return shrunk.with_model(_rebuilt(model, name, heads=counts.pop(), groups=groups.pop()))


def says_head_width(model: Any) -> bool:
    """Whether the config of a model's class, or of its stand-in, says how wide a head is, so that it can have fewer."""
    known = model.config.to_dict()
    return plain_name(model) in STAND_INS or any(known.get(name) for name in WIDTHS)


def padded_in_plain_class(whole: Checkpoint, removal: RemovalPlan) -> Checkpoint:
    """The whole checkpoint without heads that are gone in every layer, zeros in place of others, as a plain class."""
    zeroed = whole.with_zeroed_heads(removal)
    plan = padded_plan(whole.attention_sites, removal)
    if plan.removed:
        smaller: Any = zeroed.without_heads(plan)
        if not smaller.model.config.narrowed["bias_heads"]:
            return in_plain_class(smaller, plan)
        plan = padded_plan(whole.attention_sites, removal, same_heads=True)
    return in_plain_class(zeroed.without_heads(plan), plan) if plan.removed else zeroed


def _rebuilt(model: Any, name: str, *, heads: int, groups: int) -> Any:
    """A model of the plain class, or of its stand-in, with the weights of a shrunk one."""
    weights = model.state_dict()
    reasons: list[str] = []
    shapes = {key: values.shape for key, values in weights.items()}
    for cls, config in _candidates(model.config, name, heads=heads, groups=groups, reasons=reasons):
        try:
            with torch.device("meta"):
                built = cls(config)
        except Exception as error:  # whatever sizes that do not fit one another may raise
            reasons.append(reason_of(error))
            continue
        if {key: values.shape for key, values in built.state_dict().items()} == shapes:
            return _filled(cls, config, model, weights)
    refused = f" ({reasons[0]})" if reasons else ""
    why = f"cannot say how wide a head is, so its heads would get wider as they get fewer{refused}"
    if reasons and any(getattr(model.config, name, None) for name in WIDTHS):
        why = f"does not take {heads} heads and {groups} key/value heads of the width that they have ({reasons[0]})"
    raise ConfigError(f"--export native: a config of type {model.config.model_type!r} {why}; take self-contained")


def _candidates(config: Any, name: str, *, heads: int, groups: int, reasons: list[str]) -> Iterator[tuple[Any, Any]]:
    """Classes with a config of so many heads; `reasons` collects why a config refuses them."""
    stand_in = [STAND_INS[name]] if name in STAND_INS else []
    for class_name, more in [(name, {}), *stand_in]:
        cls: Any = getattr(transformers, class_name)
        values = {**config.to_dict(), **_sizes(config, heads, groups), **more}
        for entry in ("narrowed", "kept_heads", "auto_map", "model_type", "architectures"):
            values.pop(entry, None)
        try:
            with quiet_transformers():
                made = cls.config_class.from_dict(values)
        except Exception as error:  # whatever the config's own checks raise
            reasons.append(reason_of(error))
            continue
        yield cls, made


def _sizes(config: Any, heads: int, groups: int) -> dict[str, int]:
    """The entries of a config that say how many heads there are and how wide they are."""
    known = config.to_dict()
    number = next((name for name in COUNTS if name in known), COUNTS[1])
    width = next((name for name in WIDTHS if known.get(name)), WIDTHS[1])
    sizes = {number: heads}
    if known.get("num_key_value_heads"):
        sizes["num_key_value_heads"] = groups
    if known.get(width):
        return {**sizes, width: int(known[width])}
    if isinstance(known.get("hidden_size"), int) and known.get(number):
        return {**sizes, width: known["hidden_size"] // known[number]}
    return sizes


def _filled(cls: Any, config: Any, model: Any, weights: dict[str, Any]) -> Any:
    """A model of the class with the weights, in the type and on the device of the shrunk one."""
    with quiet_transformers():
        built = cls._from_config(config, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    if built.config._experts_implementation != model.config._experts_implementation:
        built.set_experts_implementation(model.config._experts_implementation)  # in double precision an eager one
    built = built.to(model.device)
    built.load_state_dict(weights)
    if getattr(model, "generation_config", None) is not None:
        built.generation_config = model.generation_config
    return built.train(model.training)
