"""The quality of a model on a text, by what it predicts.

BLEU and chrF of its translations, perplexity and accuracy on the references; of classifiers loss, accuracy and macro-F1
of the labels; of encoders without a head how near its states are to those of the intact model.

BLEU and chrF are sacreBLEU's, with its signatures and its bootstrap. "raw" compares detokenised texts with sacreBLEU's
tokenisation; "tokenised-lowercase" takes texts as already tokenised and ignores case, as fairseq's and story-of-heads'
numbers do. Scores of the second kind are labelled as such.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from headscope.bootstrap import Bootstrap
from headscope.data.batching import Omissions
from headscope.data.unknown_subwords import UnknownSubwords
from headscope.errors import ConfigError, DataError
from headscope.evaluation.fitting_metrics import (
    STATE_METRICS,
    compares_states,
    needs_translation,
    predictions_of,
)
from headscope.evaluation.likelihood import Likelihood, hides_tokens, likelihood
from headscope.evaluation.metrics.base import METRICS
from headscope.evaluation.metrics.macro_f1 import macro_f1
from headscope.evaluation.metrics.states import StateMetric
from headscope.evaluation.opened import OpenedEvaluation
from headscope.evaluation.states import StateComparison, compare_states
from headscope.evaluation.translation import translate_lines
from headscope.model.gating import masked
from headscope.progress import Progress, no_progress
from headscope.registry import unknown
from headscope.results import Signature, signature_of

if TYPE_CHECKING:
    import pandas as pd

TextMode = Literal["raw", "tokenised-lowercase"]


@dataclass(frozen=True)
class Score:
    """A metric over the corpus with its 95 % interval, and sacreBLEU's signature where it is sacreBLEU's."""

    metric: str
    name: str
    value: float
    low: float
    high: float
    signature: str = ""


@dataclass
class Evaluation:
    """Scores of a corpus; `sentences` has a row each: sentence, tokens, nll, hypothesis (empty if not scored)."""

    scores: list[Score]
    sentences: pd.DataFrame
    signature: Signature
    remarks: list[str]
    unknown: UnknownSubwords
    tokens: int | None = None
    nll: float | None = None
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
    with masked(opened.checkpoint.model, opened.masked_heads):
        evaluation = _evaluate(opened, progress)
    evaluation.seconds = time.monotonic() - began
    return evaluation


def _evaluate(opened: OpenedEvaluation, progress: Progress) -> Evaluation:
    scores: list[Score] = []
    hypotheses: list[str] = []
    scored: Likelihood | None = None
    compared: StateComparison | None = None
    corpus, config = opened.corpus, opened.config
    if predictions_of(opened.metrics):
        with progress("scoring", corpus.count) as step:
            scored = likelihood(
                opened.checkpoint, corpus, opened.likelihood_options, progress=step, processes=opened.processes
            )
        opened.unknown = scored.losses.unknown
        scores += likelihood_scores(scored, opened)
    complete = scored is None or scored.complete
    if complete and compares_states(opened.metrics):
        with progress("comparing", corpus.count) as step:
            compared = compare_states(
                opened.checkpoint,
                corpus,
                opened.likelihood_options,
                intact=opened.intact,
                progress=step,
                processes=opened.processes,
            )
        opened.unknown, complete = compared.losses.unknown, compared.complete
        scores += state_scores(compared, opened)
    if needs_translation(opened.metrics) and complete:
        try:
            with progress("translating", corpus.count) as step:
                hypotheses = translate_corpus(opened, step)
            references = reference_texts(opened)
            opened.remarks += tokenised_remark(references, config.text)
            mode, replicates = config.text, config.bootstrap
            scores[:0] = text_scores(hypotheses, references, opened.metrics, mode=mode, replicates=replicates)
        except KeyboardInterrupt:
            if scored is None:
                raise
            complete = False
            opened.remarks.append("translating was interrupted, so there is no BLEU and no chrF")
    opened.remarks += cut_remark(scored or compared)
    opened.remarks += opened.unknown.remarks(opened.checkpoint)
    return Evaluation(
        scores=scores,
        sentences=_per_sentence(corpus.count, scored, hypotheses),
        signature=evaluation_signature(opened, done=done_of(scored, compared)),
        remarks=opened.remarks,
        unknown=opened.unknown,
        tokens=None if scored is None else int(scored.counts.sum()),
        nll=None if scored is None else float(scored.first.sum()),
        complete=complete,
    )


def cut_remark(read: Likelihood | StateComparison | None) -> list[str]:
    """How many sentences were cut."""
    losses = Omissions() if read is None else read.losses
    cut = f"cut off at the length limit: {losses.truncated} sentences (--max-length, --long)"
    return [cut] if losses.truncated else []


def done_of(*passes: Likelihood | StateComparison | None) -> int | None:
    """How many sentences all passes have done; None where there was no pass."""
    return min((read.sentences for read in passes if read is not None), default=None)


def translate_corpus(opened: OpenedEvaluation, step: Callable[[int], None]) -> list[str]:
    """The best translation of every source line, as the model and its masks are now."""
    lines, unknown = (sentence.source for sentence in opened.corpus), UnknownSubwords()
    cut: list[int] = []
    translations = translate_lines(
        opened.checkpoint,
        lines,
        options=opened.translate_options,
        tokens=opened.config.batch_tokens,
        cut=cut.append,
        unknown=unknown,
        progress=step,
        processes=opened.processes,
    )
    texts = [candidates[0].text for candidates in translations]
    opened.unknown = opened.unknown or unknown  # what the likelihood counted has the target too
    if cut:
        _report_truncated(opened, cut)
    return texts


def _report_truncated(opened: OpenedEvaluation, lines: Sequence[int]) -> None:
    """A remark that lines (by number from 1) were translated from their first pieces, or DataError, as is asked."""
    limit = opened.checkpoint.reads(opened.translate_options.longest)
    if opened.config.long == "refuse":
        raise DataError(
            f"{opened.corpus.name}:{min(lines)}: more than {limit} pieces to translate; shorten the line, raise "
            "--max-length, or take --long truncate"
        )
    remark = f"translated from their first {limit} pieces: {len(lines)} sentences (--max-length, --long)"
    opened.remarks += [remark] if remark not in opened.remarks else []


def reference_texts(opened: OpenedEvaluation) -> list[str]:
    """References as translations are written, pieces put together."""
    return [opened.checkpoint.joined(sentence.target or "") for sentence in opened.corpus]


def tokenised_remark(references: Sequence[str], mode: TextMode) -> list[str]:
    """A remark where "raw" is asked of references that look tokenised."""
    spaced = sum(text.endswith((" .", " ?", " !")) for text in references)
    if mode == "raw" and spaced > len(references) / 2:
        return [
            "the references look tokenised, so raw BLEU and chrF cannot be compared with published ones; give "
            "detokenised text, or --text tokenised-lowercase"
        ]
    return []


def text_scores(
    hypotheses: Sequence[str], references: Sequence[str], metrics: Sequence[str], *, mode: TextMode, replicates: int
) -> list[Score]:
    """sacreBLEU's BLEU and chrF of a corpus; `replicates` below 2 gives no interval."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    raw = mode == "raw"
    makers: Mapping[str, tuple[str, Callable[[], Any]]] = {
        "bleu": ("BLEU", lambda: BLEU(tokenize="13a" if raw else "none", lowercase=not raw, force=True)),
        "chrf": ("chrF2", lambda: CHRF(lowercase=not raw)),
    }
    scores = []
    for name, (label, make) in makers.items():
        if name not in metrics:
            continue
        metric = make()
        try:
            resampled = replicates if len(hypotheses) > 1 else 1
            score = metric.corpus_score(hypotheses, [references], n_bootstrap=max(resampled, 1))
        except TypeError:  # sacreBLEU 2.6 cannot average replicates of which some match nowhere
            score = (metric := make()).corpus_score(hypotheses, [references])
        signature = str(metric.get_signature())
        fields = json.loads(score.format(width=9, signature=signature, is_json=True))
        mean, spread = fields.get("confidence_mean", np.nan), fields.get("confidence_var", np.nan)
        title = label if raw else f"{label} (tokenised, lower-case)"
        scores.append(Score(name, title, float(score.score), mean - spread, mean + spread, signature))
    return scores


def likelihood_scores(scored: Likelihood, opened: OpenedEvaluation) -> list[Score]:
    """Perplexity = exp(Σ -log p / tokens) and the share of tokens that the model finds likeliest."""
    bootstrap = Bootstrap(seed=opened.config.seed, replicates=opened.config.bootstrap)
    (value, low, high), (share, least, most) = (
        [float(end[0]) for end in (ratio.value, ratio.low, ratio.high)]
        for ratio in (bootstrap.ratio(scored.nll), bootstrap.ratio(scored.right))
    )
    name = "masked-token perplexity" if hides_tokens(opened.checkpoint) else "perplexity"
    of = {"words": "token accuracy", "tags": "word accuracy"}.get(opened.checkpoint.predicts, "accuracy")
    scores = [
        Score("perplexity", name, perplexity(value), perplexity(low), perplexity(high)),
        Score("loss", "loss (nats)", value, low, high),
        Score("accuracy", of, share, least, most),
    ]
    if scored.classes.used:
        f1 = bootstrap.function(lambda counts, _: torch.from_numpy(macro_f1(counts[:, 0].numpy())), scored.classes)
        scores.append(Score("macro-f1", "macro-F1", float(f1.value), float(f1.low), float(f1.high)))
    return [score for score in scores if score.metric in opened.metrics]


def state_scores(compared: StateComparison, opened: OpenedEvaluation) -> list[Score]:
    """Cosines and distances of states to those of the intact model."""
    bootstrap = Bootstrap(seed=opened.config.seed, replicates=opened.config.bootstrap)
    scores = []
    for name in filter(opened.metrics.__contains__, STATE_METRICS):
        metric = METRICS.get(name)
        assert isinstance(metric, StateMetric)
        mean = bootstrap.ratio(metric.sums(compared))
        value, low, high = (float(end[0]) for end in (mean.value, mean.low, mean.high))
        scores.append(Score(name, metric.title, value, low, high))
    return scores


def perplexity(nats: float) -> float:
    """Of a mean -log p; infinite where it is too large for a number."""
    with np.errstate(over="ignore"):
        return float(np.exp(nats))


def _per_sentence(count: int, scored: Likelihood | None, hypotheses: Sequence[str]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        {
            "sentence": range(count),
            "tokens": [None] * count if scored is None else scored.counts.astype(int),
            "nll": [None] * count if scored is None else scored.first,
            "hypothesis": hypotheses or [""] * count,
        }
    )


def evaluation_signature(opened: OpenedEvaluation, *, done: int | None = None) -> Signature:
    """Everything that shapes the numbers, whatever metric they are of."""
    checkpoint, corpus, config = opened.checkpoint, opened.corpus, opened.config
    complete = done is None or done == corpus.count
    count = f"{corpus.count}" if complete else f"{done} of {corpus.count} (interrupted)"
    hidden = {"hide": config.hiding} if hides_tokens(checkpoint) else {"eos": "incl"} if checkpoint.two_sided else {}
    search = {}
    if needs_translation(opened.metrics):
        search = checkpoint.search_facts(opened.translate_options) | {"text": config.text}
    return signature_of(
        {
            "m": "+".join(opened.metrics) or "none",
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
