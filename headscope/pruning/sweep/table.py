"""The tables of a sweep: cells with intervals and paired tests, heads that stay, and verdicts on sizes.

The sizes of a method are tested in a fixed sequence, largest first, so that all of them together have the error rate of
one test. Methods share the 5 % (Bonferroni), because the best of them is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pandas as pd

from headscope.bootstrap import LEVEL, Bootstrap
from headscope.evaluation.before_after import compare, judge_loss
from headscope.evaluation.margin import Margin
from headscope.evaluation.metrics.base import METRICS, resample
from headscope.evaluation.non_inferiority import (
    NON_INFERIOR,
    OPEN,
    WORSE,
    NonInferiority,
    format_bound,
    in_fixed_sequence,
    why_open,
)
from headscope.heads import HeadId
from headscope.pruning.sweep.cells import UNPRUNED, Cell
from headscope.results.sweep import KEY

Record = Mapping[str, Any]
Labels = Mapping[str, str]
VERDICT = tuple(field.name for field in fields(NonInferiority))


def verdict_on(
    records: Sequence[Record], numbers: Sequence[int], margin: Margin | None, level: float = LEVEL
) -> NonInferiority | None:
    """The verdict on the mean over cells (by their numbers) of one size with different seeds.

    None for the unpruned model, and where that is not measured or cannot be a baseline (`margin` is None).
    """
    baseline = _unpruned_number(records)
    if baseline is None or margin is None or baseline in numbers:
        return None
    intact, *sums_by_seed = (np.array(records[number]["sums"]) for number in (baseline, *numbers))
    return judge_loss(METRICS.get(records[baseline]["metric"]), sums_by_seed, intact, margin, level)


def _unpruned_number(records: Sequence[Record]) -> int | None:
    return next((number for number, record in enumerate(records) if record["cell"]["method"] == UNPRUNED), None)


def verdict_columns(verdict: NonInferiority | None) -> dict[str, Any]:
    """The columns of a verdict, with NaN and "" if there is none."""
    return dict.fromkeys(VERDICT, float("nan")) | {"verdict": ""} if verdict is None else asdict(verdict)


def make_table(
    records: Sequence[Record],
    bootstrap: Bootstrap,
    margin: Margin | None,
    sites: Mapping[str, int],
    labels: Labels | None,
) -> pd.DataFrame:
    """A row for each cell, its `value` with a 95 % interval, by resamples that are the same for every cell.

    `difference` is from the unpruned model (positive: higher), with interval and p-value of a paired bootstrap. `worse`
    to `level` are fields of `NonInferiority`, for this cell alone. `loss` is in nats per token (for a classifier: per
    sentence). `functions_NAME` counts remaining heads with that function. `model` is the path of the cell's model.
    """
    values = [resample(METRICS.get(record["metric"]).of, np.array(record["sums"]), bootstrap) for record in records]
    baseline, rows = _unpruned_number(records), list[dict[str, Any]]()
    for number, record in enumerate(records):
        cell, (total, count) = Cell(**record["cell"]), record["loss"]
        heads = Counter(name.partition(".")[0] for name in record["kept"])
        comparison = asdict(compare(values[number], values[number if baseline is None else baseline]))
        if baseline is None:
            comparison |= dict.fromkeys(("difference", "difference_low", "difference_high", "p"), float("nan"))
        row = {
            "method": cell.method,
            "control": "from scratch" if cell.control else "",
            "size": cell.size,
            "seed": cell.seed,
            "kept": len(record["kept"]),
            "of": sum(sites.values()),
            **{f"kept_{site}": heads[site] for site in sites},
            "metric": record["metric"],
            **comparison,
            **verdict_columns(verdict_on(records, [number], margin)),
            "loss": total / count,
            "lambda": record["facts"].get("lambda_paper", float("nan")),
            "minutes": record["seconds"] / 60,
            "cell": cell.name,
            "model": record.get("model", ""),
        }
        rows.append(row)
    if labels is not None:
        kinds = {name: {label.partition(":")[0].strip() for label in labels[name].split(";")} for name in labels}
        names = sorted(set[str]().union(*kinds.values()) - {""})
        for row, record in zip(rows, records, strict=True):
            functions_by_head = [kinds.get(head, {""}) for head in record["kept"]]
            counts = {name: sum(name in functions for functions in functions_by_head) for name in names}
            counts["none"] = sum(functions == {""} for functions in functions_by_head)
            is_control = record["cell"]["control"]  # trained from scratch, so its heads are not the labelled ones
            row |= {f"functions_{name}": float("nan") if is_control else count for name, count in counts.items()}
    return with_seeds(rows)


def with_seeds(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A table of rows whose seeds are integers or missing, where pandas would make floats of them."""
    return pd.DataFrame(rows).assign(seed=pd.array([row["seed"] for row in rows], dtype="Int64"))


def survivors(records: Sequence[Record], labels: Labels | None) -> pd.DataFrame:
    """A row for every head that a cell keeps, without controls; `functions` are its labels in the unpruned model.

    `relabelled` are those in the pruned model, if the sweep labelled its heads anew.
    """
    has_new_labels = any("labels" in record for record in records)
    rows: list[dict[str, Any]] = []
    for record in records:
        cell = Cell(**record["cell"])
        for head in [] if cell.control else map(HeadId.parse, record["kept"]):
            row = {"method": cell.method, "size": cell.size, "seed": cell.seed, "cell": cell.name}
            row |= {"site": head.site.value, "layer": head.layer, "head": head.head}
            row |= {} if labels is None else {"functions": labels.get(str(head), "")}
            new_labels = labels if cell.method == UNPRUNED else record.get("labels")
            if has_new_labels and new_labels is not None:
                row["relabelled"] = new_labels.get(str(head), "")
            rows.append(row)
    return with_seeds(rows)


def verdicts(records: Sequence[Record], margin: Margin | None, table: pd.DataFrame) -> pd.DataFrame:
    """A row for every method and size, over all seeds: method, control, size, kept (mean), of, and the verdict."""
    cells = table[table["method"] != UNPRUNED].groupby(["method", "control"], sort=False)
    level, rows = 1 - (1 - LEVEL) / max(len(cells), 1), list[dict[str, Any]]()
    for _, cells_of_method in cells:
        sizes = cells_of_method.groupby("size", sort=False)
        n_kept = sizes["kept"].mean().to_dict()
        largest_first = sorted(n_kept, key=lambda size: -n_kept[size])
        single = [verdict_on(records, sizes.groups[size].tolist(), margin, level) for size in largest_first]
        in_sequence = in_fixed_sequence([verdict for verdict in single if verdict is not None])
        columns = dict(zip(largest_first, map(verdict_columns, in_sequence or single), strict=True))
        for size, row in sizes.first().iterrows():
            key = {"method": row["method"], "control": row["control"], "size": size}
            rows.append(key | {"kept": n_kept[size], "of": row["of"]} | columns[size])
    return pd.DataFrame(rows, columns=[*KEY, "kept", "of", *VERDICT])


def verdict_lines(table: pd.DataFrame, unit: str) -> Iterator[str]:
    """Lines with the fewest heads that are enough by each method, or why none are; and the smallest detectable loss."""
    rows_with_verdict = table[table["verdict"] != ""]
    for (method, control), rows in rows_with_verdict.groupby(["method", "control"], sort=False):
        yield f"{method} {control}".strip() + f": {_conclusion(rows, unit)}"
    if rows_with_verdict["detectable"].notna().any():
        limit = rows_with_verdict["detectable"].min()
        yield (
            f"smallest loss that this test set could have seen (power 80 %): {limit:.3g} {unit}; all verdicts together "
            "are at 95 %"
        )


def _conclusion(rows: pd.DataFrame, unit: str) -> str:
    """The conclusion on one method: the fewest heads established to be enough, else the size with the smallest loss."""
    verdict = next(verdict for verdict in (NON_INFERIOR, OPEN, WORSE) if (rows["verdict"] == verdict).any())
    row = rows[rows["verdict"] == verdict].sort_values("kept" if verdict == NON_INFERIOR else "worse").iloc[0]
    margin = f"within {row['margin']:.3g} {unit}"
    numbers = f"with {row['kept']:g} kept {format_bound(row['worse'], row['worse_limit'], level=row['level'])}"
    if verdict == NON_INFERIOR:
        return f"{row['of'] - row['kept']:g} of {row['of']} heads can go {margin}; {numbers}"
    if verdict == OPEN:
        limits = {name: float(row[name]) for name in ("worse_limit", "margin", "detectable")}
        reason = why_open(**limits, text="this test set")
        return f"not established that heads can go {margin}; {numbers}; {reason}"
    return f"no size is {margin}; {numbers}"
