"""How many heads can go: the verdict on every method and size of a sweep, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from headscope.evaluation.non_inferiority import NON_INFERIOR, OPEN
from headscope.pruning.sweep.config import UNPRUNED, Cell
from headscope.pruning.sweep.table import VERDICT, Measured

KEY = ["method", "control", "size"]


def verdicts(measured: Measured, sites: Mapping[str, int]) -> pd.DataFrame:
    """A row for every method and size, seeds put together: method, control, size, kept (mean), of, and the verdict."""
    numbers: dict[tuple[str, str, str], list[int]] = {}
    for number, record in enumerate(measured.records):
        cell = Cell(**record["cell"])
        numbers.setdefault((cell.method, "from scratch" if cell.control else "", cell.size), []).append(number)
    rows = [
        {
            **dict(zip(KEY, key, strict=True)),
            "kept": sum(len(measured.records[number]["kept"]) for number in cells) / len(cells),
            "of": sum(sites.values()),
            **measured.verdict(cells),
        }
        for key, cells in numbers.items()
        if key[0] != UNPRUNED
    ]
    return pd.DataFrame(rows, columns=[*KEY, "kept", "of", *VERDICT])


def verdict_lines(table: pd.DataFrame, unit: str) -> Iterator[str]:
    """By method the fewest heads that are enough, or why none are; then what the text could have seen at all."""
    judged = table[table["verdict"] != ""]
    for (method, control), rows in judged.groupby(["method", "control"], sort=False):
        yield f"{method} {control}".strip() + f": {_conclusion(rows, unit)}"
    if judged["detectable"].notna().any():
        least = judged["detectable"].min()
        yield f"smallest loss that this test set could have seen (power 80 %): {least:.3g} {unit}; verdicts are at 95 %"


def _conclusion(rows: pd.DataFrame, unit: str) -> str:
    """Of one method: the fewest heads that are established to be enough, else the smallest loss that may be none."""
    good, left = (rows[rows["verdict"] == verdict] for verdict in (NON_INFERIOR, OPEN))
    row = (good.sort_values("kept") if len(good) else (left if len(left) else rows).sort_values("worse")).iloc[0]
    within = f"within {row['margin']:.3g} {unit}"
    numbers = f"with {row['kept']:g} kept {row['worse']:.3g} worse, at most {row['worse_limit']:.3g} (95 %)"
    if len(good):
        return f"{row['of'] - row['kept']:g} of {row['of']} heads can go {within}; {numbers}"
    if len(left):
        seen = f"this test set could have seen a loss of {row['detectable']:.3g} at least"
        return f"not established that heads can go {within}; {numbers}; {seen}"
    return f"no size is {within}; {numbers}"
