"""Gradients of one number per sentence with respect to every head's context, in one backward pass.

The contexts of the lowest layers are made the leaves of the graph and the parameters take no part in it, so
nothing below the first attention is walked through again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headscope.model.attention import AttentionCall, tapped


@contextmanager
def frozen_parameters(model: nn.Module, *, trainable: bool = False) -> Iterator[None]:
    """Within the block no parameter takes part in gradients (with `trainable` every one does); then as before."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(trainable)
    try:
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


@contextmanager
def differentiable_contexts() -> Iterator[None]:
    """Within the block gradients are on, and every `AttentionCall.context` is part of the graph.

    The calls' contexts are those before mixing and gates; gates that are open or closed around the block are
    walked through.
    """

    def tap(call: AttentionCall, _: Tensor) -> None:
        if not call.context.requires_grad:
            call.context.requires_grad_()

    with torch.enable_grad(), tapped(tap, before_mixing=True, first=True):
        yield


def gradients_of(values: Tensor, contexts: Sequence[Tensor]) -> list[Tensor]:
    """d(Σ values)/d(context) for every context [b h t k]; zeros where values [b] do not depend on one.

    Sentences of a batch do not touch each other, so row i is the gradient of values[i]. Frees the graph.
    """
    if not (values.requires_grad and contexts):
        return [torch.zeros_like(context) for context in contexts]
    found = torch.autograd.grad(values.sum(), list(contexts), allow_unused=True)
    return [
        torch.zeros_like(context) if gradient is None else gradient
        for context, gradient in zip(contexts, found, strict=True)
    ]
