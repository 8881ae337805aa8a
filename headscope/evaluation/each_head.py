"""Every metric with one head masked at a time (the MHR fork's check of all masks).

Perplexity and accuracy of all heads come from one pass over the corpus: for each batch the encoder runs once,
and again only for its own heads. BLEU and chrF need a translation of the corpus for every head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from headscope.bootstrap import Array, Bootstrap, Estimate
from headscope.evaluation.fitting_metrics import (
    STATE_METRICS,
    TRANSLATION_METRICS,
    compares_states,
    needs_translation,
    predictions_of,
)
from headscope.evaluation.likelihood import Likelihood, likelihood
from headscope.evaluation.metrics.base import METRICS
from headscope.evaluation.metrics.macro_f1 import macro_f1
from headscope.evaluation.metrics.states import StateMetric
from headscope.evaluation.opened import OpenedEvaluation
from headscope.evaluation.quality import (
    cut_remark,
    done_of,
    evaluation_signature,
    perplexity,
    reference_texts,
    text_scores,
    tokenised_remark,
    translate_corpus,
)
from headscope.evaluation.states import StateComparison, compare_states
from headscope.heads import HeadId, all_heads, select_heads
from headscope.model.gating import masked
from headscope.progress import Progress, no_progress
from headscope.results import Signature

if TYPE_CHECKING:
    import pandas as pd


Scored = TypeVar("Scored", Likelihood, StateComparison)


@dataclass
class EachHead:
    """A row per masked head: every metric and its difference to the first row, where no further head is masked."""

    table: pd.DataFrame
    by: str
    signature: Signature
    remarks: list[str]
    sentences: int
    complete: bool = True
    late: bool = False


def score_each_head(opened: OpenedEvaluation, *, progress: Progress = no_progress) -> EachHead:
    """Measure the model with the mask of its config, then with each further head masked; writes nothing.

    The most important heads come first. Interrupted by Ctrl-C while references are scored, it returns the metrics of
    the sentences before (`complete` is then false).
    """
    config = opened.config
    layout, masked_heads = opened.checkpoint.layout, set(opened.masked_heads)
    chosen = (select_heads(config.heads, layout) if config.heads else []) or all_heads(layout)
    heads = [head for head in chosen if head not in masked_heads]
    columns: dict[str, Any] = {
        "site": ["", *(head.site.value for head in heads)],
        "layer": [None, *(head.layer for head in heads)],
        "head": [None, *(head.head for head in heads)],
    }
    with masked(opened.checkpoint.model, opened.masked_heads):
        scored = _likelihoods(opened, heads, progress)
        complete = scored is None or scored.complete
        if scored is not None:
            columns |= likelihood_columns(scored, Bootstrap(seed=config.seed, replicates=config.bootstrap))
        compared = _states(opened, heads, progress) if complete else None
        if compared is not None:
            columns |= state_columns(compared, opened.metrics)
            complete = compared.complete
        if complete and needs_translation(opened.metrics):
            try:
                columns |= _text_columns(opened, heads, progress)
            except KeyboardInterrupt:
                if scored is None:
                    raise
                complete = False
                opened.remarks.append("translating was interrupted, so there is no BLEU and no chrF")
    opened.remarks += opened.unknown.remarks(opened.checkpoint)
    by = next(name for name in (*TRANSLATION_METRICS, "nll_per_token", *STATE_METRICS) if name in columns)
    counted = done_of(scored, compared)
    done = opened.corpus.count if counted is None else counted
    return EachHead(_sorted(columns, by), by, evaluation_signature(opened, done=done), opened.remarks, done, complete)


def _likelihoods(opened: OpenedEvaluation, heads: Sequence[HeadId], progress: Progress) -> Likelihood | None:
    return _with_each_masked(opened, heads, progress, likelihood) if predictions_of(opened.metrics) else None


def _states(opened: OpenedEvaluation, heads: Sequence[HeadId], progress: Progress) -> StateComparison | None:
    compare = partial(compare_states, intact=opened.intact)
    return _with_each_masked(opened, heads, progress, compare) if compares_states(opened.metrics) else None


def _with_each_masked(
    opened: OpenedEvaluation, heads: Sequence[HeadId], progress: Progress, score: Callable[..., Scored]
) -> Scored:
    """One pass in which `score` measures the model as it is, and with each head masked."""
    masks = [[], *([head] for head in heads)]
    options = opened.likelihood_options
    with progress("each head", opened.corpus.count) as step:
        scored = score(
            opened.checkpoint, opened.corpus, options, masks=masks, progress=step, processes=opened.processes
        )
    opened.unknown = scored.losses.unknown
    opened.remarks += cut_remark(scored)
    return scored


def state_columns(compared: StateComparison, metrics: Sequence[str]) -> dict[str, Any]:
    """Columns [mask]: how near the states are to those of the intact model."""
    columns: dict[str, Any] = {}
    for name in filter(metrics.__contains__, STATE_METRICS):
        metric = METRICS.get(name)
        assert isinstance(metric, StateMetric)
        sums = metric.sums(compared)
        columns[name] = (sums.total.sum(dim=0) / sums.count.sum(dim=0)).numpy()
    return columns


def likelihood_columns(scored: Likelihood, bootstrap: Bootstrap) -> dict[str, Any]:
    """Columns [mask]: Σ -log p, its mean over tokens (or labels), perplexity, accuracy, differences to the first mask.

    Of classifiers macro-F1 instead of the perplexity.
    """
    nats, right = bootstrap.ratio(scored.nll), bootstrap.ratio(scored.right)
    gap: Estimate = bootstrap.function(lambda total, count: (total - total[:, :1]) / count, scored.nll)
    sums: Array = scored.nll.total.sum(dim=0).numpy()
    columns = {
        "nll": sums,
        "nll_per_token": nats.value,
        "nll_per_token_difference": gap.value,
        "nll_per_token_difference_low": gap.low,
        "nll_per_token_difference_high": gap.high,
        "perplexity": [perplexity(value) for value in nats.value],
        "accuracy": right.value,
        "accuracy_difference": right.value - right.value[0],
    }
    if scored.classes.used:
        del columns["perplexity"]
        f1 = macro_f1(scored.classes.total.sum(dim=0).numpy())
        columns |= {"macro-f1": f1, "macro-f1_difference": f1 - f1[0]}
    return columns


def _text_columns(opened: OpenedEvaluation, heads: Sequence[HeadId], progress: Progress) -> dict[str, list[float]]:
    references = reference_texts(opened)
    opened.remarks += tokenised_remark(references, opened.config.text)
    columns: dict[str, list[float]] = {}
    with progress("each head", opened.corpus.count * (len(heads) + 1)) as step:
        for mask in [[], *([head] for head in heads)]:
            with masked(opened.checkpoint.model, mask):
                hypotheses = translate_corpus(opened, step)
            scores = text_scores(hypotheses, references, opened.metrics, mode=opened.config.text, replicates=0)
            for score in scores:
                columns.setdefault(score.metric, []).append(score.value)
    return columns | {f"{name}_difference": [value - values[0] for value in values] for name, values in columns.items()}


def _sorted(columns: dict[str, Any], by: str) -> pd.DataFrame:
    """The first row stays; then the heads whose mask lowers performance most."""
    import pandas as pd

    table = pd.DataFrame(columns).astype({"layer": "Int64", "head": "Int64"})
    ascending = by in (*TRANSLATION_METRICS, "cosine", "token-cosine")
    heads = table.iloc[1:].sort_values(by, ascending=ascending, kind="stable")
    return pd.concat([table.iloc[:1], heads], ignore_index=True)
