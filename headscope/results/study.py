"""A study: what `headscope analyze` found, in memory as in the folder that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headscope.config.declarations import import_target
from headscope.data.offsets import MARKS, Marks
from headscope.errors import ConfigError, flag
from headscope.files.tables import EXAMPLES, SIMILARITY, Example, read_arrays, read_examples
from headscope.heads import SITES, HeadId, Layout, Site
from headscope.registry import unknown
from headscope.results.answer import Answer, StoredResult
from headscope.results.roles import role_of
from headscope.results.study_tables import HEAD_COLUMNS, MissingTable, RunError, open_record, read_table, unknown_column
from headscope.signature import count_of

Array = NDArray[np.float64]

INTERRUPTED = "was interrupted"
GENERIC_NAMES = {"model", "checkpoint", "last", "best", "averaged", "model.pt", "model.npz"}
GENERIC_NAMES |= {"checkpoint_best.pt", "checkpoint_last.pt"}


@dataclass(frozen=True)
class LeftOut:
    """An analysis, a site or a file that was left out, and why."""

    analysis: str
    why: str

    @property
    def is_interrupted(self) -> bool:
        """Whether it was left out because the run was interrupted."""
        return self.why.startswith(INTERRUPTED)


class Study(StoredResult):
    """The result of `analyze`: measures of every head. It holds no model.

    `tables` has "heads" first. Its rows are heads: site, layer, head, every measure with its 95 % interval (`…_low`,
    `…_high`), the labels (`functions`) and those that lack evidence (`functions_unsupported`). The other tables are
    details of single analyses, one observation a row. `arrays` are matrices [h h] such as "encoder-self/2/cka".
    `detail` has arrays of single sentences, `examples` sentences with their weights. `record` is what run.json holds.
    """

    def __init__(
        self,
        tables: Mapping[str, pd.DataFrame],
        record: dict[str, Any],
        *,
        arrays: Mapping[str, Array] | None = None,
        examples: Sequence[Example] = (),
        detail: Mapping[str, Mapping[str, Array]] | None = None,
        pickles: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.tables, self.record, self.examples, self.folder = tables, record, examples, folder
        self.detail, self.pickles, self.files = detail or {}, pickles or {}, files or {}
        self.arrays = {name: np.asarray(array, dtype=np.float64) for name, array in (arrays or {}).items()}

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Study:
        """The study in a folder that `save` or `headscope analyze --out` wrote; RunError for another folder."""
        path, record = open_record(folder, "run.json", "analysis", wrote="analyze")
        record = {key: value for key, value in record.items() if key not in ("kind", "files")}
        names = dict.fromkeys(["heads", *sorted(file.stem for file in path.glob("*.csv"))])
        return cls(
            {name: read_table(path / f"{name}.csv") for name in names},
            record,
            arrays=read_arrays(path / SIMILARITY, RunError),
            examples=read_examples(path / EXAMPLES, RunError),
            detail={file.stem: read_arrays(file, RunError) for file in sorted(path.glob("detail/*.npz"))},
            folder=path,
        )

    @property
    def heads(self) -> pd.DataFrame:
        """One row per head."""
        return self.tables["heads"]

    def answers(self) -> list[Answer]:
        """The answers, most asked first."""
        return import_target("headscope.results.study_answers:study_answers")(self)

    def interrupt(self, name: str, why: str = INTERRUPTED) -> None:
        """Note in the record that work was interrupted, and which analyses are missing."""
        self.record["complete"] = False
        self.record["left_out"].append({"analysis": name, "why": why})

    @property
    def path(self) -> Path:
        """The folder of a study that was saved."""
        if self.folder is None:
            raise ConfigError("this study is in memory only; save it first")
        return self.folder

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name if self.folder else "study"

    @property
    def complete(self) -> bool:
        """Whether the whole text was measured."""
        return bool(self.record.get("complete", True))

    @property
    def sentences(self) -> int:
        """Number of sentences that were measured."""
        return int(self.record.get("data", {}).get("sentences") or 0)

    @property
    def left_out(self) -> list[LeftOut]:
        """Analyses that did not run, and why."""
        return [LeftOut(**entry) for entry in self.record.get("left_out", ())]

    @property
    def remarks(self) -> list[str]:
        """Remarks on the numbers, such as the share of unknown subwords."""
        return list(self.record.get("remarks", ()))

    @property
    def model(self) -> str:
        """`all-MiniLM-L6-v2 (bert)`: the checkpoint's last path component and its model type."""
        checkpoint = self.record.get("checkpoint", {})
        name, kind = model_name(checkpoint.get("path")), checkpoint.get("model_type")
        return f"{name} ({kind})" if kind else name

    @property
    def marks(self) -> Marks:
        """How the vocabulary marks the borders of words ("▁"); "" if run.json does not say it."""
        recorded = self.record.get("checkpoint", {}).get("marks")
        return next((mark for mark in MARKS if mark == recorded), "")

    @property
    def data(self) -> str:
        """`train.en → train.de, 1,000 sentences`: the files of the text, or of its parses; says if interrupted."""
        data = self.record.get("data", {})
        if note := data.get("note"):
            return str(note)
        data = {**data, **dict.fromkeys(self.record.get("options", {}).get("typed") or (), "typed in")}
        source, clean, target, other = (_last_part(data.get(side)) for side in ("source", "clean", "target", "source2"))
        text = " → ".join(filter(None, (" and ".join(filter(None, (source, other))), clean, target)))
        parts = [text or _last_part(data.get("parse")) or "data"]
        if isinstance(data.get("sentences"), int):
            parts.append(count_of(data["sentences"], "pair" if other or data.get("pairs") else "sentence"))
        return ", ".join([*parts, *([] if self.complete else ["interrupted"])])

    @property
    def analyses(self) -> frozenset[str] | None:
        """Names of the analyses that ran; None if run.json does not list them."""
        return frozenset(self.record["signatures"]) if "signatures" in self.record else None

    @property
    def layout(self) -> dict[str, list[int]]:
        """Heads per layer of every site, in the order of `SITES`; sites without layers are left out."""
        layout: Mapping[str, list[int]] = self.record["layout"]
        return {str(site): list(layout[site]) for site in map(str, SITES) if layout.get(site)}

    @property
    def most_heads(self) -> int:
        """The largest number of heads of a layer."""
        return max((count for counts in self.layout.values() for count in counts), default=1)

    @property
    def head_layout(self) -> Layout:
        """The layout as `headscope.heads.select_heads` takes it."""
        return {
            (Site(site), layer): count for site, counts in self.layout.items() for layer, count in enumerate(counts)
        }

    @property
    def labels(self) -> dict[HeadId, list[str]]:
        """The labels of the heads that have any."""
        return self._texts_by_head("functions")

    @property
    def unsupported(self) -> dict[HeadId, list[str]]:
        """Labels by the estimates alone, each with the evidence it lacks; the table "labels" has all the evidence."""
        return self._texts_by_head("functions_unsupported")

    def _texts_by_head(self, column: str) -> dict[HeadId, list[str]]:
        if column not in self.heads:
            return {}
        rows = self.heads[[*HEAD_COLUMNS, column]].itertuples(index=False)
        return {HeadId(Site(site), layer, head): texts.split(";") for site, layer, head, texts in rows if texts}

    @property
    def measures(self) -> list[str]:
        """Columns of `heads.csv` that hold one number per head, without the bounds of intervals."""
        bounds = {f"{name}_{side}" for name in self.heads.columns for side in ("low", "high")}
        numeric = self.heads.select_dtypes("number").columns
        return [str(name) for name in numeric if name not in bounds and name not in HEAD_COLUMNS]

    def heads_of(self, site: str, layer: int) -> pd.DataFrame:
        """The heads of one layer."""
        return self.heads[(self.heads["site"] == site) & (self.heads["layer"] == layer)]

    def require(self, measure: str) -> str:
        """The measure's name if the study has it; else ConfigError with the nearest one."""
        if measure not in self.measures:
            raise ConfigError(f"run {self.name}: {unknown_column(measure, self.measures)}")
        return measure

    def short_name(self, head: str) -> str:
        """`3.1` where the model has attention at one site, else the full name."""
        return HeadId.parse(head).name(self.layout)

    def has_table(self, name: str) -> bool:
        """Whether an analysis that writes the table ran."""
        return name in self.tables

    def table(self, name: str, *columns: str) -> pd.DataFrame:
        """The table of an analysis, with these columns; MissingTable where the analysis was not part of the study."""
        if name not in self.tables:
            family = "importance" if name == "roles" else name.partition("_")[0]
            option = flag(family) if family in ("faithfulness", "importance") else f"{flag.also} {name}"
            raise MissingTable(f"run {self.name} has no {name}.csv{self._why(name, f'; analyze with {option}')}")
        table = self.tables[name]
        if missing := [column for column in columns if column not in table]:
            raise RunError(f"{name}.csv of run {self.name} has no column {', '.join(missing)}; analyse again")
        return table

    def role(self, name: str) -> dict[str, Any]:
        """The joint effect of a role's heads, such as "induction": its row of roles.csv, with their names.

        `value` is what the objective loses with all of them off. A label names its role. ConfigError for a role that
        no head has, with the nearest one; MissingTable where importance was not measured.
        """
        rows = {row["role"]: row for row in self.table("roles").to_dict("records")}
        role = name if name in rows else role_of(name)
        if role not in rows:
            raise ConfigError(f"run {self.name}: {unknown('role', name, list(rows))}")
        return {**{str(key): value for key, value in rows[role].items()}, "which": rows[role]["which"].split()}

    @property
    def similarity(self) -> Mapping[str, Array]:
        """`arrays`; MissingTable where the analysis was not part of the study."""
        if not self.arrays:
            why = self._why("similarity", f"; analyze with {flag.only} similarity")
            raise MissingTable(f"run {self.name} has no similarity.npz{why}")
        return self.arrays

    def _why(self, name: str, advice: str) -> str:
        """Why an analysis wrote no table, by the record; `advice` where it does not say."""
        reasons = [*(f"{entry.analysis}: {entry.why}" for entry in self.left_out), *self.remarks]
        return next((f" ({line})" for line in reasons if line.startswith(f"{name}: ")), advice)

    def save(
        self, folder: str | PathLike[str], *, figures: bool = True, report: bool = False, force: bool = False
    ) -> Path:
        """Write the files that `headscope analyze --out FOLDER` writes, and return the folder; `report` the page too.

        OutputError where the folder is not empty (`force` replaces a run in it), and where it is or contains an input
        of the study. An incomplete study is written to FOLDER.new rather than replace a run.
        """
        write_study = import_target("headscope.results.study_files:write_study")
        return write_study(self, Path(folder), figures=figures, report=report, force=force)

    def compare(self, other: Study, *, measure: str = "") -> Any:
        """The comparison with another study, with answers and tables: as `headscope plot compare` prints it.

        `measure` is a column of heads.csv; default: the importance of both, else the first measure of an overview.
        """
        return import_target("headscope.report.comparison:StudyComparison")([self, other], measure=measure)

    def plot(self, name: str = "heads", **options: Any) -> Any:
        """Draw a matplotlib Figure: heads, functions, faithfulness, or that of an analysis (positional, similarity, …).

        `options` are those of `headscope plot NAME`: `measure=["confidence", "sink"]` and `sort=True` for heads,
        `measure="cka"` for similarity, `metric="bleu"` for faithfulness, `heads=` and `sentence=` for attention; and
        those of `headscope.plot`: `out="heads.pdf"` writes the figure. ConfigError for another name or option, and
        where the analysis that a figure shows did not run.
        """
        return import_target("headscope:plot")(self, name, **options)

    def report(self, out: str | PathLike[str], *, force: bool = False) -> Path:
        """Write the page that `headscope plot report` makes of a run: one HTML file, which needs nothing else.

        With `analyze(…, report=True)` it shows the attention on example sentences, too.
        """
        return import_target("headscope:plot")(self, "report", out=out, force=force)

    def write_alignment(self, model: str | PathLike[str], *, heads: int = 6, force: bool = False) -> str:
        """Name the cross heads that align in the settings of a model, as `headscope analyze --write-alignment` does.

        model: a folder of transformers or of CTranslate2; `heads`: the largest number of heads to name. Returns the
        heads and the file. Heads that the folder names already stay where no head is labelled as aligned, unless
        `force`.
        ConfigError where the folder has no place for them or has other heads, and where `alignment` did not run.
        """
        cross = self.heads[self.heads["site"] == Site.CROSS.value]
        if "alignment_score" not in cross or cross["alignment_score"].isna().all():
            raise ConfigError("this study has no alignment of cross heads; analyse with only='alignment' and a target")
        import_target("headscope.export.alignment:check_alignment_model")(Path(model), self.head_layout)
        write = import_target("headscope.export.alignment:write_measured")
        return str(write(Path(model), cross, heads, force=force))


def _last_part(path: object) -> str:
    return str(path).replace("\\", "/").rstrip("/").rpartition("/")[2] if path else ""


def model_name(path: object) -> str:
    """The last component of a path, with its parent where the last is a generic name: `bert-small/model`."""
    name = _last_part(path)
    if name.lower() in GENERIC_NAMES:
        folder = _last_part(str(path).rstrip("/").removesuffix(name))
        return f"{folder}/{name}" if folder else name
    return name or "model"


def sides_of(site: str, subwords: Mapping[str, Any]) -> tuple[str, str]:
    """Whose subwords are the queries and the keys of a site: "source" or "target"."""
    text = "target" if "target" in subwords else "source"
    return ("source" if site == "encoder-self" else text, text if site == "decoder-self" else "source")
