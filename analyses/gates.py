"""The values of a model's own head gates (Voita et al. 2019, §5)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headscope.bootstrap import Estimate
from headscope.config.declarations import Measure
from headscope.engine.base import Analysis, analysis
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.mixing.base import mixings_of
from headscope.model.mixing.linear import open_probability

CLOSED = "the model's own gates close them most"


@analysis
class Gates(Analysis):
    """Gates of models that were trained with them: `gate` is the factor on a context at test time.

    `gate_log_a` is the parameter, `gate_open` P(gate ≠ 0), `gate_one` P(gate = 1), at temperature 0.33 and stretch
    (−0.1, 1.1). Fixed 0/1 gates have no parameter. Exact: low = high = value.
    """

    name = "gates"
    order = 131
    summary = "a model's own head gates: value, log_a and the probability of being open"
    measures = (
        Measure("gate", "gate at test time", range=(0, 1), keep="highest", why=CLOSED),
        Measure("gate_log_a", "gate parameter log a", signed=True, keep="highest", why=CLOSED),
        Measure("gate_open", "probability of an open gate", range=(0, 1), keep="highest", why=CLOSED),
        Measure("gate_one", "probability of a gate of 1", range=(0, 1), keep="highest", why=CLOSED),
    )
    passes = frozenset()

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return None if any(True for _ in _gates(checkpoint)) else "is for models with head gates; this one has none"

    def inspect(self, checkpoint: Checkpoint) -> None:
        for site, layer, gates, logits in _gates(checkpoint):
            for name, values in gate_numbers(gates, logits).items():
                self.exact.setdefault(name, {})[site, layer] = Estimate.exact(values)


def gate_numbers(values: Tensor, logits: Tensor | None) -> dict[str, Tensor]:
    """Every column of one layer, [h] each, of gates [h] and their parameters [h], if they have any."""
    value = values.detach().double()
    log_a = torch.full_like(value, torch.nan) if logits is None else logits.detach().double()
    return {
        "gate": value,
        "gate_log_a": log_a,
        "gate_open": open_probability(log_a),
        "gate_one": open_probability(log_a, fully=True),
    }


def _gates(checkpoint: Checkpoint) -> Iterator[tuple[Site, int, Tensor, Tensor | None]]:
    for site, layer, mixing in mixings_of(checkpoint.model):
        if (values := mixing.gates()) is not None:
            yield site, layer, values, mixing.gate_logits()
