"""The result of an analysis: a table of heads, further tables and arrays, figures, and the files of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from headscope.api.analysis import Measurement, measure_heads, save_measurement
from headscope.api.options import PathName, Report, analyze_options, configured, in_python, progress_of, python_words
from headscope.api.selection import Heads, heads_option
from headscope.api.texts import Texts
from headscope.bootstrap import Array
from headscope.config.option import check_options
from headscope.engine.conclusion import LeftOut
from headscope.engine.plan import chosen_analyses
from headscope.engine.run_files import ANALYSIS
from headscope.errors import ConfigError
from headscope.files.folders import Build, check_writable
from headscope.files.output_checks import check_folder, inputs_of
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site
from headscope.model.discovery import eval_mode
from headscope.registry import unknown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from headscope.report.readers.run import AnalysisRun


class Study:
    """The result of `Model.analyze`, in memory until `save` writes it; independent of the model.

    `heads` has a row per head: site, layer, head, every measure with its 95 % interval (`…_low`, `…_high`), and
    `functions`, the labels of the head, and `functions_unsupported`, those that lack evidence. `complete` is False
    where Ctrl-C ended the analysis early.
    """

    def __init__(self, measurement: Measurement) -> None:
        assert measurement.description is not None, "the first of several processes has the results"
        self._measurement = measurement
        self._record: Mapping[str, Any] = measurement.description.record

    @property
    def heads(self) -> pd.DataFrame:
        """One row per head."""
        return self._measurement.study.heads

    @property
    def tables(self) -> list[str]:
        """Names of the tables for `table`, "heads" first."""
        return ["heads", *self._measurement.study.tables]

    @in_python
    def table(self, name: str) -> pd.DataFrame:
        """The detail of one analysis, one observation a row; ConfigError for a name that is not in `tables`."""
        if name not in self.tables:
            raise ConfigError(unknown("table", name, self.tables))
        return self.heads if name == "heads" else self._measurement.study.tables[name]

    @property
    def arrays(self) -> list[str]:
        """Names of the arrays for `array`."""
        return list(self._arrays())

    @in_python
    def array(self, name: str) -> Array:
        """A matrix [h h] such as "similarity/encoder-self/2/cka", or "detail/confidence/0/encoder-self" [layer h].

        The first kind has also `…_low` and `…_high`; the second is of a single sentence and needs `detail=True`.
        ConfigError for a name that is not in `arrays`.
        """
        arrays = self._arrays()
        if name not in arrays:
            if not arrays:
                why = "similarity is an analysis, and detail=True keeps single sentences"
                raise ConfigError(f"there is no array {name!r}: {why}")
            others = f" … ({len(arrays)} in .arrays)" if len(arrays) > 4 else ""
            raise ConfigError(f"there is no array {name!r}; there are {', '.join([*arrays][:4])}{others}")
        return arrays[name]

    def _arrays(self) -> dict[str, Array]:
        study = self._measurement.study
        named_arrays = {f"similarity/{name}": array for name, array in study.arrays.items()}
        for analysis, arrays in study.detail.items():
            named_arrays |= {f"detail/{analysis}/{name}": array for name, array in arrays.items()}
        return named_arrays

    @property
    def labels(self) -> dict[HeadId, list[str]]:
        """The labels of the heads that have any."""
        return self._measurement.study.labels

    @property
    def unsupported(self) -> dict[HeadId, list[str]]:
        """Labels that the estimates alone would give, each with what its evidence lacks; `table("labels")` has both."""
        return self._measurement.study.unsupported

    @property
    def left_out(self) -> list[LeftOut]:
        """Analyses that did not run, with the reasons."""
        return [replace(analysis, why=python_words(analysis.why)) for analysis in self._measurement.study.left_out]

    @property
    def remarks(self) -> list[str]:
        """Remarks on the numbers, such as the share of unknown subwords."""
        return [python_words(remark) for remark in self._measurement.study.remarks]

    @property
    def sentences(self) -> int:
        """Number of sentences that were measured."""
        return self._measurement.study.sentences

    @property
    def complete(self) -> bool:
        """Whether the whole text was measured."""
        return self._measurement.study.complete

    @property
    def signature(self) -> str:
        """Everything that the numbers depend on, in one line, to cite with them."""
        return str(self._record["signature"])

    @property
    def record(self) -> Mapping[str, Any]:
        """The content of `run.json`: signatures, checkpoint, text, options, versions."""
        return self._record

    def plot(self, name: str = "heads", **options: Any) -> Figure:
        """Draw a figure, in memory: heads, functions, faithfulness, or that of an analysis (positional, similarity, …).

        `options` are those of `headscope plot NAME`: `measure=["confidence", "sink"]` and `sort=True` for heads,
        `measure="cka"` for similarity, `metric="bleu"` for faithfulness, `heads=` and `sentence=` for attention; and
        those of `headscope.plot`: `out="heads.pdf"` writes the figure. ConfigError for another name or option, and
        where the analysis that a figure shows did not run.
        """
        return plot(self, name, **options)

    @in_python
    def write_alignment(self, model: PathName, *, heads: int = 6, force: bool = False) -> str:
        """Name the cross heads that align in the settings of a model, as `headscope analyze --write-alignment` does.

        model: a folder of transformers or of CTranslate2; `heads`: the most that are named. Returns which, and where.
        Heads that the folder names stay unless `force`, where no links show that others are better.
        ConfigError where the folder has no place for them or has other heads, and where `alignment` did not run.
        """
        from headscope.pruning.engines.alignment import check_alignment_model, write_measured

        cross = self.heads[self.heads["site"] == Site.CROSS.value]
        if "alignment_score" not in cross or cross["alignment_score"].isna().all():
            raise ConfigError("this study has no alignment of cross heads; analyse with only='alignment' and a target")
        check_alignment_model(
            Path(model), {(Site.CROSS, int(str(layer))): len(rows) for layer, rows in cross.groupby("layer")}
        )
        return write_measured(Path(model), cross, heads, force=force)

    def run(self) -> AnalysisRun:
        """The study in the form that `headscope.report` draws."""
        from headscope.report.readers.run import study_run

        study = self._measurement.study
        return study_run(self._record, study.heads, study.tables, study.arrays, self._measurement.examples)

    @in_python
    def save(self, folder: PathName, *, figures: bool = True, report: bool = False, force: bool = False) -> Path:
        """Write the files that `headscope analyze --out FOLDER` writes, and return the folder; `report` the page too.

        OutputError where the folder is not empty, unless `force` allows to replace a run in it, and where it is or
        contains an input of the study. An incomplete study goes to FOLDER.new rather than replace a run.
        """
        inputs = inputs_of({**self._record["options"], "checkpoint": str(self._record["checkpoint"]["path"])})
        with Build(Path(folder), ANALYSIS, inputs=inputs, force=force) as build:
            out, _ = save_measurement(self._measurement, build, figures=figures, report=report)
        return out

    def report(self, out: PathName, *, force: bool = False) -> Path:
        """Write the page that `headscope plot report` makes of a run: one HTML file, which needs nothing else.

        With `analyze(…, report=True)` it shows the attention on example sentences, too.
        """
        return plot(self, "report", out=out, force=force)

    def __repr__(self) -> str:
        status = "" if self.complete else ", interrupted"
        return f"<Study of {len(self.heads)} heads on {self.sentences} sentences{status}: {', '.join(self.tables)}>"

    def _repr_html_(self) -> str:
        """Findings, head maps, the first rows without intervals, what was left out, and the signature."""
        from headscope.report.page.write import analysis_report, compact_html

        left_out = [f"left out: {entry.analysis} ({entry.why})" for entry in self.left_out]
        return compact_html(analysis_report(self.run(), ()), self.heads, [*left_out, *self.remarks])


COMMAND = ("headscope.Model.analyze",)
Runs: TypeAlias = "Study | PathName | Sequence[Study | PathName]"
"""What figures are drawn of: studies, and folders of runs."""


def study_of(
    checkpoint: Checkpoint,
    texts: Texts,
    options: Mapping[str, Any],
    *,
    mask: Heads | None,
    gates: str,
    out: PathName | None,
    figures: bool,
    force: bool,
    progress: Report,
) -> Study:
    """Measure every head of an open checkpoint, and write the run to `out`, if given.

    Options, text and folder are checked before the first pass.
    """
    settings = analyze_options({**options, "mask": heads_option(mask, checkpoint.layout, name="mask")})
    chosen_analyses(settings, prompts=texts.answer is not None)
    if out is not None:
        read = inputs_of({**settings.settings(), **texts.settings(), "checkpoint": checkpoint.path})
        check_folder(Path(out), ANALYSIS, inputs=read, force=force)
        check_writable(Path(out))
    parse, target_parse = settings.parse, settings.target_parse
    corpus = texts.corpus(checkpoint, parse=parse, target_parse=target_parse, max_sentences=settings.max_sentences)
    about = {**texts.settings(), **({"gates": gates} if gates else {})}
    with eval_mode(checkpoint.model):
        measurement = measure_heads(
            checkpoint, corpus, settings, about=about, command=COMMAND, progress=progress_of(progress)
        )
    study = Study(measurement)
    if out is not None:
        study.save(out, figures=figures, report=settings.report, force=force)
    return study


@overload
def plot(  # type: ignore[overload-overlap]
    runs: Runs, name: Literal["report"], *, out: PathName, force: bool = False
) -> Path: ...


@overload
def plot(
    runs: Runs,
    name: str = "heads",
    *,
    out: PathName | None = None,
    dpi: int | None = None,
    force: bool = False,
    style: str = "screen",
    width: float | None = None,
    title: bool = True,
    signature: bool = True,
    **options: Any,
) -> Figure: ...


@in_python
def plot(
    runs: Runs,
    name: str = "heads",
    *,
    out: PathName | None = None,
    dpi: int | None = None,
    force: bool = False,
    style: str = "screen",
    width: float | None = None,
    title: bool = True,
    signature: bool = True,
    **options: Any,
) -> Figure | Path:
    """Draw a figure of finished runs: what `headscope plot NAME` does; "report" writes a page and returns its path.

    runs: a study, or the folder of a run, or several of these; what a figure is drawn of is as in `headscope plot`.
    name: heads, functions, rankings, faithfulness, attention (`heads=`, `sentence=` or `index=`) or the figure of an
        analysis (positional, similarity, …) of a study; compare (`measure=`) of two; training (`axis=`) of runs of
        `train`, gates and confidence of one; pruning (`figure=`, `functions=`) of runs of `prune`; report of any runs.
    out: a .png, .svg or .pdf file to write; `dpi` is for PNG, `force` replaces a file that is there.
    style: screen, or paper, which has letters of print; `width` in inches; whether to write `title` and `signature`.

    ConfigError for an unknown figure or option, MissingTable where the run has no data for it.
    """
    from headscope.report.layout.output import FigureStyle, check_page, check_path, figure_style, write_figure
    from headscope.report.registry import find_figure

    figure = find_figure(name)
    needed = [entry.name for entry in fields(figure.Options) if entry.default is MISSING]
    if lacking := [option for option in needed if option not in options]:
        raise ConfigError(f"the figure {name!r} needs {lacking[0]}=")
    settings = configured(figure.Options, options, function=f"plot {name}")
    check_options(settings)
    several = isinstance(runs, Sequence) and not isinstance(runs, str)
    shown: list[Any] = [*runs] if several else [runs]  # type: ignore[misc]  # a sequence, as it says
    if strange := [run for run in shown if not isinstance(run, (Study, str, PathLike))]:
        raise ConfigError(f"runs: a {type(strange[0]).__name__} is no run; give a study, a folder or a list of these")
    path = None if out is None else Path(out)
    if figure.page and path is None:
        raise ConfigError(f"{name!r} is a page; give out='page.html'")
    if path is not None:
        (check_page if figure.page else check_path)(path, force=force)
    read = figure.read([run.run() if isinstance(run, Study) else Path(run) for run in shown])
    if figure.page:
        from headscope.report.page.write import save_page

        assert path is not None
        return save_page(figure.drawn(read, settings), path, force=force)
    _show_in_notebook()
    with figure_style(FigureStyle(style, width, title=title, signature=signature)):
        drawn: Figure = figure.drawn(read, settings)
        if path is not None:
            write_figure(drawn, path, dpi=dpi, force=force)
    return drawn


def _show_in_notebook() -> None:
    """Let IPython draw figures as PNG where it does not know how to yet: unasked it does once pyplot is imported."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    from IPython.core.pylabtools import select_figure_formats
    from matplotlib.figure import Figure

    formatters = shell.display_formatter.formatters
    if not any(Figure in formatters[f"image/{kind}"].type_printers for kind in ("png", "jpeg", "svg+xml")):
        select_figure_formats(shell, {"png"})  # type: ignore[no-untyped-call]
