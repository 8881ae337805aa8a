"""`headscope evaluate`: open a checkpoint and a text, measure, write the requested table.

The table has every metric, or with `--each-head` every metric with one head masked at a time, as the MHR fork checks
all masks. Metrics of likelihood and of states then come from one pass over the corpus for all heads: for each batch the
encoder runs once, and again only for its own heads. BLEU and chrF need a translation of the corpus for every head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headscope.bootstrap import Array, Bootstrap, Estimate
from headscope.config.commands import EvaluateConfig
from headscope.distributed import ALONE, Processes
from headscope.evaluation.likelihood import Likelihood
from headscope.evaluation.metrics.base import METRICS
from headscope.evaluation.opened import OpenedEvaluation, open_evaluation
from headscope.evaluation.quality import Evaluation, evaluation_signature, measure, score_corpus
from headscope.files.folders import check_writable
from headscope.files.output_checks import Input, check_file, inputs_of
from headscope.files.tables import write_csv
from headscope.heads import HeadId, Site, all_heads, select_heads
from headscope.model.discovery import eval_mode
from headscope.progress import Progress, no_progress
from headscope.results.answer import MAX_ROWS, Answer, AnswerTable, Result, signed_text
from headscope.signature import Signature, count_of

if TYPE_CHECKING:
    import pandas as pd


LOSS, LOSS_TITLE = "nll_per_token", "loss (nats)"


@dataclass(repr=False)
class EachHead(Result):
    """A table with a row for each masked head: every metric and its difference to the first row, without that mask.

    Rows are sorted `by` a column. The loss is that of tokens, or of a classifier's labels. `sites` are the model's.
    """

    table: pd.DataFrame
    by: str
    sites: Collection[Site]
    signature: Signature
    remarks: list[str]
    sentences: int
    complete: bool = True

    def answers(self) -> list[Answer]:
        """The most needed head, the table of most needed heads with the number of insignificant ones, and remarks."""
        columns = [name for name in self.table.columns[3:] if name != "nll" and not name.endswith(("_low", "_high"))]
        rows = []
        for row in self.table.head(MAX_ROWS).to_dict("records"):
            values = (signed_text(row[name]) if "_diff" in name else f"{row[name]:.4f}" for name in columns)
            head = HeadId.of_row(row).name(self.sites) if row["site"] else "none"
            rows.append((head, *values))
        table = AnswerTable(("head off", *map(self._title, columns)), tuple(rows))
        suffix = "" if self.complete else " (interrupted)"
        text = (
            f"{count_of(len(self.table) - 1, 'head')} off one by one, on {count_of(self.sentences, 'sentence')}{suffix}"
        )
        parts = [Answer("", f"{self._most_needed()}; {text}", caution=not self.complete)]
        parts += [Answer("Heads, the most needed first", self._interval_note(), table)]
        return [*parts, *(Answer("", remark, caution=remark.startswith("warning")) for remark in self.remarks)]

    def _most_needed(self) -> str:
        if len(self.table) < 2:
            return "no head was off"
        row, change = self.table.iloc[1].to_dict(), f"{self.by}_difference"
        name, low, high = HeadId.of_row(row).name(self.sites), row.get(f"{change}_low"), row.get(f"{change}_high")
        if low is None or math.isnan(low):
            intact = self.table[self.by][0]
            return f"{name} matters most: {self._title(self.by)} {row[self.by]:.4f}, {intact:.4f} with all"
        size = f"{self._title(change)} {signed_text(row[change])} (95 %: {signed_text(low)} to {signed_text(high)})"
        return f"{name} matters most: {size}" if low > 0 else f"no head is shown to matter; the most {name}: {size}"

    def _interval_note(self) -> str:
        change = f"{self.by}_difference"
        if f"{change}_low" not in self.table or len(self.table) < 2:
            return ""
        rows = self.table.iloc[1:]
        zero = int(((rows[f"{change}_low"] <= 0) & (rows[f"{change}_high"] >= 0)).sum())
        name = self._title(change)
        return f"the 95 % interval of {name} contains 0 for {zero} of {count_of(len(rows), 'head')}, uncorrected"

    def _title(self, name: str) -> str:
        metric, difference, _ = name.partition("_difference")
        metric = LOSS_TITLE if metric == LOSS else METRICS.get(metric).title.removesuffix(" to the intact model")
        return f"Δ {metric}" if difference else metric

    @property
    def record(self) -> dict[str, Any]:  # type: ignore[override]
        """The table."""
        rows = json.loads(self.table.to_json(orient="records"))  # NaN becomes null
        return {"signature": str(self.signature), "rows": rows, "remarks": self.remarks, "complete": self.complete}


def score_each_head(setup: OpenedEvaluation, *, progress: Progress = no_progress) -> EachHead:
    """Measure the model with the mask of its config, then with each further head masked; writes nothing.

    The most important heads come first. Interrupted by Ctrl-C while references are scored, it returns the metrics of
    the sentences before (`complete` is then false).
    """
    import pandas as pd

    config = setup.config
    layout, masked_heads = setup.checkpoint.layout, set(setup.masked_heads)
    selection = (select_heads(config.heads, layout) if config.heads else []) or all_heads(layout)
    heads = [head for head in selection if head not in masked_heads]
    columns: dict[str, Any] = {
        "site": ["", *(head.site.value for head in heads)],
        "layer": [None, *(head.layer for head in heads)],
        "head": [None, *(head.head for head in heads)],
    }
    with setup.configured_model():
        measurement = measure(setup, [(), *([head] for head in heads)], progress, step="each head")
    if measurement.likelihood is not None:
        columns |= loss_columns(measurement.likelihood, Bootstrap(seed=config.seed, replicates=config.bootstrap))
    for name, sums in measurement.sums.items():
        metric = METRICS.get(name)
        columns |= metric.columns(metric.of(sums.sum(axis=0)))
    metrics = [metric for metric in setup.requested_metrics() if metric.name in measurement.sums]
    of_translations = [metric for metric in metrics if metric.reads == "translations"]
    by, ascending = LOSS, False  # heads are sorted by translations, the loss, or states
    if of_translations or measurement.likelihood is None:
        by, ascending = (of_translations or metrics)[0].name, (of_translations or metrics)[0].higher_is_better
    table = pd.DataFrame(columns).astype({"layer": "Int64", "head": "Int64"})
    heads_off = table.iloc[1:].sort_values(by, ascending=ascending, kind="stable")  # the first row stays
    sentences_done = setup.corpus.count if measurement.n_sentences is None else measurement.n_sentences
    return EachHead(
        pd.concat([table.iloc[:1], heads_off], ignore_index=True),
        by,
        {site for site, _ in layout},
        evaluation_signature(setup, sentences_done=sentences_done),
        setup.remarks,
        sentences_done,
        complete=measurement.complete,
    )


def loss_columns(sums_by_mask: Likelihood, bootstrap: Bootstrap) -> dict[str, Any]:
    """Columns [mask]: Σ -log p, its mean over tokens (or labels), and the difference to the first mask."""
    nats = bootstrap.ratio(sums_by_mask.nll)
    gap: Estimate = bootstrap.function(lambda total, count: (total - total[:, :1]) / count, sums_by_mask.nll)
    sums: Array = sums_by_mask.nll.total.sum(dim=0).numpy()
    return {
        "nll": sums,
        LOSS: nats.value,
        f"{LOSS}_difference": gap.value,
        f"{LOSS}_difference_low": gap.low,
        f"{LOSS}_difference_high": gap.high,
    }


R = TypeVar("R", bound=Evaluation | EachHead)


def run_evaluation(config: EvaluateConfig, **run: Any) -> Evaluation:
    """Open everything unless `setup` is given, measure, and write `config.per_sentence`; `run`: see `_measure`.

    Several `processes` share the text; each gets the scores, and the first one writes. HeadscopeError for whatever the
    user can fix. Interrupted by Ctrl-C while references are scored, it returns the finished part (`complete` is False).
    """
    return _measure(config, config.per_sentence, score_corpus, **run)


def run_each_head(config: EvaluateConfig, **run: Any) -> EachHead:
    """As `run_evaluation`, with each head masked (see `score_each_head`); writes `config.out`."""
    return _measure(config, config.out, score_each_head, **run)


def _measure(
    config: EvaluateConfig,
    out: Path | None,
    measure: Callable[..., R],
    *,
    setup: OpenedEvaluation | None = None,
    progress: Progress = no_progress,
    processes: Processes = ALONE,
) -> R:
    """Measure and write the table to `out`; OutputError before anything is measured if `out` cannot be written."""
    inputs = inputs_of(config)
    if out is not None:
        check_file(out, inputs=inputs, force=config.force)
        check_writable(out)
    setup = replace(setup or open_evaluation(config), processes=processes)
    intact = setup.intact or setup.checkpoint
    if out is not None:
        inputs += [Input(Path(intact.path), checkpoint=True)] if setup.intact else []
        inputs += [Input(path) for path in setup.checkpoint.read_files]
        check_file(out, inputs=inputs, force=config.force)
    with eval_mode(setup.checkpoint.model), eval_mode(intact.model):
        result = measure(setup, progress=progress if processes.main else no_progress)
    if out is not None and processes.main:
        if not result.complete or (out.exists() and not config.force):  # no whole, or a file that came meanwhile
            out = out.with_name(f"{out.name}.{'new' if result.complete else 'partial'}")
            result.remarks.append(f"{out} has {'this result' if result.complete else 'the sentences that were done'}")
        write_csv(out, result.table if isinstance(result, EachHead) else result.sentences)
    return result
