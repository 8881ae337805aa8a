"""Metrics as sums over sentences, and the paired comparison of two models by the same resamples.

A metric is a function of sums over the corpus: BLEU of matches, n-grams and lengths (Papineni et al. 2002, as
sacreBLEU counts them), perplexity of Σ -log p and tokens, accuracy of hits and sentences. Sums are kept for groups of
sentences, as `headscope.bootstrap` does, so intervals and paired tests need no second pass over the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headscope.bootstrap import GROUPS, LEVEL, Array, Bootstrap, GroupSums, Ratio
from headscope.data.batching import Omissions, batches
from headscope.data.corpus import Corpus
from headscope.errors import ConfigError, DataError
from headscope.evaluation.likelihood import LikelihoodOptions, likelihood
from headscope.evaluation.translation import translate_lines
from headscope.files.lines import read_lines
from headscope.formats.base import Checkpoint
from headscope.formats.translate_options import TranslateOptions

ORDERS = 4  # of n-grams
_TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


@dataclass(frozen=True)
class ValidationText:
    """A corpus, how it is read and translated, and for classifiers the right classes.

    `text` says what BLEU compares: "raw" or "tokenised-lowercase".
    """

    corpus: Corpus
    reading: LikelihoodOptions
    options: TranslateOptions
    text: str
    labels: tuple[int, ...] = ()


@dataclass(frozen=True)
class SentenceScores:
    """The sums that a metric is made of [g c], and Σ loss and counts [g 2], by group of sentences."""

    sums: Array
    loss: Array


@dataclass(frozen=True)
class Metric:
    """A number `of` sums [n c] → [n], and how to `score` a model; differences up to `within` count as none."""

    name: str
    title: str
    higher_is_better: bool
    of: Callable[[Array], Array]
    score: Callable[[Checkpoint, ValidationText], SentenceScores]
    within: float


def _bleu(sums: Array) -> Array:
    """sacreBLEU's corpus BLEU of matches [4], n-grams [4], and the lengths of translations and references."""
    from sacrebleu.metrics.bleu import BLEU

    def corpus_bleu(row: Sequence[float]) -> float:
        counts = [int(count) for count in row]
        matches, totals = counts[:ORDERS], counts[ORDERS : 2 * ORDERS]
        return float(BLEU.compute_bleu(matches, totals, counts[-2], counts[-1]).score)

    return np.array([corpus_bleu(row) for row in sums.tolist()])


def _ratio(sums: Array) -> Array:
    ratios: Array = sums[:, 0] / sums[:, 1]
    return ratios


def _perplexity(sums: Array) -> Array:
    with np.errstate(over="ignore"):
        values: Array = np.exp(_ratio(sums))
        return values


def _score_translations(checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
    loss = _loss(checkpoint, data)
    lines = (sentence.source for sentence in data.corpus)
    translations = translate_lines(checkpoint, lines, options=data.options, tokens=data.reading.tokens)
    hypotheses = [best[0].text for best in translations]
    references = [checkpoint.joined(sentence.target or "") for sentence in data.corpus]
    return SentenceScores(bleu_sums(hypotheses, references, raw=data.text == "raw"), loss)


def _score_words(checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
    loss = _loss(checkpoint, data)
    return SentenceScores(loss, loss)


def _score_classes(checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
    """Hits and cross-entropy of a classifier."""
    hits, losses = GroupSums(), GroupSums()
    right = torch.tensor(data.labels)
    reading = data.reading
    read = batches(data.corpus, checkpoint, tokens=reading.tokens, limit=reading.limit, losses=Omissions())
    with torch.inference_mode():
        for batch in read:
            scores = checkpoint.class_scores(batch.to(checkpoint.device)).double().cpu()  # [b classes]
            wanted, ones = right[batch.indices], torch.ones(len(batch.indices), 1)
            nll = -torch.log_softmax(scores, dim=-1).gather(1, wanted[:, None])
            hits.add(batch.indices, Ratio((scores.argmax(dim=-1) == wanted)[:, None], ones))
            losses.add(batch.indices, Ratio(nll, ones))
    return SentenceScores(_columns(hits), _columns(losses))


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("bleu", "BLEU", True, _bleu, _score_translations, 0.25),
        Metric("perplexity", "perplexity", False, _perplexity, _score_words, 0.1),
        Metric("accuracy", "accuracy", True, _ratio, _score_classes, 0.01),
    )
}


def metric_of(checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str:
    """BLEU where the model translates, perplexity where it predicts words, accuracy where it classifies.

    ConfigError where a text or the classes are missing or too many, and for models that predict nothing.
    """
    kind = f"a model of type {checkpoint.model_type!r}"
    if checkpoint.predicts == "classes":
        if not has_labels:
            raise ConfigError(f"{kind} classifies: give --valid-labels FILE, the right class of every line")
        return "accuracy"
    if has_labels:
        raise ConfigError(f"{kind} is no classifier; leave out --valid-labels")
    if checkpoint.predicts != "words":
        raise ConfigError(f"{kind} predicts nothing, so there is no quality to measure; give one with its task's head")
    if checkpoint.two_sided is not has_target:
        needs = "needs --target and --valid-target, the translations"
        raise ConfigError(f"{kind} {needs if checkpoint.two_sided else 'reads one side; leave out the targets'}")
    return "bleu" if checkpoint.two_sided else "perplexity"


def bleu_sums(hypotheses: Sequence[str], references: Sequence[str], *, raw: bool) -> Array:
    """Matches, n-grams and lengths by group of sentences [g 10]; their sum gives sacreBLEU's corpus BLEU."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(tokenize="13a" if raw else "none", lowercase=not raw, force=True)
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        score = metric.corpus_score([hypothesis], [[reference]])
        rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
    return grouped(np.array(rows, dtype=np.float64))


def grouped(rows: Array) -> Array:
    """Rows of sentences [n c] summed by group: sentence i is in group i mod 1024."""
    sums = np.zeros((min(len(rows), GROUPS), rows.shape[1]))
    np.add.at(sums, np.arange(len(rows)) % GROUPS, rows)
    return sums


def _loss(checkpoint: Checkpoint, data: ValidationText) -> Array:
    """Σ -log p of tokens, and how many they are, by group of sentences [g 2]."""
    scored = likelihood(checkpoint, data.corpus, data.reading)
    if not scored.complete:
        raise KeyboardInterrupt
    return _columns(scored.nll)


def _columns(sums: GroupSums) -> Array:
    totals, counts = (part[: sums.used].reshape(sums.used, -1)[:, :1] for part in (sums.total, sums.count))
    both: Array = torch.cat([totals, counts], dim=1).numpy()
    return both


def read_labels(path: Path, checkpoint: Checkpoint, count: int) -> tuple[int, ...]:
    """The classes of the first `count` lines, by number or by the name that the checkpoint's config gives them.

    DataError, with the line, for a class that the model does not have, and for too few lines.
    """
    config: Any = checkpoint.model.config
    known = {int(number): str(name) for number, name in config.id2label.items()}
    numbers = {**{name: number for number, name in known.items()}, **{str(number): number for number in known}}
    labels: list[int] = []
    for line, text in enumerate(read_lines(path), start=1):
        if len(labels) == count:
            break
        if text.strip() not in numbers:
            shown = ", ".join(f"{number} ({name})" for number, name in list(known.items())[:5])
            raise DataError(f"{path}:{line}: the model has no class {text.strip()[:40]!r}; it has {shown}")
        labels.append(numbers[text.strip()])
    if len(labels) < count:
        raise DataError(f"{path} has {len(labels)} lines, the text has {count}; line i must be the class of line i")
    return tuple(labels)


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


def compare_scores(metric: Metric, sums: Array, reference: Array, bootstrap: Bootstrap) -> Comparison:
    """Paired bootstrap over groups of sentences [g c]: percentile intervals, and a two-sided p-value of the difference.

    p is the share of resampled differences, less their mean, that are at least as far from 0 as the one observed,
    with one added to both counts (Riezler & Maxwell 2005, bootstrap with shift); 1 where all sentences are the same.
    sacreBLEU's paired bootstrap counts the upper tail alone, about half as many.
    """
    draws = bootstrap.draws(len(sums)).numpy()
    values, others = (metric.of(np.vstack([rows.sum(axis=0), draws @ rows])) for rows in (sums, reference))
    with np.errstate(invalid="ignore"):
        differences = values - others  # [1 + replicates], the observed one first
    if values[0] == others[0]:
        differences[0] = 0.0  # also where both are infinite
    shifted = differences[1:] - differences[1:].mean()
    beyond = int((np.abs(shifted) >= abs(differences[0]) - 1e-12).sum())
    low, high, least, most = (_quantile(numbers[1:], share) for numbers in (values, differences) for share in _TAILS)
    p = (1 + beyond) / (1 + len(shifted)) if np.isfinite(shifted).all() else float("nan")
    return Comparison(float(values[0]), low, high, float(differences[0]), least, most, p)


def _quantile(values: Array, share: float) -> float:
    return float(np.quantile(values, share)) if np.isfinite(values).all() else float("nan")
