"""Every metric with one head masked at a time (the MHR fork's check of all masks).

Perplexity, accuracy and what states are compared by come from one pass over the corpus for all heads: for each batch
the encoder runs once, and again only for its own heads. BLEU and chrF need a translation of the corpus for every head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headscope.bootstrap import Array, Bootstrap, Estimate
from headscope.evaluation.likelihood import Likelihood
from headscope.evaluation.metrics.base import METRICS
from headscope.evaluation.opened import OpenedEvaluation
from headscope.evaluation.quality import MeasuredMetrics, evaluation_signature, measure
from headscope.heads import all_heads, select_heads
from headscope.progress import Progress, no_progress
from headscope.signature import Signature

if TYPE_CHECKING:
    import pandas as pd

LOSS = "nll_per_token"


@dataclass
class EachHead:
    """A row per masked head: every metric and its difference to the first row, where no further head is masked.

    Heads are sorted `by` a column; `loss` is what the table's loss is called, of tokens or of labels.
    """

    table: pd.DataFrame
    by: str
    signature: Signature
    remarks: list[str]
    sentences: int
    loss: str = "nll/token"
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
    with opened.as_asked():
        found = measure(opened, [(), *([head] for head in heads)], progress, step="each head")
    if found.scored is not None:
        columns |= loss_columns(found.scored, Bootstrap(seed=config.seed, replicates=config.bootstrap))
    for name, sums in found.sums.items():
        metric = METRICS.get(name)
        columns |= metric.columns(metric.of(sums.sum(axis=0)))
    by, ascending = _order(opened, found)
    done = opened.corpus.count if found.done is None else found.done
    return EachHead(
        _sorted(columns, by, ascending=ascending),
        by,
        evaluation_signature(opened, done=done),
        opened.remarks,
        done,
        loss="loss" if opened.checkpoint.label_names else "nll/token",
        complete=found.complete,
    )


def loss_columns(scored: Likelihood, bootstrap: Bootstrap) -> dict[str, Any]:
    """Columns [mask]: Σ -log p, its mean over tokens (or labels), and the difference to the first mask."""
    nats = bootstrap.ratio(scored.nll)
    gap: Estimate = bootstrap.function(lambda total, count: (total - total[:, :1]) / count, scored.nll)
    sums: Array = scored.nll.total.sum(dim=0).numpy()
    return {
        "nll": sums,
        LOSS: nats.value,
        f"{LOSS}_difference": gap.value,
        f"{LOSS}_difference_low": gap.low,
        f"{LOSS}_difference_high": gap.high,
    }


def _order(opened: OpenedEvaluation, found: MeasuredMetrics) -> tuple[str, bool]:
    """What heads are sorted by, and whether the lowest come first: translations, the loss, or states."""
    measured = [metric for metric in opened.asked() if metric.name in found.sums]
    translated = [metric for metric in measured if metric.reads == "translations"]
    if not translated and found.scored is not None:
        return LOSS, False
    first = (translated or measured)[0]
    return first.name, first.higher_is_better


def _sorted(columns: dict[str, Any], by: str, *, ascending: bool) -> pd.DataFrame:
    """The first row stays; then the heads whose mask lowers performance most."""
    import pandas as pd

    table = pd.DataFrame(columns).astype({"layer": "Int64", "head": "Int64"})
    heads = table.iloc[1:].sort_values(by, ascending=ascending, kind="stable")
    return pd.concat([table.iloc[:1], heads], ignore_index=True)
