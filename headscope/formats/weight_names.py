"""Names of weights in files and in the model: a prefix that wrappers left behind, and those that do not fit.

transformers fills what a file lacks with random numbers, so missing, left-over and mismatched weights are refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from torch import nn

from headscope.errors import CheckpointError, shortlist

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts that torch puts within names too, where it wraps the layers of a model: compiled, sharded, or recomputed."""
# Weights that a checkpoint may lack without any head being affected: the pooler is trained with a task.
_MAY_BE_MISSING = re.compile(r"(^|\.)pooler\.")
_LAYER = re.compile(r"\.\d+\.")
_ADAPTED = re.compile(
    r"\.(lora_[a-zA-Z_]+|base_layer|modules_to_save|original_module|ia3_l|hada_\w+|lokr_\w+|oft_\w+)\b"
)
"""Names that PEFT puts into a model."""
_CONSTANT = re.compile(r"\.(masked_bias|inv_freq|position_ids)$")
"""What earlier releases of transformers saved besides weights: masks, frequencies and positions."""


def common_prefix(info: Mapping[str, Any], model: nn.Module) -> tuple[str, dict[str, str]]:
    """The prefix of all weights that were left over where others are missing, and patterns that take it off."""
    names = list(info["unexpected_keys"])
    if not names or not info["missing_keys"]:
        return "", {}
    bare = [_unwrapped(name) for name in names]
    exact = {*model.state_dict()}
    expected = _names_of(model)
    columns = zip(*(name.split(".")[:-1] for name in bare), strict=False)  # up to the shortest name
    shared = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
    prefixes = ["", *accumulate(f"{part}." for part in shared)]

    def fitting(prefix: str) -> tuple[int, int]:
        without = [name.removeprefix(prefix) for name in bare]
        return sum(name in expected for name in without), sum(name in exact for name in without)

    best = max(prefixes, key=fitting)  # the shortest of those that fit as well
    wrappers = [wrapper for wrapper in WRAPPERS if any(wrapper in name for name in names)]
    if not fitting(best)[0] or not (best or wrappers):
        return "", {}
    renamings = {re.escape(wrapper): "" for wrapper in wrappers} | ({f"^{re.escape(best)}": ""} if best else {})
    rest = bare[0].removeprefix(best)
    said = names[0].removesuffix(rest) if names[0].endswith(rest) else ", ".join([*wrappers, *filter(None, [best])])
    return said, renamings


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _names_of(model: nn.Module) -> set[str]:
    """Names of a model's weights, with and without the prefix of the model inside its task head."""
    within = f"{getattr(model, 'base_model_prefix', '')}."
    names: Iterable[str] = model.state_dict()
    return {each for name in names for each in (name, within + name, name.removeprefix(within))}


def forget_renamings(model: nn.Module, renamings: Mapping[str, str]) -> None:
    """Let `save_pretrained` write the names of the model: transformers would restore those of the files."""
    kept = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [each for each in kept if not {*each._original_source_patterns} & {*renamings}]  # type: ignore[assignment]


def check_weights(path: str, info: dict[str, Any], absent: frozenset[str], model: Any) -> None:
    """Refuse a checkpoint whose weights do not fill the model that its config describes, but for those `absent`."""
    left_over = sorted(key for key in info["unexpected_keys"] if not _CONSTANT.search(f".{key}"))
    missing = sorted(key for key in {*info["missing_keys"]} - absent if not _MAY_BE_MISSING.search(key))
    extra = [key for key in left_over if _LAYER.search(f".{key}.")]
    if (missing or extra) and (adapted := [key for key in left_over if _ADAPTED.search(key)]):
        raise CheckpointError(
            f"{path} holds weights of a model with an adapter (PEFT: {shortlist(adapted)}); merge it in Python with "
            "merge_and_unload() and save the result with save_pretrained"
        )
    sizes = sorted((name, *map(size_text, shapes)) for name, *shapes in info["mismatched_keys"])
    others = f" (the files have {shortlist(left_over)} instead)" if left_over else ""
    problems = {
        "of another size than config.json says": [f"{name} ({own}, config.json: {its})" for name, own, its in sizes],
        f"missing{others}": missing,
        f"left over, {type(model).__name__} has no such parts (does config.json say fewer layers?)": extra,
    }
    refuse_weights(path, problems, "; config.json and the weights must agree")


def refuse_weights(path: str, problems: Mapping[str, Sequence[str]], advice: str = "") -> None:
    """CheckpointError for the first problem that some weights have."""
    for problem, names in problems.items():
        if names:
            raise CheckpointError(f"{path}: weights are {problem}: {shortlist(names)}{advice}")


def size_text(size: Iterable[int]) -> str:
    """The size of a weight in words."""
    return "×".join(map(str, size)) or "one number"
