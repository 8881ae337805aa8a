"""How much of a model its most important heads do alone: CPR and CMD of the Mechanistic Interpretability Benchmark.

Mueller et al. 2025 (arXiv 2504.13151), as `evaluation.py` of the MIB circuit track computes them, with heads in
the place of edges: f(p) = (m(C_p) − m(∅)) / (m(all) − m(∅)), where C_p are the int(p · N) heads of the highest scores
while the others are ablated, and ∅ is the model with all of its N heads ablated. CPR is the area under f, CMD that
under |1 − f|, by trapezoids over p as it is: from 0.001 to 1, so that f ≡ 1 has a CPR of 0.999. There is nothing to
connect, and numbers are none of that benchmark's table.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headscope.engine.declarations import measure_of
from headscope.engine.faithfulness.orders import Scores, ordered
from headscope.heads import HeadId

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
By = Literal["signed", "absolute"]
"""Heads go by their scores, as for CPR, or by the size of these, as for CMD."""
CIRCUITS: tuple[By, ...] = ("signed", "absolute")


def circuit_order(name: str, scores: Scores, by: By) -> list[HeadId]:
    """The heads of a ranking, the most important first; the size matters only where scores have a sign."""
    sized = by == "absolute" and measure_of(name).signed
    return ordered({head: abs(score) for head, score in scores.items()} if sized else scores)


def circuit_masks(order: list[HeadId]) -> list[list[HeadId]]:
    """The heads that are ablated at each share of `SHARES`: all but the first int(share · N)."""
    return [order[int(share * len(order)) :] for share in SHARES]


def faithfulness(drops: Tensor, everything: Tensor) -> Tensor:
    """f [… p] of drops m(all) − m(C_p) [… p] and of m(all) − m(∅) [… 1]; NaN where ∅ does as well as all."""
    return torch.where(everything == 0, torch.nan, 1 - drops / everything)


def cpr(f: Tensor) -> Tensor:
    """∫ f dp for f [… p] at `SHARES`."""
    return torch.trapezoid(f, torch.tensor(SHARES, dtype=f.dtype), dim=-1)


def cmd(f: Tensor) -> Tensor:
    """∫ |1 − f| dp for f [… p] at `SHARES`."""
    return torch.trapezoid((1 - f).abs(), torch.tensor(SHARES, dtype=f.dtype), dim=-1)
