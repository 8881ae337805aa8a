"""L-BFGS of many independent problems at once: each column has its own step, history and end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

HISTORY, SHRINK, ARMIJO = 8, 0.3, 1e-4

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Parameters [d h] → losses [h] that are minimised, their gradient [d h], and the losses [h] that are watched."""


@dataclass
class _Memory:
    """The last steps and changes of the gradient, each [d h]; a pair without curvature has the weight 0."""

    scale: Tensor
    pairs: deque[tuple[Tensor, Tensor, Tensor]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    gamma: Tensor | None = None

    def add(self, step: Tensor, change: Tensor, moved: Tensor) -> None:
        curvature = (step * change).sum(dim=0)  # [h]
        usable = moved & (curvature > 1e-12)
        weight = torch.where(usable, 1 / curvature.clamp(min=1e-12), 0.0)
        self.pairs.append((step, change, weight))
        size = (change * change * self.scale).sum(dim=0)
        gamma = torch.ones_like(size) if self.gamma is None else self.gamma
        self.gamma = torch.where(usable, curvature / size.clamp(min=1e-12), gamma)

    def direction(self, gradient: Tensor) -> Tensor:
        """Minus the inverse Hessian times the gradient [d h] (Nocedal & Wright 2006, algorithm 7.4)."""
        q, alphas = gradient.clone(), []
        for step, change, weight in reversed(self.pairs):
            alphas.append(weight * (step * q).sum(dim=0))
            q.sub_(change * alphas[-1])
        q.mul_(self.scale if self.gamma is None else self.scale * self.gamma)
        for (step, change, weight), alpha in zip(self.pairs, reversed(alphas), strict=True):
            q.add_(step * (alpha - weight * (change * q).sum(dim=0)))
        return q.neg_()


def minimise(evaluate: Evaluate, start: Tensor, *, scale: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The parameters [d h] whose watched losses [h] are the least of those met in so many steps, and these losses.

    Columns are problems of their own: one whose step does not lower its loss (Armijo) tries a shorter one while the
    others go on, so a step of all costs one evaluation. `scale` [d 1] is a first guess of the inverse Hessian.
    The start counts, so no column ends with a larger watched loss than it began with.
    """
    at = start
    loss, gradient, watched = evaluate(at)
    best, least = at.clone(), watched
    memory, length = _Memory(scale), torch.ones_like(loss)
    direction = memory.direction(gradient)
    slope = (gradient * direction).sum(dim=0)
    for _ in range(steps):
        trial = at + direction * length
        new_loss, new_gradient, new_watched = evaluate(trial)
        accepted = new_loss <= loss + ARMIJO * length * slope  # [h]; not where a loss is NaN
        step, change = torch.where(accepted, trial - at, 0.0), torch.where(accepted, new_gradient - gradient, 0.0)
        at, gradient = torch.where(accepted, trial, at), torch.where(accepted, new_gradient, gradient)
        loss = torch.where(accepted, new_loss, loss)
        better = accepted & (new_watched < least)
        best, least = torch.where(better, at, best), torch.where(better, new_watched, least)
        memory.add(step, change, accepted)
        direction = torch.where(accepted, memory.direction(gradient), direction)
        slope = (gradient * direction).sum(dim=0)
        uphill = slope >= 0
        direction = torch.where(uphill, -gradient * scale, direction)
        slope = torch.where(uphill, (gradient * direction).sum(dim=0), slope)
        length = torch.where(accepted, 1.0, length * SHRINK)
    return best, least
