"""A finished run read back from its directory: what it was, its heads, and lazily the other tables and examples.

Or a study in memory in the form of a run, without a folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headscope.config.declarations import unknown_column
from headscope.data.token_text import MARKS, Marks
from headscope.errors import CheckpointError, ConfigError, HeadscopeError, reason_of
from headscope.files.npz import Arrays
from headscope.files.reading import read_json
from headscope.files.tables import Bytes, Example, is_cut_off, read_csv
from headscope.heads import SITES, Layout, Site

GENERIC_NAMES = {"model", "checkpoint", "last", "best", "averaged", "model.pt", "model.npz"}
GENERIC_NAMES |= {"checkpoint_best.pt", "checkpoint_last.pt"}
EXAMPLES = "examples.npz"
HEAD_COLUMNS = ("site", "layer", "head")
COLUMNS = {
    "heads": (*HEAD_COLUMNS, "functions"),
    "faithfulness": ("ranking", "order", "removed", "share", "metric", "harm", "harm_low", "harm_high"),
    "faithfulness_rankings": ("place", "ranking", "area", "area_low", "area_high", "area_random", "area_random_sd"),
    "importance_functions": (
        *("kind", "name", "measure", "heads", "mean", "mean_low", "mean_high", "others", "others_mean"),
        *("difference", "difference_low", "difference_high", "first", "of_first", "p_first"),
    ),
}
TEXTS = (
    *("site", "relation", "direction", "label", "ranking", "order", "metric", "measure", "missing"),
    *("token", "lacks"),
    *("kind", "name", "query", "key", "query_text", "key_text", "description"),
)
WHOLE = ("layer", "head", "offset", "count", "sentence", "query_position", "key_position", "removed")
"""Columns that hold a whole number in every row, where a reader asks for them."""


class RunError(HeadscopeError):
    """A directory is no run of `headscope analyze`, or one of its files is broken."""


class MissingTable(RunError):
    """The run is fine but the analysis that writes this table was not part of it."""


@dataclass(frozen=True, eq=False)
class AnalysisRun:
    """The files of one `headscope analyze --out DIR`; tables other than `heads` are read when asked for."""

    path: Path
    meta: Mapping[str, Any]
    heads: pd.DataFrame

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.resolve().name

    @property
    def signature(self) -> str:
        """Everything that shaped the numbers, pipe-joined."""
        return str(self.meta["signature"])

    @property
    def model(self) -> str:
        """`all-MiniLM-L6-v2 (bert)`: the checkpoint's last path component and its model type."""
        checkpoint = _section(self.meta, "checkpoint")
        name = model_name(checkpoint.get("path"))
        kind = checkpoint.get("model_type")
        return f"{name} ({kind})" if kind else name

    @property
    def marks(self) -> Marks:
        """How the vocabulary marks words; "" where run.json does not say it."""
        own = _section(self.meta, "checkpoint").get("marks")
        return next((mark for mark in MARKS if mark == own), "")

    @property
    def data(self) -> str:
        """`train.en → train.de, 1,000 sentences`; the parses where they are all; says if interrupted."""
        data = _section(self.meta, "data")
        typed = _section(_section(self.meta, "options"), "typed")
        data = {**data, **dict.fromkeys(typed, "typed in")}
        text = " → ".join(filter(None, (_last_part(data.get(side)) for side in ("source", "clean", "target"))))
        parts = [text or _last_part(data.get("parse")) or "data"]
        if isinstance(data.get("sentences"), int):
            parts.append(f"{data['sentences']:,} sentence{'s' * (data['sentences'] != 1)}")
        if not self.meta.get("complete", True):
            parts.append("interrupted")
        return ", ".join(parts)

    @property
    def layout(self) -> dict[str, list[int]]:
        """Heads per layer of every site, in the order of `SITES`; sites without layers are left out."""
        layout: Mapping[str, list[int]] = self.meta["layout"]
        return {str(site): list(layout[site]) for site in map(str, SITES) if layout.get(site)}

    @property
    def most_heads(self) -> int:
        """Of a layer."""
        return max((count for counts in self.layout.values() for count in counts), default=1)

    @property
    def head_layout(self) -> Layout:
        """The same as `headscope.heads.select_heads` wants it."""
        return {
            (Site(site), layer): count for site, counts in self.layout.items() for layer, count in enumerate(counts)
        }

    @property
    def measures(self) -> list[str]:
        """Columns of `heads.csv` that hold one number per head (bounds of intervals are not counted)."""
        bounds = {f"{name}_{side}" for name in self.heads.columns for side in ("low", "high")}
        numeric = self.heads.select_dtypes("number").columns
        return [str(name) for name in numeric if name not in bounds and name not in HEAD_COLUMNS]

    def heads_of(self, site: str, layer: int) -> pd.DataFrame:
        """The heads of one layer."""
        return self.heads[(self.heads["site"] == site) & (self.heads["layer"] == layer)]

    def require(self, measure: str) -> str:
        """The measure's name if the run has it; else ConfigError with the nearest one."""
        if measure not in self.measures:
            raise ConfigError(f"run {self.name}: {unknown_column(measure, self.measures)}")
        return measure

    def table(self, name: str, *columns: str) -> pd.DataFrame:
        """The table NAME.csv of an analysis, a row of which is about one head; RunError where it lacks a column.

        MissingTable where the analysis was not part of the run.
        """
        return self._table(name, (*HEAD_COLUMNS, *columns), f"--only {name}")

    def module_table(self, name: str, *columns: str) -> pd.DataFrame:
        """The table NAME.csv of an analysis, rows of which are about attention modules (site and layer)."""
        return self._table(name, ("site", "layer", *columns), "--only " + name.partition("_")[0])

    def has_table(self, name: str) -> bool:
        """Whether the run has the table NAME.csv."""
        return (self.path / f"{name}.csv").is_file()

    @property
    def analyses(self) -> frozenset[str] | None:
        """The analyses that ran; None if run.json does not say it."""
        signatures = self.meta.get("signatures")
        return frozenset(signatures) if isinstance(signatures, dict) else None

    @cached_property
    def similarity(self) -> dict[str, NDArray[np.float64]]:
        """`similarity.npz`: `{site}/{layer}/{measure}` to an array [h h]."""
        path = self.path / "similarity.npz"
        if not path.is_file():
            raise MissingTable(self._missing("similarity.npz", "--only similarity"))
        try:
            return {key: np.asarray(array, dtype=np.float64) for key, array in Arrays(path).read().items()}
        except CheckpointError as broken:
            raise RunError(f"run {self.name}: similarity.npz cannot be read ({reason_of(broken)})") from None

    @cached_property
    def examples(self) -> Sequence[Example]:
        """The sentences whose attention the run keeps (`analyze --examples`) in order; RunError for a broken file."""
        if not (self.path / EXAMPLES).is_file():
            return ()
        try:
            arrays = Arrays(self.path / EXAMPLES, kind="u").read()
            index = json.loads(arrays["index"].tobytes().decode("utf-8"))
            return [_example(arrays, place, entry, self.layout) for place, entry in enumerate(index)]
        except (CheckpointError, LookupError, ValueError) as broken:
            raise RunError(f"run {self.name}: {EXAMPLES} cannot be read ({reason_of(broken)})") from None

    @cached_property
    def faithfulness(self) -> pd.DataFrame:
        """`faithfulness.csv`: a row per ranking, order, number of heads removed and metric."""
        return self._filled("faithfulness")

    @cached_property
    def rankings(self) -> pd.DataFrame:
        """`faithfulness_rankings.csv`: a row per ranking, the best first."""
        return self._filled("faithfulness_rankings")

    @cached_property
    def function_need(self) -> pd.DataFrame:
        """`importance_functions.csv`: a row per group of heads and importance."""
        return self._table("importance_functions", COLUMNS["importance_functions"], "--importance")

    def _filled(self, name: str) -> pd.DataFrame:
        """A table of `--faithfulness`, which has a row at least; RunError where it has none."""
        table = self._table(name, COLUMNS[name], "--faithfulness")
        if not len(table):
            raise RunError(f"{name}.csv of run {self.name} holds no row; analyse again")
        return table

    def _table(self, name: str, columns: tuple[str, ...], option: str) -> pd.DataFrame:
        if not self.has_table(name):
            raise MissingTable(self._missing(f"{name}.csv", option))
        return _read_csv(self.path / f"{name}.csv", columns=columns)

    def _missing(self, file: str, option: str) -> str:
        return f"run {self.name} has no {file}" + self._why(option, f"; run `headscope analyze … {option}` first")

    def _why(self, option: str, otherwise: str) -> str:
        """What the run said of the analysis that was to write a table."""
        said = [*left_out(self.meta.get("left_out")), *texts_of(self.meta.get("remarks"))]
        about = f"{option.removeprefix('--only ')}: "
        return next((f" ({line})" for line in said if line.startswith(about)), otherwise)


@dataclass(frozen=True, eq=False)
class StudyRun(AnalysisRun):
    """Tables and similarity matrices that no file holds."""

    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    kept: Sequence[Example] = ()

    @cached_property
    def similarity(self) -> dict[str, NDArray[np.float64]]:
        if not self.arrays:
            raise MissingTable("the study has no similarity; analyze with only='similarity' or without only=")
        return {name: np.asarray(array, dtype=np.float64) for name, array in self.arrays.items()}

    @cached_property
    def examples(self) -> Sequence[Example]:
        return self.kept

    def has_table(self, name: str) -> bool:
        return name in self.tables

    def _table(self, name: str, columns: tuple[str, ...], option: str) -> pd.DataFrame:
        if name not in self.tables:
            argument = f"also={name!r}" if option.startswith("--only") else f"{option.removeprefix('--')}=True"
            raise MissingTable(f"the study has no table {name!r}" + self._why(option, f"; analyze with {argument}"))
        return _as_read(self.tables[name], name, columns)


def load_run(path: Path | str) -> AnalysisRun:
    """Read `run.json` and `heads.csv`; RunError when the directory is no run or a file is broken."""
    path = Path(path)
    if not path.is_dir():
        raise RunError(f"{path} is no directory; name one that `headscope analyze --out DIR` wrote")
    for name in ("run.json", "heads.csv"):
        if not (path / name).is_file():
            raise RunError(f"{path} is no run: it has no {name}; make one with `headscope analyze --out DIR`")
    return AnalysisRun(path, _read_meta(path), _read_csv(path / "heads.csv", columns=COLUMNS["heads"]))


@contextmanager
def files_of(runs: Sequence[Path]) -> Iterator[None]:
    """RunError in one line where what is drawn of runs stumbles over what their files hold.

    Readers check names of columns; headscope wrote the rest, so that only a file that was changed since is otherwise.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        names = ", ".join(str(run) for run in runs)
        problem = f"{type(error).__name__}: {reason_of(error, most=120)}"
        raise RunError(f"{names} cannot be drawn ({problem}); a file was changed or cut: make the run again") from error


def study_run(
    record: Mapping[str, Any],
    heads: pd.DataFrame,
    tables: Mapping[str, pd.DataFrame],
    arrays: Mapping[str, NDArray[np.float64]],
    examples: Sequence[Example] = (),
) -> StudyRun:
    """The run that its record (what `run.json` would say), heads, tables and similarity matrices make."""
    return StudyRun(Path("study"), record, _as_read(heads, "heads", COLUMNS["heads"]), tables, arrays, examples)


def _read_meta(path: Path) -> dict[str, Any]:
    meta = read_json(path / "run.json", error=RunError, name=f"run {path.name}: run.json")
    lacking = [key for key in ("signature", "layout") if not isinstance(meta, dict) or key not in meta]
    if lacking:
        raise RunError(f"run {path.name}: run.json has no {' and no '.join(lacking)}; analyse again")
    return dict(meta)


def _read_csv(path: Path, *, columns: tuple[str, ...]) -> pd.DataFrame:
    name = f"run {path.parent.name}: {path.name}"
    if is_cut_off(path):
        raise RunError(f"{name} is cut off; analyse again")
    return read_table(path, columns=columns, name=name)


def read_table(file: Path | TextIO, *, columns: tuple[str, ...], name: str) -> pd.DataFrame:
    """One table; RunError says of `name`, in one line, what is wrong with it: it is cut off, or lacks whole numbers."""
    texts = (*TEXTS, "functions", "functions_unsupported", "syntactic_relation")
    table = read_csv(file, columns=columns, texts=texts, error=RunError, name=name, advice="analyse again")
    for column in [column for column in columns if column in WHOLE]:
        if len(table) and not (table[column] % 1 == 0).all():
            raise RunError(f"{name} is malformed: column {column} must hold whole numbers; analyse again")
    return table


def _section(meta: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = meta.get(name)
    return section if isinstance(section, dict) else {}


def texts_of(lines: object) -> list[str]:
    """Lines of a record, whatever it holds."""
    return [str(line) for line in lines] if isinstance(lines, list) else []


def left_out(entries: object) -> list[str]:
    """`syntactic: needs --parse …` for every analysis that did not run."""
    reasons = entries if isinstance(entries, list) else []
    return [f"{entry.get('analysis')}: {entry.get('why')}" for entry in reasons if isinstance(entry, dict)]


def _last_part(path: object) -> str:
    return str(path).replace("\\", "/").rstrip("/").rpartition("/")[2] if path else ""


def model_name(path: object) -> str:
    """The last component, with the one before it where the last says nothing: `bert-small/model`."""
    name = _last_part(path)
    if name.lower() in GENERIC_NAMES:
        folder = _last_part(str(path).rstrip("/").removesuffix(name))
        return f"{folder}/{name}" if folder else name
    return name or "model"


def _as_read(table: pd.DataFrame, name: str, columns: tuple[str, ...]) -> pd.DataFrame:
    """The table as it comes back from its file: figures of a study and of its folder are then the same."""
    return read_table(StringIO(table.to_csv(index=False)), columns=columns, name=f"the study's {name}")


def _example(arrays: Mapping[str, Bytes], place: int, entry: Mapping[str, Any], sites: Iterable[str]) -> Example:
    weights = {site: arrays[f"{place}/{site}"] for site in sites if f"{place}/{site}" in arrays}
    return Example(entry["number"], entry["texts"], entry["subwords"], weights)


def sides_of(site: str, subwords: Mapping[str, Any]) -> tuple[str, str]:
    """The sides of queries and keys of a site."""
    text = "target" if "target" in subwords else "source"
    return ("source" if site == "encoder-self" else text, text if site == "decoder-self" else "source")
