"""The quality of a model on a text: the scores of its metrics.

Translation models: BLEU and chrF of translations, perplexity and accuracy on the references. Classifiers: loss,
accuracy and macro-F1 of the labels. Encoders without a head: the distance of states from the intact model's.

BLEU and chrF are sacreBLEU's, with its signatures; their intervals come from the same resamples of sentences as those
of other metrics. "raw" compares detokenised texts with sacreBLEU's tokenisation of the language; "tokenised-lowercase"
takes texts as already tokenised and ignores case, as in fairseq's and story-of-heads' numbers, and is named in scores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headscope.bootstrap import Array, Bootstrap
from headscope.data.corpus import check_predictions
from headscope.data.encoded import UnknownSubwords
from headscope.errors import ConfigError, DataError, flag
from headscope.evaluation.likelihood import Likelihood, hides_tokens, likelihood
from headscope.evaluation.metrics.base import METRICS, Metric, Pass, Translations, reference_texts
from headscope.evaluation.metrics.states import StateComparison, compare_states
from headscope.evaluation.opened import OpenedEvaluation
from headscope.evaluation.translation import RAW, TextMode, text_remarks, translate_lines
from headscope.heads import HeadId
from headscope.model.taps import masked
from headscope.progress import Progress, no_progress
from headscope.registry import unknown
from headscope.results.answer import Answer, Result, filled_table, list_text
from headscope.signature import Signature, count_of, signature_of

if TYPE_CHECKING:
    import pandas as pd

WHOLE = 1 - 1e-9
"""A sentence was read as a whole if the shares of its rows sum to this or more."""


@dataclass
class MeasuredMetrics:
    """The sums of every metric by group of sentences and mask [g mask c], and the passes that they come from.

    `hypotheses` are the translations under the first mask. After an interruption `complete` is False, and later passes
    are missing.
    """

    sums: dict[str, Array] = field(default_factory=dict)
    likelihood: Likelihood | None = None
    states: StateComparison | None = None
    hypotheses: Sequence[str] = ()
    complete: bool = True

    @property
    def n_sentences(self) -> int | None:
        """The number of sentences that all passes have read; None if there was only translation."""
        return min((read.sentences for read in (self.likelihood, self.states) if read is not None), default=None)


def measure(
    setup: OpenedEvaluation, masks: Sequence[Sequence[HeadId]], progress: Progress, *, step: str = ""
) -> MeasuredMetrics:
    """Measure an evaluation's metrics under each mask; `step` is the title of the progress bar of all passes.

    A KeyboardInterrupt ends the passes and keeps finished batches; it is raised again if there are none. DataError for
    a text without a token to predict.
    """
    measurement = MeasuredMetrics()
    setup.fit_batches()
    passes: Sequence[tuple[Pass, str, Callable[..., Any]]] = (
        ("likelihood", "scoring", likelihood),
        ("states", "comparing", partial(compare_states, intact=setup.intact)),
    )
    for kind, title, over in passes:
        if not measurement.complete or not (metrics := setup.requested_metrics(kind)):
            continue
        arguments = setup.checkpoint, setup.corpus, setup.likelihood_options
        with progress(step or title, setup.corpus.count) as report:
            read = over(*arguments, masks=masks, progress=report, processes=setup.processes)
        if kind == "likelihood":
            measurement.likelihood = read
            if read.complete:
                check_predictions(read.counts.sum(), setup.corpus.name)
        else:
            measurement.states = read
        setup.unknown, measurement.complete = read.omissions.unknown, read.complete
        measurement.sums |= {metric.name: metric.sums(read) for metric in metrics}
    if measurement.complete and setup.requested_metrics("translations"):
        try:
            with progress(step or "translating", setup.corpus.count * len(masks)) as report:
                _translate(setup, masks, measurement, report)
        except KeyboardInterrupt:
            if not measurement.sums:
                raise
            measurement.complete = False
            names = ", ".join(metric.title for metric in setup.requested_metrics("translations"))
            setup.remarks.append(f"translating was interrupted, so there is no {names}")
    first = measurement.likelihood or measurement.states
    if first is not None and (cut := first.omissions.n_truncated):
        setup.remarks.append(f"cut off at the length limit: {cut} sentences ({flag.max_length}, {flag.long})")
    setup.remarks += setup.unknown.remarks(setup.checkpoint)
    return measurement


def _translate(
    setup: OpenedEvaluation,
    masks: Sequence[Sequence[HeadId]],
    measurement: MeasuredMetrics,
    report: Callable[[int], None],
) -> None:
    """Add the metrics of translations under each mask to a measurement, unless interrupted."""
    references, metrics = reference_texts(setup.checkpoint, setup.corpus), setup.requested_metrics("translations")
    setup.remarks += text_remarks(references, setup.text)
    sums: dict[str, list[Array]] = {metric.name: [] for metric in metrics}
    for heads in masks:
        with masked(setup.checkpoint.model, heads):
            hypotheses = translate_corpus(setup, report)
        measurement.hypotheses = measurement.hypotheses or hypotheses
        for metric in metrics:
            sums[metric.name].append(metric.sums(Translations(hypotheses, references, setup.text)))
    measurement.sums |= {name: np.concatenate(parts, axis=1) for name, parts in sums.items()}


def translate_corpus(setup: OpenedEvaluation, step: Callable[[int], None]) -> list[str]:
    """The best translation of every source line, under the present masks and gates."""
    lines, unknown = (sentence.source for sentence in setup.corpus), UnknownSubwords()
    translations = translate_lines(
        setup.checkpoint,
        lines,
        options=setup.translate_options,
        tokens=setup.config.batch_tokens,
        unknown=unknown,
        progress=step,
        processes=setup.processes,
    )
    texts = [candidates[0].text for candidates in translations]
    setup.unknown = setup.unknown or unknown  # the likelihood has counted the target too
    if cut := unknown.cut:
        limit = setup.checkpoint.source_length(setup.translate_options.max_length)
        if setup.config.long == "refuse":
            raise DataError(
                f"{setup.corpus.name}:{min(cut)}: more than {limit} pieces to translate; shorten the line, raise "
                f"{flag.max_length}, or take {flag('long', 'truncate')}"
            )
        remark = f"translated from their first {limit} pieces: {len(cut)} sentences ({flag.max_length}, {flag.long})"
        setup.remarks += [remark] if remark not in setup.remarks else []
    return texts


@dataclass(frozen=True)
class Score:
    """A metric over the corpus with its 95 % interval, and the signature of the library that computed it."""

    metric: str
    name: str
    value: float
    low: float
    high: float
    signature: str = ""
    decimals: int = 4

    @property
    def text(self) -> str:
        """The value as it is printed."""
        return f"{self.value:.{self.decimals}f}"

    @property
    def interval(self) -> str:
        """The interval as it is printed; empty where there is none."""
        return "" if math.isnan(self.low) else f"{self.low:.{self.decimals}f}–{self.high:.{self.decimals}f}"


@dataclass(repr=False)
class Evaluation(Result):
    """Scores of a corpus; `sentences` has a row each: sentence, tokens, nll, hypothesis (empty if not scored).

    After an interruption it has the sentences that were read as a whole. `nll` is the sum over all `tokens`; these are
    labels for a classifier, as `unit` says.
    """

    scores: list[Score]
    sentences: pd.DataFrame
    signature: Signature
    remarks: list[str]
    unknown: UnknownSubwords
    tokens: int | None = None
    nll: float | None = None
    unit: str = "tokens"
    complete: bool = True
    seconds: float = 0.0
    masked_heads: Sequence[HeadId] = ()

    def __getitem__(self, metric: str) -> Score:
        """The score of a metric, such as "bleu"; ConfigError for one that was not measured."""
        for score in self.scores:
            if score.metric == metric:
                return score
        raise ConfigError(unknown("metric", metric, [score.metric for score in self.scores]))

    def answers(self) -> list[Answer]:
        """The first score with the text that it was measured on, the other scores, remarks, and details."""
        heads = tuple(map(str, self.masked_heads))
        off = f" with {count_of(len(heads), 'head')} off ({list_text(heads)})" if heads else ""
        suffix = "" if self.complete else " (interrupted: of the sentences that were done)"
        text = f"{off} on {count_of(len(self.sentences), 'sentence')}{suffix}"
        first = "".join(
            f"{score.name} {score.text}" + (f" (95 %: {score.interval})" if score.interval else "")
            for score in self.scores[:1]
        )
        parts = [Answer("", f"{first or 'nothing was measured'}{text}", heads=heads, caution=not self.complete)]
        if rows := [(score.name, score.text, score.interval) for score in self.scores[1:]]:
            parts.append(Answer("Other scores", "", filled_table(("metric", "value", "95 %"), rows)))
        parts += [Answer("", remark, caution=remark.startswith("warning")) for remark in self.remarks]
        details = [f"{score.name}|{score.signature}" for score in self.scores if score.signature]
        if self.tokens is not None:
            details.append(f"{self.nll:.2f} nats over {self.tokens:,} {self.unit}")
        return [*parts, *(Answer("", line, detail=True) for line in details)]

    @property
    def record(self) -> dict[str, Any]:  # type: ignore[override]
        """The measurements as a record."""
        scores = [{**vars(score), "signature": score.signature or str(self.signature)} for score in self.scores]
        return {
            "scores": scores,
            "tokens": self.tokens,
            "nll": self.nll,
            "unknown_pieces": self.unknown.to_json(),
            "remarks": self.remarks,
            "signature": str(self.signature),
            "complete": self.complete,
        }


def score_corpus(setup: OpenedEvaluation, *, progress: Progress = no_progress) -> Evaluation:
    """Score an open checkpoint on a text; writes nothing."""
    began = time.monotonic()
    with setup.configured_model():
        measurement = measure(setup, [()], progress)
    bootstrap, text = Bootstrap(seed=setup.config.seed, replicates=setup.config.bootstrap), setup.text
    likelihood_sums, checkpoint = measurement.likelihood, setup.checkpoint
    return Evaluation(
        scores=[
            score_of(
                metric, measurement.sums[metric.name][:, 0], bootstrap, title=metric.title_of(checkpoint), text=text
            )
            for metric in setup.requested_metrics()
            if metric.name in measurement.sums
        ],
        sentences=_sentence_table(setup.corpus.count, measurement),
        signature=evaluation_signature(setup, sentences_done=measurement.n_sentences),
        remarks=setup.remarks,
        unknown=setup.unknown,
        tokens=None if likelihood_sums is None else int(likelihood_sums.counts.sum()),
        nll=None if likelihood_sums is None else float(likelihood_sums.first.sum()),
        unit="labels" if checkpoint.label_names else "tokens",
        complete=measurement.complete,
        seconds=time.monotonic() - began,
        masked_heads=setup.masked_heads,
    )


def score_of(metric: Metric, sums: Array, bootstrap: Bootstrap, *, title: str, text: TextMode) -> Score:
    """The score of a metric from sums by group of sentences [g c]."""
    if metric.reads == "translations" and not text.raw:
        title = f"{title} (tokenised, lower-case)"
    estimate = metric.estimate(sums, bootstrap)
    value, low, high = (float(end) for end in (estimate.value, estimate.low, estimate.high))
    return Score(metric.name, title, value, low, high, metric.signature(text), metric.decimals)


def text_score(
    name: str,
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    text: TextMode = RAW,
    bootstrap: Bootstrap | None = None,
) -> Score:
    """The score of translations, "bleu" or "chrf"; its interval is valid only with a `bootstrap`."""
    metric = METRICS.get(name)
    sums = metric.sums(Translations(hypotheses, references, text))[:, 0]
    return score_of(metric, sums, bootstrap or Bootstrap(seed=1, replicates=1), title=metric.title, text=text)


def _sentence_table(count: int, measurement: MeasuredMetrics) -> pd.DataFrame:
    """A row for each sentence with its tokens, nll and hypothesis; after an interruption only whole sentences."""
    import pandas as pd

    read, hypotheses = measurement.likelihood, measurement.hypotheses or ""
    table = pd.DataFrame({"sentence": range(count), "tokens": None, "nll": None, "hypothesis": hypotheses})
    if read is not None:
        table = table.assign(tokens=read.counts.astype(int), nll=read.first)
    if measurement.complete:
        return table
    return table[np.zeros(count, dtype=bool) if read is None else read.shares > WHOLE]


def evaluation_signature(setup: OpenedEvaluation, *, sentences_done: int | None = None) -> Signature:
    """The signature of an evaluation: all settings that shape the numbers of any metric."""
    checkpoint, corpus, config = setup.checkpoint, setup.corpus, setup.config
    complete = sentences_done is None or sentences_done == corpus.count
    count = f"{corpus.count}" if complete else f"{sentences_done} of {corpus.count} (interrupted)"
    hidden = {"hide": config.hiding} if hides_tokens(checkpoint) else {"eos": "incl"} if checkpoint.two_sided else {}
    search = {}
    if setup.requested_metrics("translations"):
        search = checkpoint.search_facts(setup.translate_options) | {"text": config.text, "tok": setup.text.tokenize}
    return signature_of(
        {
            "m": "+".join(setup.metrics) or "none",
            **({"expert": config.expert} if config.expert else {}),
            **({"against": f"{setup.intact.format}-sha256={setup.intact.digest[:12]}"} if setup.intact else {}),
            **search,
            **hidden,
            "len": f"{setup.likelihood_options.limit}-{config.long}",
        },
        data=(corpus.digest, count),
        checkpoint=checkpoint,
        off={"mask": ",".join(map(str, setup.masked_heads))} if setup.masked_heads else None,
        transformers=True,
        replicates=config.bootstrap,
        seed=config.seed,
    )
