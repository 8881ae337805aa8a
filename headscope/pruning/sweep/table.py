"""The tables of a sweep: a row a cell with intervals and paired tests, and the heads that stay in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from headscope.bootstrap import Array, Bootstrap
from headscope.heads import HeadId
from headscope.pruning.sweep.config import UNPRUNED, Cell, SweepConfig
from headscope.pruning.sweep.quality import METRICS, compare_scores

Record = Mapping[str, Any]
LABELS = Mapping[str, tuple[str, ...]]


def make_table(
    records: Sequence[Record], config: SweepConfig, sites: Mapping[str, int], functions: pd.DataFrame | None
) -> pd.DataFrame:
    """A row a cell.

    `value` is the metric with its 95 % interval, `difference` that to the unpruned model (positive: higher), with
    interval and p-value of a paired bootstrap; NaN where the unpruned model is not measured yet. `loss` is in nats a
    token (of a classifier: a sentence). `functions_NAME` counts survivors with that function, once in each that
    a head has, `functions_none` those without any.
    """
    whole = next((np.array(each["sums"]) for each in records if each["cell"]["method"] == UNPRUNED), None)
    bootstrap = Bootstrap(seed=config.seed, replicates=config.bootstrap)
    labels = None if functions is None else labels_of(functions)
    rows = [_row(each, sites, whole, bootstrap) | _functions(each, labels) for each in records]
    return _with_seeds(rows)


def _with_seeds(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A table of rows; seeds stay whole numbers beside cells that have none, which pandas makes floats of."""
    return pd.DataFrame(rows).assign(seed=pd.array([row["seed"] for row in rows], dtype="Int64"))


def _row(record: Record, sites: Mapping[str, int], whole: Array | None, bootstrap: Bootstrap) -> dict[str, Any]:
    cell, sums = Cell(**record["cell"]), np.array(record["sums"])
    heads = Counter(name.partition(".")[0] for name in record["kept"])
    metric = METRICS[record["metric"]]
    found = asdict(compare_scores(metric, sums, sums if whole is None else whole, bootstrap))
    if whole is None:
        found |= dict.fromkeys(("difference", "difference_low", "difference_high", "p"), float("nan"))
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
        **found,
        "loss": total / count,
        "lambda": record["facts"].get("lambda_paper", float("nan")),
        "minutes": record["seconds"] / 60,
        "cell": cell.name,
    }


def labels_of(functions: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    """The kinds of function of every head: `positional:-1;rare` gives positional and rare."""
    columns = (functions[name] for name in ("site", "layer", "head", "functions"))
    found = {}
    for site, layer, head, labels in zip(*columns, strict=True):
        kinds = [label.partition(":")[0].strip() for label in str(labels).split(";")]
        found[f"{site}.{layer}.{head}"] = tuple(dict.fromkeys(kind for kind in kinds if kind))
    return found


def _functions(record: Record, labels: Mapping[str, tuple[str, ...]] | None) -> dict[str, float]:
    """Survivors by kind of function; NaN for models trained from scratch, whose heads are others."""
    if labels is None:
        return {}
    kinds = sorted({kind for its in labels.values() for kind in its})
    if record["cell"]["control"]:
        return dict.fromkeys([f"functions_{kind}" for kind in [*kinds, "none"]], float("nan"))
    mine = [labels.get(name, ()) for name in record["kept"]]
    return {
        **{f"functions_{kind}": sum(kind in its for its in mine) for kind in kinds},
        "functions_none": sum(not its for its in mine),
    }


def survivors(records: Sequence[Record], functions: pd.DataFrame | None) -> pd.DataFrame:
    """A row for every head that a cell keeps, with its functions where they are known; controls have none."""
    known: dict[str, str] = {}
    if functions is not None:
        columns = (functions[name] for name in ("site", "layer", "head", "functions"))
        known = {f"{site}.{layer}.{head}": str(labels) for site, layer, head, labels in zip(*columns, strict=True)}
    rows = []
    for record in records:
        cell = Cell(**record["cell"])
        for head in [] if cell.control else map(HeadId.parse, record["kept"]):
            place = {"site": head.site.value, "layer": head.layer, "head": head.head}
            more = {} if functions is None else {"functions": known.get(str(head), "")}
            rows.append(
                {"method": cell.method, "size": cell.size, "seed": cell.seed, "cell": cell.name, **place, **more}
            )
    return _with_seeds(rows)


def survivor_summary(table: pd.DataFrame) -> pd.DataFrame:
    """The table with seeds put together: mean, standard deviation and extremes of the value, the largest p."""
    keys = ["method", "control", "size"]
    found = table.groupby(keys, sort=False, dropna=False).agg(
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
    return found.reset_index()


def unharmed(table: pd.DataFrame, *, within: float | None) -> pd.DataFrame:
    """By method: the fewest heads (mean over seeds) at which the mean is at most `within` worse than unpruned.

    Rows method, control, size, kept, of, difference, within; methods that harm at every size are left out. `within`
    None is the metric's own: 0.25 BLEU, 0.1 perplexity, 0.01 accuracy.
    """
    columns = ["method", "control", "size", "kept", "of", "difference", "within"]
    if table.empty:
        return pd.DataFrame(columns=columns)
    metric = METRICS[table["metric"].iloc[0]]
    limit = metric.within if within is None else within
    means = survivor_summary(table)
    means["of"], means["within"] = table["of"].iloc[0], limit
    worse = -means["difference"] if metric.higher_is_better else means["difference"]
    good = means[(worse <= limit + 1e-12) & (means["method"] != UNPRUNED)]
    best = good.sort_values("kept", kind="stable").groupby(["method", "control"], sort=False).head(1)
    return best.sort_values("kept", kind="stable")[columns].reset_index(drop=True)
