"""Causal Head Gating sentence by sentence, with hooks on output projections and Adam written out.

Written from decoders.md §9. Gates are numbered by site (encoder, decoder, cross), layer and head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headscope.formats.base import Checkpoint
from tests.oracles.speakers import Example


@contextmanager
def multiply_inputs(modules: Sequence[Any], gates: Tensor) -> Iterator[None]:
    """Within the block the input of every module is multiplied by its heads' gates."""
    parts = gates.view(len(modules), -1)

    def hook(part: Tensor) -> Any:
        return lambda _, inputs: ((inputs[0].unflatten(-1, (len(part), -1)) * part[:, None]).flatten(-2),)

    handles = [module.register_forward_pre_hook(hook(part)) for module, part in zip(modules, parts, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def objective(checkpoint: Checkpoint, modules: list[Any], batch: list[Example], theta: Tensor, pull: float) -> Tensor:
    """−mean over sentences of the mean log p of what is asked, less λ times the mean of θ, clipped."""
    total = torch.zeros(()).double()
    with multiply_inputs(modules, 1 / (1 + torch.exp(-theta))):
        for example in batch:
            total = total + example.loss(checkpoint) / len(example.labels)
    penalty = torch.stack([torch.clamp(value, -4, 4) for value in theta])
    return total / len(batch) - pull * penalty.sum() / len(theta)


def run_adam(
    checkpoint: Checkpoint,
    modules: list[Any],
    batch: list[Example],
    theta: Tensor,
    *,
    pull: float,
    rates: tuple[float, float],
    steps: int,
) -> Tensor:
    """θ after so many updates of Adam, whose rate falls on a line; gradients are cut to a norm of 1."""
    mean, square = torch.zeros_like(theta), torch.zeros_like(theta)
    for step in range(steps):
        variable = theta.clone().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(objective(checkpoint, modules, batch, variable, pull), variable)
        gradient = gradient * min(1.0, 1 / (float(gradient.square().sum()) ** 0.5 + 1e-6))
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        ahead, spread = mean / (1 - 0.9 ** (step + 1)), square / (1 - 0.999 ** (step + 1))
        rate = rates[0] + (rates[1] - rates[0]) * step / steps
        theta = theta - rate * ahead / (spread.sqrt() + 1e-8)
    return theta
