"""How good a model is on a text: BLEU and chrF of its translations, perplexity and accuracy of the references.

BLEU and chrF are sacreBLEU's own, with its signatures and its bootstrap. "raw" compares the texts as they
are, with sacreBLEU's own tokenisation; "tokenised-lowercase" takes them as tokenised already and ignores case,
as fairseq's and story-of-heads' own numbers do: the two are never mixed, and each is labelled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headscope.bootstrap import Bootstrap
from headscope.config import METRICS, EvaluateConfig, EvaluateOptions
from headscope.data.batching import BatchingOptions, sentence_limit
from headscope.data.corpus import Corpus, open_corpus
from headscope.data.unknown_subwords import UnknownPieces
from headscope.errors import ConfigError, DataError
from headscope.evaluation.likelihood import Likelihood, LikelihoodOptions, likelihood
from headscope.evaluation.translation import translate_lines
from headscope.files.folders import kept_apart
from headscope.files.output_checks import check_file, inputs_of
from headscope.files.writing import written
from headscope.formats.base import Checkpoint, open_configured
from headscope.formats.translate_options import TranslateOptions
from headscope.heads import HeadId, Site, select_heads
from headscope.model.gating import masked
from headscope.progress import Progress, no_progress
from headscope.registry import unknown
from headscope.results import Signature, signature_of

if TYPE_CHECKING:
    import pandas as pd

TextMode = Literal["raw", "tokenised-lowercase"]
OF_TRANSLATIONS = ("bleu", "chrf")


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
    """What came of it. `sentences` has a row each: sentence, tokens, nll, hypothesis (empty where not asked for)."""

    scores: list[Score]
    sentences: pd.DataFrame
    signature: Signature
    remarks: list[str]
    unknown: UnknownPieces
    tokens: int | None = None
    nll: float | None = None
    complete: bool = True
    seconds: float = 0.0

    def __getitem__(self, metric: str) -> Score:
        """The score of a metric, such as "bleu"; ConfigError for one that was not measured."""
        for score in self.scores:
            if score.metric == metric:
                return score
        raise ConfigError(unknown("metric", metric, [score.metric for score in self.scores]))


@dataclass
class OpenedEvaluation:
    """A checkpoint and a corpus that fit each other, and what a config asks of them."""

    config: EvaluateOptions
    checkpoint: Checkpoint
    corpus: Corpus
    metrics: tuple[str, ...]
    off: list[HeadId]
    reading: LikelihoodOptions
    options: TranslateOptions
    remarks: list[str] = field(default_factory=list)
    unknown: UnknownPieces = field(default_factory=UnknownPieces)


def run_evaluation(config: EvaluateConfig, *, progress: Progress = no_progress) -> Evaluation:
    """Open everything, measure, and write `config.per_sentence`.

    HeadscopeError for whatever the user can fix. Interrupted by Ctrl-C while references are scored, it gives
    what was done (`complete` is then false).
    """
    if config.per_sentence is not None:
        check_file(config.per_sentence, inputs=inputs_of(config), force=config.force)
    found = score_corpus(open_all(config), progress=progress)
    if config.per_sentence is not None:
        table, place = found.sentences, kept_apart(config.per_sentence, complete=found.complete)
        written(place, lambda path: table.to_csv(path, index=False))
        if place != config.per_sentence:
            found.remarks.append(f"{config.per_sentence} stays as it was; {place} has the sentences that were done")
    return found


def score_corpus(opened: OpenedEvaluation, *, progress: Progress = no_progress) -> Evaluation:
    """Score an open checkpoint on a text; writes nothing."""
    began = time.monotonic()
    with masked(opened.checkpoint.model, opened.off):
        found = _evaluate(opened, progress)
    found.seconds = time.monotonic() - began
    return found


def open_all(config: EvaluateConfig) -> OpenedEvaluation:
    """The checkpoint and corpus of a config, checked against each other and against what is asked."""
    corpus = open_corpus(config.source, target=config.target, max_sentences=config.max_sentences)
    checkpoint = open_configured(config)
    return matched(checkpoint, corpus, config)


def matched(checkpoint: Checkpoint, corpus: Corpus, config: EvaluateOptions) -> OpenedEvaluation:
    """A checkpoint and a corpus, checked against each other and against what is asked; ConfigError if they differ."""
    if checkpoint.two_sided is not corpus.has_target:
        problem = (
            "needs --target, the references" if checkpoint.two_sided else "reads one side only; leave out --target"
        )
        raise ConfigError(f"a model of type {checkpoint.model_type!r} {problem}")
    metrics = _metrics(config, checkpoint)
    batching = BatchingOptions(tokens=config.batch_tokens, limit=config.max_length, long=config.long)
    limit = sentence_limit(checkpoint, batching)
    reading = LikelihoodOptions(config.batch_tokens, limit, config.long, config.hiding, config.seed)
    options = TranslateOptions(
        beam=config.beam,
        power=config.lenpen,
        max_ratio=config.max_len_a,
        max_extra=config.max_len_b,
        longest=config.max_length,
    )
    if translates(metrics):
        checkpoint.search_facts(options)
    off = select_heads(config.mask, checkpoint.layout) if config.mask else []
    return OpenedEvaluation(config, checkpoint, corpus, metrics, off, reading, options)


def _metrics(config: EvaluateOptions, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Those asked for, or all that fit; `--each-head` translates only where it is told to."""
    fitting = METRICS if checkpoint.two_sided else METRICS[2:]
    if unfit := [name for name in config.metrics if name not in fitting]:
        raise ConfigError(
            f"{unfit[0]} needs a model that translates; a model of type {checkpoint.model_type!r} can be asked for "
            f"{', '.join(fitting)}"
        )
    return config.metrics or (METRICS[2:] if config.each_head else fitting)


def translates(metrics: Sequence[str]) -> bool:
    """Whether any of the metrics compares translations."""
    return any(name in OF_TRANSLATIONS for name in metrics)


def _evaluate(opened: OpenedEvaluation, progress: Progress) -> Evaluation:
    scores: list[Score] = []
    hypotheses: list[str] = []
    scored: Likelihood | None = None
    corpus, config = opened.corpus, opened.config
    if set(opened.metrics) - set(OF_TRANSLATIONS):
        with progress("scoring", corpus.count) as step:
            scored = likelihood(opened.checkpoint, corpus, opened.reading, progress=step)
        opened.unknown = scored.losses.unknown
        scores += likelihood_scores(scored, opened)
    complete = scored is None or scored.complete
    if translates(opened.metrics) and complete:
        try:
            with progress("translating", corpus.count) as step:
                hypotheses = translated(opened, step)
            references = reference_texts(opened)
            opened.remarks += look_tokenised(references, config.text)
            mode, replicates = config.text, config.bootstrap
            scores[:0] = text_scores(hypotheses, references, opened.metrics, mode=mode, replicates=replicates)
        except KeyboardInterrupt:
            if scored is None:
                raise
            complete = False
            opened.remarks.append("translating was interrupted, so there is no BLEU and no chrF")
    if scored is not None and scored.losses.truncated:
        opened.remarks.append(
            f"cut off at the length limit: {scored.losses.truncated} sentences (--max-length, --long)"
        )
    opened.remarks += opened.unknown.remarks(opened.checkpoint)
    return Evaluation(
        scores=scores,
        sentences=_per_sentence(corpus.count, scored, hypotheses),
        signature=evaluation_signature(opened, done=None if scored is None else scored.sentences),
        remarks=opened.remarks,
        unknown=opened.unknown,
        tokens=None if scored is None else int(scored.counts.sum()),
        nll=None if scored is None else float(scored.first.sum()),
        complete=complete,
    )


def translated(opened: OpenedEvaluation, step: Callable[[int], None]) -> list[str]:
    """The best translation of every source line, as the model and its masks are now."""
    lines, unknown = (sentence.source for sentence in opened.corpus), UnknownPieces()
    cut: list[int] = []
    found = translate_lines(
        opened.checkpoint,
        lines,
        options=opened.options,
        tokens=opened.config.batch_tokens,
        cut=cut.append,
        unknown=unknown,
        progress=step,
    )
    texts = [best[0].text for best in found]
    opened.unknown = opened.unknown or unknown  # what the likelihood counted has the target too
    if cut:
        _tell_cut(opened, cut)
    return texts


def _tell_cut(opened: OpenedEvaluation, lines: Sequence[int]) -> None:
    """A remark that lines (by number from 1) were translated from their first pieces, or DataError, as is asked."""
    limit = opened.checkpoint.reads(opened.options.longest)
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


def look_tokenised(references: Sequence[str], mode: TextMode) -> list[str]:
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
    found = []
    for name in [each for each in OF_TRANSLATIONS if each in metrics]:
        label, make = makers[name]
        metric = make()
        try:
            resampled = replicates if len(hypotheses) > 1 else 1
            score = metric.corpus_score(hypotheses, [references], n_bootstrap=max(resampled, 1))
        except TypeError:  # sacreBLEU 2.6 cannot average replicates of which some match nowhere
            score = (metric := make()).corpus_score(hypotheses, [references])
        mine = str(metric.get_signature())
        told = json.loads(score.format(width=9, signature=mine, is_json=True))
        mean, spread = told.get("confidence_mean", np.nan), told.get("confidence_var", np.nan)
        title = label if raw else f"{label} (tokenised, lower-case)"
        found.append(Score(name, title, float(score.score), mean - spread, mean + spread, mine))
    return found


def likelihood_scores(scored: Likelihood, opened: OpenedEvaluation) -> list[Score]:
    """Perplexity = exp(Σ -log p / tokens) and the share of tokens that the model finds likeliest."""
    bootstrap = Bootstrap(seed=opened.config.seed, replicates=opened.config.bootstrap)
    ratios = bootstrap.ratio(scored.nll), bootstrap.ratio(scored.right)
    ends = [[float(end[0]) for end in (each.value, each.low, each.high)] for each in ratios]
    (value, low, high), (share, less, more) = ends
    name = "masked-token perplexity" if hides(opened.checkpoint) else "perplexity"
    found = [
        Score("perplexity", name, perplexity(value), perplexity(low), perplexity(high)),
        Score("accuracy", "token accuracy", share, less, more),
    ]
    return [score for score in found if score.metric in opened.metrics]


def perplexity(nats: float) -> float:
    """Of a mean -log p; infinite where it is too large for a number."""
    with np.errstate(over="ignore"):
        return float(np.exp(nats))


def hides(checkpoint: Checkpoint) -> bool:
    """Whether the model is asked for hidden tokens: an encoder alone."""
    return not checkpoint.two_sided and any(
        place.site is Site.ENCODER_SELF for place in checkpoint.attention_sites.order
    )


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
    whole = done is None or done == corpus.count
    count = f"{corpus.count}" if whole else f"{done} of {corpus.count} (interrupted)"
    hidden = {"hide": config.hiding} if hides(checkpoint) else {"eos": "incl"} if checkpoint.two_sided else {}
    search = checkpoint.search_facts(opened.options) | {"text": config.text} if translates(opened.metrics) else {}
    return signature_of(
        {"m": "+".join(opened.metrics), **search, **hidden, "len": f"{opened.reading.limit}-{config.long}"},
        data=(corpus.digest, count),
        checkpoint=checkpoint,
        off={"mask": ",".join(map(str, opened.off))} if opened.off else None,
        transformers=True,
        replicates=config.bootstrap,
        seed=config.seed,
    )
