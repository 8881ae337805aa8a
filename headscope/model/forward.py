"""One batch as a model takes it, what a pass over it gives, and how far that is from another's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.model.discovery import base_of
from headscope.model.threads import threads_for_pass

PATCH = 16 * 16 * 3  # numbers of a picture that are one position of most models


@dataclass(frozen=True)
class ModelInputs:
    """One batch as a model takes it; `real` [b t] tells which outputs are of tokens (None: all)."""

    arguments: dict[str, Tensor]
    real: Tensor | None

    @property
    def positions(self) -> int:
        """Positions of the longer side, padding included; of pictures about so many."""
        texts = [values.numel() for values in self.arguments.values() if values.ndim == 2]
        return max(texts, default=next(iter(self.arguments.values())).numel() // PATCH)

    def rows(self, order: Tensor) -> ModelInputs:
        """The sentences `order`, in that order and as often."""
        picked = {name: values.index_select(0, order.to(values.device)) for name, values in self.arguments.items()}
        return ModelInputs(picked, None if self.real is None else self.real.index_select(0, order.to(self.real.device)))


def outputs(model: nn.Module, batch: ModelInputs) -> Tensor:
    """Logits (or the final states of a model without a head): [n V] of the real positions, else as they come."""
    if type(model).__name__.endswith("ForMultipleChoice"):  # it takes several texts for one answer
        model = base_of(model)
    with torch.no_grad(), threads_for_pass(model, batch.positions):
        result: Any = model(**batch.arguments)
    if not isinstance(result, Tensor):
        logits = getattr(result, "logits", None)
        result = result[0] if logits is None else logits
    if batch.real is not None and result.ndim == 3 and result.shape[:2] == batch.real.shape:
        result = result[batch.real]
    chosen: Tensor = result
    return chosen


def max_abs_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest expected number (or of 1)."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    same = actual == expected  # -inf too, where a model masks what it must not say; NaN equals nothing
    difference = (actual - expected).abs().masked_fill(same, 0.0).max()
    largest = expected.abs().masked_fill(expected.isinf(), 0.0).max().clamp(min=1.0)
    share = float(difference / largest)
    return share if share == share else float("inf")
