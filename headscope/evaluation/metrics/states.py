"""How near the final states are to those of the intact model: needs no labels, so that every model has a metric."""

from __future__ import annotations

from typing import ClassVar

from headscope.bootstrap import Array, GroupSums
from headscope.evaluation.metrics.base import Metric, SentenceScores, ValidationText, group_columns, metric, ratio_of
from headscope.evaluation.states import StateComparison, compare_states
from headscope.formats.base import Checkpoint


class StateMetric(Metric):
    """A mean over sentences, or over tokens; see `headscope.evaluation.states`. The loss beside it is 1 − cosine."""

    tokens: ClassVar[bool]
    column: ClassVar[int]

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if has_target and not checkpoint.two_sided:
            return "reads one side only; leave out the targets"
        return "needs --target, which the decoder is to read" if checkpoint.needs_target and not has_target else None

    def sums(self, compared: StateComparison) -> GroupSums:
        """Sums of the measure [g mask 1]."""
        both = compared.tokens if self.tokens else compared.pooled
        return column_of(both, self.column)

    def of(self, sums: Array) -> Array:
        return ratio_of(sums)

    def score(self, checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
        compared = compare_states(checkpoint, data.corpus, data.reading, intact=data.intact)
        if not compared.complete:
            raise KeyboardInterrupt
        both = compared.tokens if self.tokens else compared.pooled
        loss = group_columns(column_of(both, 0))
        loss[:, 0] = loss[:, 1] - loss[:, 0]
        return SentenceScores(group_columns(self.sums(compared)), loss)


@metric
class Cosine(StateMetric):
    """Mean cosine of a sentence's mean-pooled final state to the intact model's."""

    name = "cosine"
    title = "cosine to the intact model"
    tokens, column = False, 0


@metric
class L2(StateMetric):
    """Mean distance of mean-pooled final states, relative to their length."""

    name = "l2"
    title = "relative l2 distance to the intact model"
    higher_is_better = False
    tokens, column = False, 1


@metric
class TokenCosine(StateMetric):
    """Mean cosine of the final states of tokens."""

    name = "token-cosine"
    title = "cosine of tokens to the intact model"
    tokens, column = True, 0


@metric
class TokenL2(StateMetric):
    """Mean distance of the final states of tokens, relative to their length."""

    name = "token-l2"
    title = "relative l2 distance of tokens to the intact model"
    higher_is_better = False
    tokens, column = True, 1


def column_of(sums: GroupSums, column: int) -> GroupSums:
    """One measure [g mask] of sums [g mask 2]."""
    chosen = GroupSums(groups=sums.groups, budget=sums.budget)
    chosen.used, chosen.total, chosen.count = sums.used, sums.total[..., column], sums.count[..., 0]
    return chosen
