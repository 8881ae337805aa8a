"""The tables of a sweep: a row a cell with intervals and paired tests, and the heads that stay in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from headscope.bootstrap import Array, Bootstrap
from headscope.evaluation.comparison import compare_scores
from headscope.evaluation.metrics.base import METRICS
from headscope.heads import HeadId
from headscope.pruning.sweep.config import UNPRUNED, Cell, SweepConfig

Record = Mapping[str, Any]


def make_table(
    records: Sequence[Record], config: SweepConfig, sites: Mapping[str, int], functions: pd.DataFrame | None
) -> pd.DataFrame:
    """A row a cell.

    `value` is the metric with its 95 % interval, `difference` that to the unpruned model (positive: higher), with
    interval and p-value of a paired bootstrap; NaN where the unpruned model is not measured yet. `loss` is in nats a
    token (of a classifier: a sentence). `functions_NAME` counts survivors with that function, once in each that
    a head has, `functions_none` those without any.
    """
    unpruned = next((np.array(record["sums"]) for record in records if record["cell"]["method"] == UNPRUNED), None)
    bootstrap = Bootstrap(seed=config.seed, replicates=config.bootstrap)
    kinds = None if functions is None else kinds_by_head(functions)
    rows = [_row(record, sites, unpruned, bootstrap) | _functions(record, kinds) for record in records]
    return with_seeds(rows)


def with_seeds(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A table of rows; seeds stay whole numbers beside cells that have none, which pandas makes floats of."""
    return pd.DataFrame(rows).assign(seed=pd.array([row["seed"] for row in rows], dtype="Int64"))


def _row(record: Record, sites: Mapping[str, int], unpruned: Array | None, bootstrap: Bootstrap) -> dict[str, Any]:
    cell, sums = Cell(**record["cell"]), np.array(record["sums"])
    heads = Counter(name.partition(".")[0] for name in record["kept"])
    metric = METRICS.get(record["metric"])
    comparison = asdict(compare_scores(metric, sums, sums if unpruned is None else unpruned, bootstrap))
    if unpruned is None:
        comparison |= dict.fromkeys(("difference", "difference_low", "difference_high", "p"), float("nan"))
    total, count = record["loss"]
    return {
        "method": cell.method,
        "control": "from scratch" if cell.control else "",
        "size": cell.size,
        "seed": cell.seed,
        "kept": len(record["kept"]),
        "of": sum(sites.values()),
        **{f"kept_{site}": heads[site] for site in sites},
        "metric": metric.name,
        **comparison,
        "loss": total / count,
        "lambda": record["facts"].get("lambda_paper", float("nan")),
        "minutes": record["seconds"] / 60,
        "cell": cell.name,
    }


def labels_by_head(functions: pd.DataFrame) -> dict[str, str]:
    """The column `functions` of a run of `analyze`, by head: `positional:-1;rare`."""
    columns = (functions[name] for name in ("site", "layer", "head", "functions"))
    return {f"{site}.{layer}.{head}": str(labels) for site, layer, head, labels in zip(*columns, strict=True)}


def kinds_by_head(functions: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    """The kinds of function of every head: `positional:-1;rare` gives positional and rare."""
    by_head = {}
    for head, labels in labels_by_head(functions).items():
        kinds = [label.partition(":")[0].strip() for label in labels.split(";")]
        by_head[head] = tuple(dict.fromkeys(kind for kind in kinds if kind))
    return by_head


def _functions(record: Record, by_head: Mapping[str, tuple[str, ...]] | None) -> dict[str, float]:
    """Survivors by kind of function; NaN for models trained from scratch, whose heads are others."""
    if by_head is None:
        return {}
    kinds = sorted({kind for kinds in by_head.values() for kind in kinds})
    if record["cell"]["control"]:
        return dict.fromkeys([f"functions_{kind}" for kind in [*kinds, "none"]], float("nan"))
    survivors = [by_head.get(name, ()) for name in record["kept"]]
    return {
        **{f"functions_{kind}": sum(kind in head for head in survivors) for kind in kinds},
        "functions_none": sum(not head for head in survivors),
    }


def survivors(records: Sequence[Record], functions: pd.DataFrame | None) -> pd.DataFrame:
    """A row for every head that a cell keeps, with its functions where they are known; controls have none."""
    labels = None if functions is None else labels_by_head(functions)
    rows = []
    for record in records:
        cell = Cell(**record["cell"])
        for head in [] if cell.control else map(HeadId.parse, record["kept"]):
            row = {"method": cell.method, "size": cell.size, "seed": cell.seed, "cell": cell.name}
            row |= {"site": head.site.value, "layer": head.layer, "head": head.head}
            rows.append(row if labels is None else row | {"functions": labels.get(str(head), "")})
    return with_seeds(rows)


def survivor_summary(table: pd.DataFrame) -> pd.DataFrame:
    """The table with seeds put together: mean, standard deviation and extremes of the value, the largest p."""
    summary = table.groupby(["method", "control", "size"], sort=False, dropna=False).agg(
        seeds=("value", "size"),
        kept=("kept", "mean"),
        value=("value", "mean"),
        sd=("value", "std"),
        least=("value", "min"),
        most=("value", "max"),
        difference=("difference", "mean"),
        p=("p", "max"),
        loss=("loss", "mean"),
        minutes=("minutes", "sum"),
    )
    return summary.reset_index()


def unharmed(table: pd.DataFrame, *, within: float | None) -> pd.DataFrame:
    """By method: the fewest heads (mean over seeds) at which the mean is at most `within` worse than unpruned.

    Rows method, control, size, kept, of, difference, within; methods that are worse at all sizes are left out. `within`
    None is the metric's own: 0.25 BLEU, 0.1 perplexity, 0.01 accuracy.
    """
    columns = ["method", "control", "size", "kept", "of", "difference", "within"]
    if table.empty:
        return pd.DataFrame(columns=columns)
    metric = METRICS.get(table["metric"].iloc[0])
    limit = metric.within if within is None else within
    means = survivor_summary(table)
    means["of"], means["within"] = table["of"].iloc[0], limit
    worse = -means["difference"] if metric.higher_is_better else means["difference"]
    good = means[(worse <= limit + 1e-12) & (means["method"] != UNPRUNED)]
    best = good.sort_values("kept", kind="stable").groupby(["method", "control"], sort=False).head(1)
    return best.sort_values("kept", kind="stable")[columns].reset_index(drop=True)
