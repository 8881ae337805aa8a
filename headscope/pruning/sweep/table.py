"""The tables of a sweep: a row a cell with intervals and paired tests, and the heads that stay in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd

from headscope.bootstrap import Array, Bootstrap
from headscope.evaluation.comparison import compare, resampled
from headscope.evaluation.margin import Margin
from headscope.evaluation.metrics.base import METRICS
from headscope.evaluation.non_inferiority import NonInferiority, judge
from headscope.heads import HeadId
from headscope.pruning.options.sweep import SweepConfig
from headscope.pruning.sweep.config import UNPRUNED, Cell

Record = Mapping[str, Any]
VERDICT = tuple(field.name for field in fields(NonInferiority))


@dataclass(frozen=True)
class Measured:
    """The records of cells, with the metric of each on the whole text and on resamples of it [1 + replicates].

    `margin` is in the metric's unit; None where the unpruned model is not measured yet, or is no baseline.
    """

    records: Sequence[Record]
    values: Sequence[Array]
    bootstrap: Bootstrap
    margin: float | None = None

    @classmethod
    def of(cls, records: Sequence[Record], config: SweepConfig, *, margin: Margin | None) -> Measured:
        """Resamples are those of `config.seed`, the same for every cell."""
        bootstrap = Bootstrap(seed=config.seed, replicates=config.bootstrap)
        values = [resampled(METRICS.get(record["metric"]), np.array(record["sums"]), bootstrap) for record in records]
        made = cls(records, values, bootstrap)
        baseline = made.unpruned
        return made if margin is None or baseline is None else replace(made, margin=margin.of(float(baseline[0])))

    @property
    def unpruned(self) -> Array | None:
        """The values of the unpruned model, None where it is not measured yet."""
        pairs = zip(self.records, self.values, strict=True)
        return next((values for record, values in pairs if record["cell"]["method"] == UNPRUNED), None)

    def verdict(self, numbers: Sequence[int]) -> dict[str, Any]:
        """The columns of a `NonInferiority` of the mean over these cells; resampled are sentences, and seeds too."""
        first = self.records[numbers[0]]
        if self.unpruned is None or self.margin is None or first["cell"]["method"] == UNPRUNED:
            return dict.fromkeys(VERDICT[:-1], float("nan")) | {"verdict": ""}
        metric = METRICS.get(first["metric"])
        worse = np.stack([metric.worse(self.values[number], self.unpruned) for number in numbers])  # [seed 1+r]
        seeds = np.vstack([np.ones(len(numbers)), self.bootstrap.draws(len(numbers)).numpy()])  # [1+r seed]
        mean = (seeds.T * worse).sum(axis=0) / len(numbers)
        baseline, groups = float(self.unpruned[0]) or 1.0, len(first["sums"])  # distances have a baseline of 0
        return asdict(judge(mean, margin=self.margin, baseline=baseline, groups=groups))


def make_table(measured: Measured, sites: Mapping[str, int], functions: pd.DataFrame | None) -> pd.DataFrame:
    """A row a cell.

    `value` is the metric with its 95 % interval, `difference` that to the unpruned model (positive: higher), with
    interval and p-value of a paired bootstrap; NaN where the unpruned model is not measured yet. `worse`,
    `worse_limit`, `margin`, `detectable` and `verdict` are those of `NonInferiority`. `loss` is in nats a token (of a
    classifier: a sentence). `functions_NAME` counts survivors with that function, once in each that a head has,
    `functions_none` those without any. `model` is the model that was kept of a cell, in the sweep's directory.
    """
    kinds = None if functions is None else kinds_by_head(functions)
    rows = [_row(measured, number, sites) | _functions(record, kinds) for number, record in enumerate(measured.records)]
    return with_seeds(rows)


def with_seeds(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A table of rows; seeds stay whole numbers beside cells that have none, which pandas makes floats of."""
    return pd.DataFrame(rows).assign(seed=pd.array([row["seed"] for row in rows], dtype="Int64"))


def _row(measured: Measured, number: int, sites: Mapping[str, int]) -> dict[str, Any]:
    record, values, unpruned = measured.records[number], measured.values[number], measured.unpruned
    cell = Cell(**record["cell"])
    heads = Counter(name.partition(".")[0] for name in record["kept"])
    comparison = asdict(compare(values, values if unpruned is None else unpruned))
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
        "metric": record["metric"],
        **comparison,
        **measured.verdict([number]),
        "loss": total / count,
        "lambda": record["facts"].get("lambda_paper", float("nan")),
        "minutes": record["seconds"] / 60,
        "cell": cell.name,
        "model": record.get("model", ""),
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
