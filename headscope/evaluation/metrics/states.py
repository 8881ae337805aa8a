"""How near the final states are to those of the intact model: needs no labels, so that every model has a metric."""

from __future__ import annotations

from headscope.evaluation.metrics.base import StateMetric, metric


@metric
class Cosine(StateMetric):
    """Mean cosine of a sentence's mean-pooled final state to the intact model's."""

    name = "cosine"
    worst = -1.0
    title = "cosine to the intact model"
    order = 210
    tokens, column = False, 0


@metric
class TokenCosine(Cosine):
    """Mean cosine of the final states of tokens."""

    name = "token-cosine"
    title = "cosine of tokens to the intact model"
    order = 220
    tokens = True


@metric
class L2(StateMetric):
    """Mean distance of mean-pooled final states, relative to their length."""

    name = "l2"
    title = "relative l2 distance to the intact model"
    order = 230
    higher_is_better = False
    worst = 2.0  # the opposite state
    tokens, column = False, 1


@metric
class TokenL2(L2):
    """Mean distance of the final states of tokens, relative to their length."""

    name = "token-l2"
    title = "relative l2 distance of tokens to the intact model"
    order = 240
    tokens = True
