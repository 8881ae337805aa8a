"""The tables of the report from the runs of a directory, added to those of runs that were made elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from variants.heads import numbers_of_heads, of_relevance
from variants.runs import list_runs, result_of, valid_losses

RUN = ["arm", "seed"]  # what names a run in every table
RELEVANCE_COLUMNS = (*RUN, "valid_nll", "machine", "ended")  # of a run whose relevance is in a table of its own
WORDS, OFTEN = 6, 8  # pieces for each expert, and how often they must stand with it
SHARED = ("data", "batch", "precision", "v", "commit")  # of a signature: what all runs of a study have in common
Table = pd.DataFrame


def collect(out: Path, results: Path) -> None:
    """Add the finished runs of `out` to runs.csv, curves.csv, matrices.csv and words.csv in `results`.

    Rows of other runs that lie there stay; those of the same runs are replaced. Ends the program where runs that stay
    are of another study. Where nothing is finished, nothing is written.
    """
    folders = list_runs(out)
    if not folders:
        return
    rows = [row_of(folder, out) for folder in folders]
    names = {(str(row["arm"]), str(row["seed"])) for row in rows}
    check_same_study(rows, read_other_rows(results / "runs.csv", names))
    tables = {"runs": [Table(rows)], "curves": [], "matrices": [], "words": []}
    for folder, row in zip(folders, rows, strict=True):
        run = {name: row[name] for name in RUN}
        for name, table in tables_of(folder, out / "analysis" / folder.name, int(row["seed"])).items():
            tables[name].append(table.assign(**run))
    for name, parts in tables.items():
        write(results / f"{name}.csv", [read_other_rows(results / f"{name}.csv", names), *map(as_text, parts)])


def collect_repeats(out: Path, results: Path) -> None:
    """Note the finished runs of `out`, made once more on another machine than those in runs.csv, in repeated.csv."""
    rows = [row_of(folder, out) for folder in list_runs(out)]
    check_same_study(rows, read_other_rows(results / "runs.csv", set()))
    write(results / "repeated.csv", [as_text(Table(rows))])


def collect_relevance(out: Path, results: Path) -> None:
    """Note in relevance.csv the relevance of finished runs that was taken after their analysis, by later code."""
    rows = []
    for folder in list_runs(out):
        heads = out / "analysis" / folder.name / "relevance" / "heads.csv"
        if heads.exists():
            of_run = {name: value for name, value in result_of(folder).items() if name in RELEVANCE_COLUMNS}
            rows.append({**of_run, **of_relevance(pd.read_csv(heads))})
    write(results / "relevance.csv", [as_text(Table(rows))])


def row_of(folder: Path, out: Path) -> dict[str, Any]:
    """A run's line in runs.csv."""
    row = result_of(folder)
    analysis = out / "analysis" / folder.name
    if (analysis / "heads.csv").exists():
        row |= numbers_of_heads(analysis, folder / "metrics.csv")
    return row


def tables_of(folder: Path, analysis: Path, seed: int) -> dict[str, Table]:
    """Of one run: its losses, its matrices where it is the first seed, and the words of its experts."""
    tables = {"curves": Table(valid_losses(folder).items(), columns=["epoch", "valid_nll"])}
    alphas, tokens = analysis / "alphas.csv", analysis / "words" / "experts_tokens.csv"
    if alphas.exists() and seed == 1:  # what all seeds have in common is in runs.csv
        tables["matrices"] = pd.read_csv(alphas)
    if tokens.exists():
        words = pd.read_csv(tokens, keep_default_na=False).query(
            f"site == 'encoder-self' and layer == 0 and count >= {OFTEN}"
        )
        tables["words"] = words.groupby("expert").head(WORDS)
    return tables


def check_same_study(rows: Sequence[dict[str, Any]], staying: Table) -> None:
    """End the program where runs are of different studies."""
    if staying.empty:
        return
    ours = {shared(str(row["signature"])) for row in rows}
    theirs = {shared(signature) for signature in staying["signature"]}
    if len(ours | theirs) > 1:
        new, old = sorted(ours - theirs or ours)[0], sorted(theirs - ours or theirs)[0]
        sys.exit(f"runs of {new} cannot stand beside runs of {old}; choose another --results")


def shared(signature: str) -> str:
    """The parts of a signature that are the same for all runs of a study."""
    parts = [part for part in signature.split("|") if part.partition(":")[0] in SHARED]
    return "|".join(parts)


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a table: numbers as numbers, empty cells left out; none where there is no file."""
    if not path.exists():
        return []
    table = pd.read_csv(path, dtype=str).fillna("")
    return [{str(name): number(str(cell)) for name, cell in row.items() if cell} for row in table.to_dict("records")]


def number(text: str) -> int | float | str:
    """The value of a cell of a table."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def rows_of_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs; runs whose code had no LRP for their gates have the values of later code (relevance.csv)."""
    later = {(row["arm"], row["seed"]): row["relevant_heads"] for row in read_table(folder / "relevance.csv")}
    rows = read_table(folder / "runs.csv")
    for row in rows:
        if count := later.get((row["arm"], row["seed"])):
            row.setdefault("relevant_heads", count)
    return rows


def read_other_rows(path: Path, names: Set[tuple[str, str]]) -> Table:
    """The rows of a table of other runs, as text, so that they are written unchanged."""
    if not path.exists():
        return Table(columns=RUN, dtype=str)
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return table.loc[[run not in names for run in zip(table["arm"], table["seed"], strict=True)]]


def as_text(table: Table) -> Table:
    """Every cell as in a file."""
    return pd.read_csv(io.StringIO(table.to_csv(index=False)), dtype=str, keep_default_na=False)


def write(path: Path, parts: Sequence[Table]) -> None:
    """All rows of a table, by seed and arm, those of a run in the order they have; none, no file."""
    parts = [part for part in parts if not part.empty]
    if parts:
        table = pd.concat(parts, ignore_index=True).fillna("")
        table["seed"] = table["seed"].astype(int)
        table.sort_values(["seed", "arm"], kind="stable").to_csv(path, index=False)
