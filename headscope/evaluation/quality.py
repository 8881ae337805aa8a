"""The quality of a model on a text, by what it predicts.

BLEU and chrF of its translations, perplexity and accuracy on the references; of classifiers loss, accuracy and macro-F1
of the labels; of encoders without a head how near its states are to those of the intact model.

BLEU and chrF are sacreBLEU's, with its signatures; their intervals come from the same resamples of sentences as all
others. "raw" compares detokenised texts with sacreBLEU's tokenisation; "tokenised-lowercase" takes texts as already
tokenised and ignores case, as fairseq's and story-of-heads' numbers do. Scores of the second kind are labelled as such.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope.bootstrap import Array, Bootstrap
from headscope.data.encoded import UnknownSubwords
from headscope.errors import ConfigError
from headscope.evaluation.likelihood import hides_tokens
from headscope.evaluation.metrics.base import METRICS, Metric, TextMode, Translations
from headscope.evaluation.opened import OpenedEvaluation
from headscope.evaluation.passes import MeasuredMetrics, measure
from headscope.progress import Progress, no_progress
from headscope.registry import unknown
from headscope.results import Signature, signature_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Score:
    """A metric over the corpus with its 95 % interval, and the signature of the library that counted it."""

    metric: str
    name: str
    value: float
    low: float
    high: float
    signature: str = ""
    decimals: int = 4


@dataclass
class Evaluation:
    """Scores of a corpus; `sentences` has a row each: sentence, tokens, nll, hypothesis (empty if not scored).

    `nll` is that of all `tokens`, which are labels of a classifier, as `unit` says.
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
    late: bool = False
    seconds: float = 0.0

    def __getitem__(self, metric: str) -> Score:
        """The score of a metric, such as "bleu"; ConfigError for one that was not measured."""
        for score in self.scores:
            if score.metric == metric:
                return score
        raise ConfigError(unknown("metric", metric, [score.metric for score in self.scores]))

    def __repr__(self) -> str:
        rows = [f"{score.name} {score.value:.5g} [{score.low:.5g}, {score.high:.5g}]" for score in self.scores]
        return "\n".join([f"<Evaluation on {len(self.sentences)} sentences>", *rows])


def score_corpus(opened: OpenedEvaluation, *, progress: Progress = no_progress) -> Evaluation:
    """Score an open checkpoint on a text; writes nothing."""
    began = time.monotonic()
    with opened.as_asked():
        found = measure(opened, [()], progress)
    bootstrap, text = Bootstrap(seed=opened.config.seed, replicates=opened.config.bootstrap), opened.config.text
    scored, checkpoint = found.scored, opened.checkpoint
    return Evaluation(
        scores=[
            score_of(metric, found.sums[metric.name][:, 0], bootstrap, title=metric.title_of(checkpoint), text=text)
            for metric in opened.asked()
            if metric.name in found.sums
        ],
        sentences=_per_sentence(opened.corpus.count, found),
        signature=evaluation_signature(opened, done=found.done),
        remarks=opened.remarks,
        unknown=opened.unknown,
        tokens=None if scored is None else int(scored.counts.sum()),
        nll=None if scored is None else float(scored.first.sum()),
        unit="labels" if checkpoint.label_names else "tokens",
        complete=found.complete,
        seconds=time.monotonic() - began,
    )


def score_of(metric: Metric, sums: Array, bootstrap: Bootstrap, *, title: str, text: TextMode) -> Score:
    """The score of a model from sums by group of sentences [g c]."""
    if metric.reads == "translations" and text != "raw":
        title = f"{title} (tokenised, lower-case)"
    found = metric.estimate(sums, bootstrap)
    value, low, high = (float(end) for end in (found.value, found.low, found.high))
    return Score(metric.name, title, value, low, high, metric.signature(text), metric.decimals)


def text_score(
    name: str,
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    text: TextMode = "raw",
    bootstrap: Bootstrap | None = None,
) -> Score:
    """A metric of translations, "bleu" or "chrf", of texts; its interval means something with a `bootstrap`."""
    metric = METRICS.get(name)
    sums = metric.sums(Translations(hypotheses, references, text))[:, 0]
    return score_of(metric, sums, bootstrap or Bootstrap(seed=1, replicates=1), title=metric.title, text=text)


def _per_sentence(count: int, found: MeasuredMetrics) -> pd.DataFrame:
    import pandas as pd

    scored = found.scored
    return pd.DataFrame(
        {
            "sentence": range(count),
            "tokens": [None] * count if scored is None else scored.counts.astype(int),
            "nll": [None] * count if scored is None else scored.first,
            "hypothesis": found.hypotheses or [""] * count,
        }
    )


def evaluation_signature(opened: OpenedEvaluation, *, done: int | None = None) -> Signature:
    """Everything that shapes the numbers, whatever metric they are of."""
    checkpoint, corpus, config = opened.checkpoint, opened.corpus, opened.config
    complete = done is None or done == corpus.count
    count = f"{corpus.count}" if complete else f"{done} of {corpus.count} (interrupted)"
    hidden = {"hide": config.hiding} if hides_tokens(checkpoint) else {"eos": "incl"} if checkpoint.two_sided else {}
    search = {}
    if opened.asked("translations"):
        search = checkpoint.search_facts(opened.translate_options) | {"text": config.text}
    return signature_of(
        {
            "m": "+".join(opened.metrics) or "none",
            **({"expert": config.expert} if config.expert else {}),
            **({"against": f"{opened.intact.format}-sha256={opened.intact.digest[:12]}"} if opened.intact else {}),
            **search,
            **hidden,
            "len": f"{opened.likelihood_options.limit}-{config.long}",
        },
        data=(corpus.digest, count),
        checkpoint=checkpoint,
        off={"mask": ",".join(map(str, opened.masked_heads))} if opened.masked_heads else None,
        transformers=True,
        replicates=config.bootstrap,
        seed=config.seed,
    )
