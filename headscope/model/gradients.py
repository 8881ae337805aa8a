"""Gradients of one number per sentence with respect to every head's context, in one backward pass.

The contexts of the lowest layers are the leaves of the graph and parameters need no gradients, so the backward pass
ends at the first attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headscope.model.attention import AttentionCall, tapped
from headscope.model.stored_weights import is_offloaded


@contextmanager
def frozen_parameters(model: nn.Module, *, trainable: bool = False) -> Iterator[None]:
    """Within the block no parameter requires gradients (with `trainable` all do); restored afterwards.

    Of offloaded modules embeddings alone do: a graph would keep the weights of the others. Integers never do.
    """
    before = [
        (module, name, parameter.requires_grad)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    for module, name, _ in before:
        kept = isinstance(module, nn.Embedding) or not is_offloaded(module)
        _require_gradient(module, name, trainable and kept)
    try:
        yield
    finally:
        for module, name, flag in before:
            _require_gradient(module, name, flag)


def _require_gradient(module: nn.Module, name: str, flag: bool) -> None:
    parameter = module.get_parameter(name)
    if parameter.is_inference():  # what accelerate left in the place of an offloaded weight; it cannot be changed
        parameter = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        module.register_parameter(name, parameter)
    parameter.requires_grad_(flag and parameter.is_floating_point())


class _Unclipped(TorchFunctionMode):
    """Gives back what is to be clipped as it is, where gradients run through it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch computes it; of a function that clips, its first argument."""
        clips = getattr(function, "__name__", "") in _CLIPS and args and isinstance(args[0], Tensor)
        return args[0] if clips and args[0].requires_grad else function(*args, **(kwargs or {}))


_CLIPS = frozenset(["clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max", "hardtanh", "hardtanh_"])


def unclipped() -> TorchFunctionMode:
    """Within the block numbers that have gradients are not clipped: what a clip cuts off would seem to come from
    nowhere (OLMo's `clip_qkv`). Which weight makes which number stays as it is, the numbers do not.
    """
    return _Unclipped()


@contextmanager
def differentiable_contexts() -> Iterator[None]:
    """Within the block gradients are on, and every `AttentionCall.context` is part of the graph.

    These are the contexts before mixing and gates; gates that are active around the block are differentiated through.
    """

    def tap(call: AttentionCall, _: Tensor) -> None:
        if not call.context.requires_grad:
            call.context.requires_grad_()

    with torch.enable_grad(), tapped(tap, before_mixing=True, first=True):
        yield


def gradients_of(values: Tensor, contexts: Sequence[Tensor]) -> list[Tensor]:
    """d(Σ values)/d(context) for every context [b h t k]; zeros where values [b] do not depend on a context.

    Sentences of a batch are independent, so row i is the gradient of values[i]. Frees the graph.
    """
    if not (values.requires_grad and contexts):
        return [torch.zeros_like(context) for context in contexts]
    gradients = torch.autograd.grad(values.sum(), list(contexts), allow_unused=True)
    return [
        torch.zeros_like(context) if gradient is None else gradient
        for context, gradient in zip(contexts, gradients, strict=True)
    ]
