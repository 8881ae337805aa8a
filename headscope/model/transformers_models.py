"""What is asked of models of transformers without importing transformers, which takes seconds.

Nothing can be an instance of a class whose module was never imported.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from torch import Tensor, nn

from headscope.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

IMPLEMENTATION = "headscope"
"""The attention implementation of transformers that headscope registers."""
_HEAD_MASKS = frozenset({"head_mask", "decoder_head_mask", "cross_attn_head_mask"})


def is_pretrained(model: object) -> TypeGuard[PreTrainedModel]:
    """Whether a model is one of transformers."""
    return _is(model, "transformers.modeling_utils", "PreTrainedModel")


def is_linear(module: object) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is a linear layer: torch's, or transformers' Conv1D, whose weight is transposed."""
    return isinstance(module, nn.Linear) or _is(module, "transformers.pytorch_utils", "Conv1D")


def _is(instance: object, module: str, name: str) -> bool:
    imported = sys.modules.get(module)
    return imported is not None and isinstance(instance, getattr(imported, name))


def reads_input(model: nn.Module) -> bool:
    """Whether a model or a part of one takes what its class says that such models read: ids, pictures, sound."""
    return takes(model, getattr(model, "main_input_name", "input_ids"))


def takes(model: nn.Module, argument: str) -> bool:
    """Whether a model names an argument among those that it takes."""
    return argument in _arguments(type(model).forward)


@lru_cache(maxsize=256)  # read once a class and not at every pass
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def refuse_head_masks(arguments: Mapping[str, Any]) -> None:
    """CheckpointError for the head masks of transformers 4, which transformers 5 ignores silently."""
    for name in _HEAD_MASKS & arguments.keys():
        if arguments[name] is not None:
            raise CheckpointError(
                f"{name}= was given, which transformers 5 ignores; "
                "gate heads with `with headscope.model.taps.gated(model, …)` instead"
            )


NOT_TEXT = re.compile(r"vision|visual|image|audio|speech")
POSITIONS = re.compile(r"(?!.*relative).*position|wpe$")


def position_limit(model: nn.Module) -> int | None:
    """The most tokens that the model's tables of positions have rows for.

    None where there is no such table: positions are relative, rotary, or computed for as many tokens as there are.
    """
    limits: list[int] = []
    for path, module in model.named_modules():
        if NOT_TEXT.search(path):
            continue
        tables = [part for name, part in module.named_children() if POSITIONS.match(name) and _is_table(part)]
        for table in tables:
            padding = getattr(table, "padding_idx", None)  # RoBERTa and its like count from behind it
            first = getattr(table, "offset", 0 if padding is None else padding + 1)
            limits.append(len(cast(Tensor, table.weight)) - first)
        buffers = dict(module.named_buffers(recurse=False)) | vars(module)  # CTRL's table is no buffer
        limits += [len(rows) for name in ("embed_positions", "pos_encoding") if (rows := buffers.get(name)) is not None]
        limits += [buffers["position_ids"].shape[-1]] if tables and "position_ids" in buffers else []
    return min(limits, default=None)


def _is_table(module: nn.Module) -> bool:
    """Whether a module has rows to look up, and no more of them than these."""
    weight = getattr(module, "weight", None)
    grows = hasattr(module, "make_weight")
    return "Embedding" in type(module).__name__ and isinstance(weight, Tensor) and weight.ndim == 2 and not grows
