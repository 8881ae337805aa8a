"""The contract of a metric, and the registry that finds it by name.

A metric is a function of sums over the corpus: BLEU of matches, n-grams and lengths, perplexity of Σ -log p and
tokens, accuracy of hits and sentences. Sums are kept for groups of sentences, as in `headscope.bootstrap`, so that
intervals and paired tests (`headscope.evaluation.before_after`) need no second pass over the text.

The sums come from one of three passes, shared by all metrics of that kind: translations, the likelihood of tokens or
labels, and the comparison of final states with the intact model's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from headscope.bootstrap import GROUPS, Array, Bootstrap, Estimate, GroupSums, interval
from headscope.config.commands import TranslateOptions
from headscope.config.inputs import SEARCH
from headscope.config.option import flag_of
from headscope.data.corpus import Corpus, check_predictions
from headscope.data.labels import no_labels
from headscope.errors import ConfigError, flag, flags
from headscope.evaluation.likelihood import Likelihood, LikelihoodOptions, hides_tokens, likelihood
from headscope.evaluation.translation import RAW, TextMode, translate_lines
from headscope.formats.base import Checkpoint
from headscope.registry import Registry

Pass = Literal["translations", "likelihood", "states"]


@dataclass(frozen=True)
class ValidationText:
    """A corpus, with labels if the metric needs them, and the options to read and translate it.

    `text` is the mode of comparison of translations, `intact` the model that states are compared with.
    """

    corpus: Corpus
    reading: LikelihoodOptions
    options: TranslateOptions
    text: TextMode = RAW
    intact: Checkpoint | None = None


@dataclass(frozen=True)
class Translations:
    """Translations of a corpus, their references, and the mode of comparison."""

    hypotheses: Sequence[str]
    references: Sequence[str]
    text: TextMode = RAW


@dataclass(frozen=True)
class SentenceScores:
    """The sums of a metric [g c], and Σ loss and counts [g 2], by group of sentences."""

    sums: Array
    loss: Array


@dataclass(frozen=True)
class Floor:
    """The score of a model that has learnt nothing, with its description."""

    value: float
    words: str


class Metric(ABC):
    """A function `of` the `sums` of a pass over a text, and the `floor`: the score of a model that has learnt nothing.

    A file in this folder defines final subclasses of `TranslationMetric`, `LikelihoodMetric` or `StateMetric`, which
    say what pass they read (`reads`), and registers them. Metrics are sorted by `order` and printed with `decimals`.
    `default`: it is measured if no metric is named; others then only if no default metric fits. `says_loss`: a separate
    loss would add nothing. `worst` is the end of the metric's range, the value of a sentence that the model loses
    altogether. `lost_sums` are the factors on the sums of such a sentence, repeated as needed; sums [n 2] need none.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    reads: ClassVar[Pass]
    order: ClassVar[int] = 100
    decimals: ClassVar[int] = 4
    higher_is_better: ClassVar[bool] = True
    worst: ClassVar[float] = math.inf
    lost_sums: ClassVar[Sequence[int]] = ()
    default: ClassVar[bool] = True
    says_loss: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        """Why the metric does not apply to a checkpoint on such a text. Returns None if it does."""

    @abstractmethod
    def sums(self, read: Any) -> Array:
        """Sums by group of sentences and mask [g mask c] from the result of the pass."""

    def of(self, sums: Array) -> Array:
        """The metric [n] of sums [n c]; by default Σ values / Σ counts of sums [n 2]."""
        return ratio_of(sums)

    @abstractmethod
    def score(self, checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
        """The sums of a model on a text, under its present masks and gates; KeyboardInterrupt if interrupted."""

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor | None:
        """The score of a model that has learnt nothing. Returns None if every model is a baseline."""
        return None

    def signature(self, text: TextMode) -> str:
        """The signature of the library that computes the metric; empty for this one."""
        return ""

    def title_of(self, checkpoint: Checkpoint) -> str:
        """The title of the metric for a checkpoint, depending on what it predicts."""
        return self.title

    def estimate(self, sums: Array, bootstrap: Bootstrap) -> Estimate:
        """The metric of sums by group [g c], with percentiles of resamples of groups."""
        return interval(torch.from_numpy(resample(self.of, sums, bootstrap)))

    def columns(self, values: Array) -> dict[str, Array]:
        """The columns of the table of `--each-head`, from values [mask], the intact model's first."""
        return {self.name: values, f"{self.name}_difference": values - values[0]}

    def worse(self, values: Array, reference: Array) -> Array:
        """How much worse values are than a reference; below 0 they are better."""
        with np.errstate(invalid="ignore"):
            losses: Array = reference - values if self.higher_is_better else values - reference
        return losses

    def largest_loss(self, sums: Array) -> float:
        """The largest possible loss of any group with sums [g c], in the unit of `non_inferiority.influences`."""
        total, lost_sums = sums.sum(axis=0), np.stack([self.worst * sums[:, 1], sums[:, 1]], axis=1)
        if self.lost_sums:
            lost_sums = sums * np.resize(self.lost_sums, sums.shape[1])
        values = self.of(np.vstack([total, total - sums + lost_sums]))
        return float(len(sums) * np.nanmax(self.worse(values[1:], values[0])))


class TranslationMetric(Metric):
    """A metric of translations and their references; every mask needs translations of its own."""

    reads = "translations"
    decimals = 2

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if not checkpoint.needs_target:
            return "needs a model that translates"
        return None if has_target else f"needs the translations ({flags('target', 'valid_target')})"

    @abstractmethod
    def sums(self, read: Translations) -> Array:
        """Sums by group of sentences [g 1 c]; `add_groups` makes them from a row for each sentence."""

    def score(self, checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
        loss = total_and_count(whole_likelihood(checkpoint, data).nll)[:, 0]
        lines = (sentence.source for sentence in data.corpus)
        translations = translate_lines(checkpoint, lines, options=data.options, tokens=data.reading.tokens)
        hypotheses = [best[0].text for best in translations]
        read = Translations(hypotheses, reference_texts(checkpoint, data.corpus), data.text)
        return SentenceScores(self.sums(read)[:, 0], loss)


class LikelihoodMetric(Metric):
    """A metric of the likelihood of the `words` or the `labels` of a text, or of how often they are the likeliest."""

    reads = "likelihood"
    words: ClassVar[bool] = True
    labels: ClassVar[bool] = True

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if cls.words and checkpoint.predicts == "words":
            if checkpoint.two_sided is has_target:
                return None
            need = f"needs the translations ({flags('target', 'valid_target')})"
            return need if checkpoint.two_sided else "reads one side only"
        if not cls.labels:
            return "needs a model that predicts words"
        if why := no_labels(checkpoint):
            return f"needs a classifier, and {why}"
        return None if has_labels else f"needs {flag.labels} FILE (or {flag.valid_labels}), the class of every line"

    def sums(self, read: Likelihood) -> Array:
        """Sums by group of sentences and mask [g mask c]: Σ -log p and counts [g mask 2]."""
        return total_and_count(read.nll)

    def score(self, checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
        result = whole_likelihood(checkpoint, data)
        return SentenceScores(self.sums(result)[:, 0], total_and_count(result.nll)[:, 0])


METRICS: Registry[Metric] = Registry("metric", package="headscope.evaluation.metrics")


def metric(cls: type[Metric]) -> type[Metric]:
    """Register a metric under its `name`."""
    METRICS.add(cls())
    return cls


DEFAULTS = {"words": ("bleu", "perplexity"), "classes": ("accuracy",), "tags": ("accuracy",), "nothing": ("cosine",)}
"""By what a model predicts, its default metrics: the first that applies is taken."""


def choose_metric(name: str, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str:
    """The full name of a metric, or for an empty `name` the model's default metric.

    Defaults: BLEU for translation models, perplexity for other models that predict words, accuracy for classifiers, the
    cosine to the intact model for encoders without a head. ConfigError for a name that is unknown or does not apply.
    """
    about = {"has_target": has_target, "has_labels": has_labels}
    why = {metric.name: metric.applies(checkpoint, **about) for metric in metrics_in_order()}
    candidates = [METRICS.get(name).name] if name else DEFAULTS[checkpoint.predicts]
    for candidate in candidates:
        if why[candidate] is None:
            return candidate
    fitting = ", ".join(metric for metric, reason in why.items() if reason is None) or "no metric"
    kind = f"a model of type {checkpoint.model_type!r}"
    raise ConfigError(f"{candidates[-1]} {why[candidates[-1]]}; {kind} on this text allows {fitting}")


def check_idle_options(options: Any, checkpoint: Checkpoint, metrics: Collection[str]) -> None:
    """ConfigError for an option about translations or hidden tokens if none of the metrics uses them."""
    about = [entry for entry in fields(options) if entry.metadata.get("panel") == SEARCH or entry.name == "text"]
    flags = [flag_of(entry) for entry in about if getattr(options, entry.name) != entry.default]
    if flags and not metrics_in_order(metrics, reads="translations"):
        raise ConfigError(f"{flags[0]} is about translations, and {', '.join(metrics)} needs none; leave it out")
    if options.hiding == "random" and not (metrics_in_order(metrics, reads="likelihood") and hides_tokens(checkpoint)):
        kind = f"a model of type {checkpoint.model_type!r}"
        raise ConfigError(f"{flag.hiding} is about perplexity of encoders, not of {kind}; leave it out")


def metrics_in_order(names: Collection[str] | None = None, *, reads: Pass | None = None) -> list[Metric]:
    """The metrics in their order: all or those of `names`, of all passes or of one."""
    metrics = [
        candidate
        for name, candidate in METRICS
        if (names is None or name in names) and reads in (None, candidate.reads)
    ]
    return sorted(metrics, key=lambda candidate: (candidate.order, candidate.name))


def fitting_metrics(checkpoint: Checkpoint) -> dict[str, str]:
    """The metrics that apply to a checkpoint, in their order, each with the text option that it needs."""
    texts = {"": (False, False), flag.target: (True, False), flag.labels: (False, True)}
    needs: dict[str, str] = {}
    for candidate in metrics_in_order():
        for option, (target, labels) in texts.items():
            if candidate.applies(checkpoint, has_target=target, has_labels=labels) is None:
                needs.setdefault(candidate.name, option)
    return needs


def whole_likelihood(checkpoint: Checkpoint, data: ValidationText) -> Likelihood:
    """The likelihood of all sentences; KeyboardInterrupt if interrupted, DataError without a token to predict."""
    result = likelihood(checkpoint, data.corpus, data.reading)
    if not result.complete:
        raise KeyboardInterrupt
    check_predictions(result.counts.sum(), data.corpus.name)
    return result


def reference_texts(checkpoint: Checkpoint, corpus: Corpus) -> list[str]:
    """References in the form of translations, with subwords joined."""
    return [checkpoint.join_subwords(sentence.target or "") for sentence in corpus]


def ratio_of(sums: Array) -> Array:
    """Σ values / Σ counts of sums [n 2]: [n]; NaN where nothing was counted."""
    with np.errstate(invalid="ignore"):
        return sums[:, 0] / sums[:, 1]


def resample(of: Callable[[Array], Array], sums: Array, bootstrap: Bootstrap) -> Array:
    """A function `of` the total of sums [g c], then of their resamples: [1 + replicates]; NaN for a single group."""
    if len(sums) < 2:
        return np.append(of(sums), np.full(bootstrap.replicates, np.nan))
    return of(np.vstack([sums.sum(axis=0), bootstrap.draws(len(sums)).numpy() @ sums]))


def add_groups(rows: Array) -> Array:
    """Rows of sentences [n c] summed by group: sentence i is in group i mod 1024."""
    sums = np.zeros((min(len(rows), GROUPS), rows.shape[1]))
    np.add.at(sums, np.arange(len(rows)) % GROUPS, rows)
    return sums


def total_and_count(sums: GroupSums, column: int | None = None) -> Array:
    """Totals and counts by group of sentences and mask [g mask 2]; `column` is an index into a further axis."""
    total, count = sums.total[: sums.n_used], sums.count[: sums.n_used]
    if column is not None:
        total, count = total[..., column], count[..., 0]
    return torch.stack([total, count.expand_as(total)], dim=-1).numpy()
