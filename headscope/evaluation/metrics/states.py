"""Distances of final states from the intact model's: metrics of encoders without a prediction head.

For vectors v (intact) and v' the cosine is v · v' / ‖v‖ ‖v'‖ and the l2 distance ‖v' − v‖ / ‖v‖, which is relative so
that models can be compared. A vector is the mean of a sentence's states, special tokens included, or their pooling by
the files of a sentence-transformers model. Token metrics compare the states of single tokens and average over all
tokens of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from headscope.bootstrap import Array, GroupSums, Ratio
from headscope.data.batching import batches
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch
from headscope.distributed import ALONE, Processes
from headscope.errors import ConfigError, flag
from headscope.evaluation.likelihood import CorpusSums, LikelihoodOptions, read_corpus
from headscope.evaluation.metrics.base import Metric, SentenceScores, ValidationText, metric, total_and_count
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.attention import BEFORE_MIXING, TAPS, without_taps
from headscope.model.taps import masked


@dataclass
class StateComparison(CorpusSums):
    """Sums by sentence and mask of the measures of pooled states, and of tokens; see `compare_states`.

    The last axis has cosine and l2 distance.
    """

    pooled_sums: GroupSums = field(default_factory=GroupSums)
    tokens: GroupSums = field(default_factory=GroupSums)


def cosine(intact: Tensor, changed_states: Tensor) -> Tensor:
    """Cosine of vectors [… d]: […]."""
    return torch.nn.functional.cosine_similarity(intact, changed_states, dim=-1)


def relative_l2(intact: Tensor, changed_states: Tensor) -> Tensor:
    """‖changed − intact‖ / ‖intact‖ of vectors [… d]: […]."""
    length = intact.norm(dim=-1).clamp(min=torch.finfo(intact.dtype).tiny)
    return (changed_states - intact).norm(dim=-1) / length


def compare_states(
    checkpoint: Checkpoint,
    corpus: Corpus,
    options: LikelihoodOptions,
    *,
    intact: Checkpoint | None = None,
    masks: Sequence[Sequence[HeadId]] = ((),),
    progress: Callable[[int], None] = lambda sentences: None,
    processes: Processes = ALONE,
) -> StateComparison:
    """Compare final states of a checkpoint, under its present gates and each mask, with the intact model's.

    `intact` is by default the checkpoint itself without masks and gates. See `likelihood.read_corpus` for several
    `processes` and for interruptions.
    """
    sums, intact_model = StateComparison(), intact or checkpoint

    def read(batch: Batch) -> None:
        sentence_means, tokens, counts = _compare_batch(checkpoint, intact_model, batch, masks)
        sums.pooled_sums.add(batch.indices, Ratio(sentence_means, torch.ones(len(sentence_means), 1, 1)))
        sums.tokens.add(batch.indices, Ratio(tokens, counts[:, None, None]))

    parts = batches(
        corpus, checkpoint, tokens=options.tokens, limit=options.limit, long=options.long, omissions=sums.omissions
    )
    return read_corpus(sums, parts, read, lambda batch: len(batch.indices), progress, processes)


def _compare_batch(
    checkpoint: Checkpoint, whole: Checkpoint, batch: Batch, masks: Sequence[Sequence[HeadId]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Distances of pooled states [b mask 2], their sums over tokens [b mask 2], and the number of tokens [b]."""
    real = (batch.source if batch.target is None else batch.target).real
    with without_taps():
        intact = whole.states(batch.to(whole.device)).cpu().double()
    columns = []
    for heads in masks:
        if checkpoint.model is whole.model and not (heads or TAPS.get() or BEFORE_MIXING.get()):
            changed_states = intact
        else:
            with masked(checkpoint.model, heads):
                changed_states = checkpoint.states(batch.to(checkpoint.device)).cpu().double()
        if changed_states.shape != intact.shape:
            widths = f"their widths are {changed_states.shape[-1]} and {intact.shape[-1]}"
            raise ConfigError(f"states of {checkpoint.path} and {whole.path} cannot be compared: {widths}")
        sentences = whole.pool(intact, real), whole.pool(changed_states, real)
        tokens = [(measure(intact, changed_states) * real).sum(dim=-1) for measure in (cosine, relative_l2)]
        columns.append(torch.stack([cosine(*sentences), relative_l2(*sentences), *tokens], dim=-1))  # [b 4]
    distances = torch.stack(columns, dim=1)
    return distances[..., :2], distances[..., 2:], real.sum(dim=-1)


class StateMetric(Metric):
    """A mean over sentences or `tokens` of `column` of a `StateComparison`. Its loss is 1 − cosine."""

    reads = "states"
    default = False
    says_loss = True
    tokens: ClassVar[bool]
    column: ClassVar[int]

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if has_target and not checkpoint.two_sided:
            return "reads one side only; leave out the targets"
        return f"needs {flag.target}, which the decoder reads" if checkpoint.needs_target and not has_target else None

    def sums(self, read: StateComparison) -> Array:
        """Sums and counts of the measure [g mask 2]."""
        return total_and_count(read.tokens if self.tokens else read.pooled_sums, self.column)

    def columns(self, values: Array) -> dict[str, Array]:
        return {self.name: values}

    def score(self, checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
        comparison = compare_states(checkpoint, data.corpus, data.reading, intact=data.intact)
        if not comparison.complete:
            raise KeyboardInterrupt
        loss = total_and_count(comparison.tokens if self.tokens else comparison.pooled_sums, 0)[:, 0]
        loss[:, 0] = loss[:, 1] - loss[:, 0]
        return SentenceScores(self.sums(comparison)[:, 0], loss)


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
