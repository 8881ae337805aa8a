"""How many heads can go: the verdict on every method and size of a sweep, and in words.

Sizes of a method are tested in a fixed sequence, largest first, so that of a method all sizes together err as seldom as
one test; methods share the 5 % (Bonferroni), as the best of them is what is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from headscope.bootstrap import LEVEL
from headscope.evaluation.non_inferiority import NON_INFERIOR, OPEN, WORSE, in_fixed_sequence, why_open
from headscope.pruning.sweep.config import UNPRUNED, Cell
from headscope.pruning.sweep.table import VERDICT, MeasuredCells, verdict_columns

KEY = ["method", "control", "size"]


def verdicts(measured: MeasuredCells, sites: Mapping[str, int]) -> pd.DataFrame:
    """A row for every method and size, seeds put together: method, control, size, kept (mean), of, and the verdict."""
    sequences: dict[tuple[str, str], dict[str, list[int]]] = {}
    for number, record in enumerate(measured.records):
        cell = Cell(**record["cell"])
        if cell.method != UNPRUNED:
            sizes = sequences.setdefault((cell.method, "from scratch" if cell.control else ""), {})
            sizes.setdefault(cell.size, []).append(number)
    level = 1 - (1 - LEVEL) / max(len(sequences), 1)
    rows = [
        dict(zip(KEY, (*key, size), strict=True)) | {"kept": kept, "of": sum(sites.values())} | found
        for key, sizes in sequences.items()
        for size, kept, found in _sequence(measured, sizes, level)
    ]
    return pd.DataFrame(rows, columns=[*KEY, "kept", "of", *VERDICT])


def _sequence(
    measured: MeasuredCells, sizes: Mapping[str, list[int]], level: float
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """The sizes of a method as they came, with the mean number of heads kept and the columns of the verdict."""
    kept = {
        size: sum(len(measured.records[number]["kept"]) for number in cells) / len(cells)
        for size, cells in sizes.items()
    }
    largest_first = sorted(sizes, key=lambda size: -kept[size])
    found = [measured.verdict(sizes[size], level) for size in largest_first]
    judged = in_fixed_sequence([verdict for verdict in found if verdict is not None])
    columns = dict(zip(largest_first, map(verdict_columns, judged or found), strict=True))
    yield from ((size, kept[size], columns[size]) for size in sizes)


def verdict_lines(table: pd.DataFrame, unit: str) -> Iterator[str]:
    """By method the fewest heads that are enough, or why none are; then what the text could have seen at all."""
    judged = table[table["verdict"] != ""]
    for (method, control), rows in judged.groupby(["method", "control"], sort=False):
        yield f"{method} {control}".strip() + f": {_conclusion(rows, unit)}"
    if judged["detectable"].notna().any():
        least = judged["detectable"].min()
        yield (
            f"smallest loss that this test set could have seen (power 80 %): {least:.3g} {unit}; all verdicts together "
            "are at 95 %"
        )


def _conclusion(rows: pd.DataFrame, unit: str) -> str:
    """Of one method: the fewest heads that are established to be enough, else the smallest loss that may be none."""
    good, left, worse = (rows[rows["verdict"] == verdict] for verdict in (NON_INFERIOR, OPEN, WORSE))
    row = (good.sort_values("kept") if len(good) else (left if len(left) else worse).sort_values("worse")).iloc[0]
    within = f"within {row['margin']:.3g} {unit}"
    bound = f"at most {row['worse_limit']:.3g} ({100 * row['level']:.3g} %)"
    numbers = f"with {row['kept']:g} kept {row['worse']:.3g} worse, {bound}"
    if len(good):
        return f"{row['of'] - row['kept']:g} of {row['of']} heads can go {within}; {numbers}"
    if len(left):
        limits = {name: float(row[name]) for name in ("worse_limit", "margin", "detectable")}
        seen = why_open(**limits, text="this test set")
        return f"not established that heads can go {within}; {numbers}; {seen}"
    return f"no size is {within}; {numbers}"
