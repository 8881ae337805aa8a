"""The cost of a change to a model: a metric before and after on the same sentences, and the test of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from headscope.bootstrap import LEVEL, Array, Bootstrap
from headscope.config.commands import TranslateOptions
from headscope.data.batching import sentence_limit
from headscope.data.corpus import Corpus
from headscope.data.encoded import count_unknown
from headscope.errors import ConfigError, flag
from headscope.evaluation.likelihood import LikelihoodOptions, default_positions
from headscope.evaluation.margin import MARGIN, Margin
from headscope.evaluation.metrics.base import (
    METRICS,
    Floor,
    Metric,
    ValidationText,
    choose_metric,
    reference_texts,
    resample,
)
from headscope.evaluation.non_inferiority import NonInferiority, groups_needed, judge
from headscope.evaluation.translation import RAW, text_mode, text_remarks
from headscope.formats.base import Checkpoint

_TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


@dataclass(frozen=True)
class Comparison:
    """A model's value with its 95 % interval, and its difference to another model on the same sentences."""

    value: float
    low: float
    high: float
    difference: float
    difference_low: float
    difference_high: float
    p: float


def judge_loss(
    metric: Metric, sums_by_seed: Sequence[Array], intact: Array, margin: Margin, level: float = LEVEL
) -> NonInferiority:
    """The verdict on changed models, one for each seed, against the intact one, from sums by group [g c]."""
    value, intact_sums = float(metric.of(intact.sum(axis=0)[None])[0]), _left_out(metric, intact)
    worse = np.stack([metric.worse(_left_out(metric, sums), intact_sums) for sums in sums_by_seed])  # [seed 1+g]
    max_loss = value - metric.worst if metric.higher_is_better else math.inf
    return judge(worse, margin=margin.of(value), largest=metric.largest_loss(intact), max_loss=max_loss, level=level)


def _left_out(metric: Metric, sums: Array) -> Array:
    """The metric of all sums [g c], then without each group in turn: [1 + g]."""
    total = sums.sum(axis=0)
    return metric.of(np.vstack([total, total - sums]))


def compare(values: Array, baseline: Array) -> Comparison:
    """Paired bootstrap of resampled metrics [1 + replicates]: percentile intervals, and a two-sided p-value.

    p is the share of centred resampled differences that are at least as far from 0 as the observed one, with one added
    to both counts (Riezler & Maxwell 2005, bootstrap with shift). It is 1 if all sentences are the same, NaN if
    resamples do not vary, as with one sentence. sacreBLEU's paired bootstrap counts only the upper tail, so its p is
    about half as large.
    """
    with np.errstate(invalid="ignore"):
        differences = values - baseline  # [1 + replicates], the observed one first
    if values[0] == baseline[0]:
        differences[0] = 0.0  # also where both are infinite
    null = differences[1:] - differences[1:].mean()
    beyond = int((np.abs(null) >= abs(differences[0]) - 1e-12).sum())
    varies = bool(beyond) or float(np.abs(null).max()) > 1e-12
    ends: list[float] = []
    for numbers in (values[1:], differences[1:]):
        finite = np.isfinite(numbers).all()
        ends += np.quantile(numbers, _TAILS).tolist() if finite else [float("nan")] * 2
    low, high, low_difference, high_difference = ends
    p = (1 + beyond) / (1 + len(null)) if varies and np.isfinite(null).all() else float("nan")
    return Comparison(float(values[0]), low, high, float(differences[0]), low_difference, high_difference, p)


SEED, REPLICATES = 1, 1000


@dataclass(frozen=True)
class QualityTask:
    """A measurement before and after a change: a `metric`, a text, and the `margin` of loss that is tolerated.

    `remarks` are about the comparison of translations.
    """

    metric: Metric
    data: ValidationText
    margin: Margin
    remarks: Sequence[str]


@dataclass(frozen=True)
class QualityChange:
    """The metric of both models with 95 % intervals, and the `loss` in nats (None if the metric implies it).

    `verdict` is the test of non-inferiority; None if the first model cannot be a baseline, for the reason `why`.
    `unread` warns of a text with many unknown subwords, or with words that BLEU cannot separate. `signature` is that of
    the library that computes the metric.
    """

    metric: str
    title: str
    text: str
    sentences: int
    before: Comparison
    after: Comparison
    loss: tuple[float, float] | None
    margin: str
    verdict: NonInferiority | None
    why: str = ""
    unread: tuple[str, ...] = ()
    signature: str = ""

    def record(self) -> dict[str, Any]:
        """The change as JSON; `needed` estimates the lines for a verdict if these are too few."""
        lines_needed = None if self.verdict is None else groups_needed(self.verdict, self.sentences)
        return {**asdict(self), "needed": lines_needed}


def make_quality_task(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *,
    metric: str = "",
    margin: str | None = None,
    bleu_tokenize: str | None = None,
) -> QualityTask:
    """The task to measure a checkpoint on a text, whose lines are numbered from 0.

    The default metric is accuracy for a text with labels, perplexity for models that predict words, else the cosine of
    final states. For encoders one pass hides 15 % of a text. ConfigError for a metric that does not apply, and for an
    invalid margin.
    """
    if not metric and not corpus.has_labels:
        metric = "perplexity" if checkpoint.predicts == "words" else "cosine"
    if checkpoint.predicts == "nothing" and checkpoint.two_sided and not corpus.has_target:
        raise ConfigError(f"a model of type {checkpoint.model_type!r} needs {flag.target}, which its decoder reads")
    metric_class = METRICS.get(choose_metric(metric, checkpoint, **corpus.comes_with))
    if bleu_tokenize is not None and metric_class.name != "bleu":
        raise ConfigError(f"{flag.bleu_tokenize} is for {flag.metric} bleu, not {metric_class.name}; leave it out")
    tolerance = Margin.parse(MARGIN if margin is None else margin)
    text, remarks = RAW, list[str]()
    if metric_class.reads == "translations":
        text, remarks = text_mode(checkpoint, "raw", bleu_tokenize)
        remarks += text_remarks(reference_texts(checkpoint, corpus), text) if metric_class.name == "bleu" else []
    reading = LikelihoodOptions(default_positions(checkpoint), sentence_limit(checkpoint), "truncate", "random", SEED)
    with_numbers = replace(corpus, read=lambda: (line._replace(number=n) for n, line in enumerate(corpus.read())))
    data = ValidationText(with_numbers, reading, TranslateOptions(), text, intact=checkpoint)
    return QualityTask(metric_class, data, tolerance, remarks)


def quality_change(before: Checkpoint, after: Checkpoint, task: QualityTask) -> QualityChange:
    """Measure both models and compare them; KeyboardInterrupt if interrupted."""
    metric, data, corpus = task.metric, task.data, task.data.corpus
    scores = [metric.score(checkpoint, data) for checkpoint in (before, after)]
    bootstrap = Bootstrap(seed=SEED, replicates=REPLICATES)
    baseline, values = (resample(metric.of, score.sums, bootstrap) for score in scores)
    why = no_baseline(metric, baseline, margin=task.margin, floor=metric.floor(before, data))
    verdict = None if why else judge_loss(metric, [scores[1].sums], scores[0].sums, task.margin)
    unread = [*task.remarks]
    if not before.reads_sound:
        counts = count_unknown(before, corpus, limit=data.reading.limit, sentences=corpus.count)
        unread += counts.warnings(before)
    old_loss, new_loss = (float(total / count) for total, count in (score.loss.sum(axis=0) for score in scores))
    return QualityChange(
        metric=metric.name,
        title=metric.title_of(before),
        text=corpus.name,
        sentences=corpus.count,
        before=compare(baseline, baseline),
        after=compare(values, baseline),
        loss=None if metric.says_loss else (old_loss, new_loss),
        margin=str(task.margin),
        verdict=verdict,
        why=why or "",
        unread=tuple(unread),
        signature=metric.signature(data.text),
    )


def value_after(after: Checkpoint, task: QualityTask) -> float:
    """The metric of an altered model alone."""
    sums = task.metric.score(after, task.data).sums
    return float(task.metric.of(sums.sum(axis=0)[None])[0])


def no_baseline(metric: Metric, values: Array, *, margin: Margin, floor: Floor | None) -> str | None:
    """Why the unpruned model, with resampled values [1 + replicates], cannot be a baseline. Returns None if it can."""
    baseline = compare(values, values)
    if floor is None:
        if baseline.value != 0 or not margin.relative:
            return None
        return f"the unpruned model's {metric.title} is 0, of which {margin} is nothing; give {flag.margin} in its unit"
    single = np.isnan(baseline.low)  # one sentence has no interval
    low, high = (baseline.value, baseline.value) if single else (baseline.low, baseline.high)
    if low > floor.value if metric.higher_is_better else high < floor.value:
        return None
    ends = "" if single else f" ({low:.3g} to {high:.3g} at 95 %)"
    return (
        f"the unpruned model's {metric.title}, {baseline.value:.3g}{ends}, is not beyond {floor.value:.3g}, "
        f"{floor.words}: no loss can be judged against it; give a model that can do the task, or more text"
    )
