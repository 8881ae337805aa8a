"""Figures: those that files in `headscope/report/figures`, analyses and other packages declare.

The declarations, of which commands and help texts are made, are read without importing matplotlib, like those of
analyses (`headscope.config.declarations`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from headscope.config import declarations
from headscope.config.declarations import AnalysisFigure, import_target
from headscope.errors import ConfigError
from headscope.registry import Registry, unknown

declarations.LIGHT.add(__name__)
_figure_registry = partial(Registry[Any], "figure", package="headscope.report.figures", group="headscope.figures")


@dataclass(frozen=True)
class Source:
    """The input of a figure: its placeholder in `--help`, and "module:function", which `read`s it from a path.

    With `at_once` the function reads all paths together. Without a function the figure gets the paths themselves.
    `studies` says that a figure also takes a `headscope.results.study.Study` from Python.
    """

    metavar: str
    help: str
    read: str = ""
    at_once: bool = False
    studies: bool = False


RUN = Source("RUN", "Directory that `headscope analyze --out` wrote.", "headscope.report.fork:read_run", studies=True)
RUNS = replace(RUN, help="Directories that `headscope analyze --out` wrote.")
TRAIN_RUN = Source("RUN", "Directories that `headscope train --out` wrote.", "headscope.results.training:Training.open")
RANGE = "Range of the scale, such as 0,1; default: that of the measure."


@dataclass(frozen=True)
class PlotFigure(AnalysisFigure):
    """A figure: `headscope plot NAME`, `hs.plot(runs, NAME)`, `study.plot(NAME)`.

    It shows `each` run alone, any number `together`, or exactly this number of runs. `draw(run, sheet, options)` gets
    the run or the list of runs, a `headscope.report.sheet.Sheet` (a matplotlib Figure) to draw into, and an instance of
    `Options`. With `every_run`, `headscope analyze` draws it, too; `order` is its place in lists. A `page` is HTML:
    `draw(runs)` returns the report that `headscope.report.page.write` writes. `answers` ("module:function") makes the
    result that the command prints, from runs and options. `analysis` is the name of the analysis that declares it.
    """

    source: Source = RUNS
    runs: Literal["each", "together"] | int = "each"
    every_run: bool = False
    order: int = 900
    page: bool = False
    answers: str = ""
    analysis: str = ""

    def read(self, runs: Sequence[Any]) -> list[Any]:
        """The runs to draw: paths are read, studies stay as they are; ConfigError for a wrong number or kind."""
        number_of_runs = 1 if self.runs == "each" else self.runs
        if number_of_runs not in ("together", len(runs)):
            number = {1: "one run", 2: "two runs"}.get(int(number_of_runs), f"{number_of_runs} runs")
            raise ConfigError(f"the figure {self.name!r} is of {number}; {len(runs)} were given")
        studies = [run for run in runs if not isinstance(run, Path)]
        if studies and not self.source.studies:
            raise ConfigError(f"the figure {self.name!r} is of runs on disk; {studies[0].name} is a study")
        if not self.source.read:
            return list(runs)
        if self.source.at_once:
            return list(import_target(self.source.read)(runs))
        sources = {"from_pickle": self.from_pickle, "from_checkpoint": self.from_checkpoint}
        readers = {name: import_target(reader) for name, reader in sources.items() if reader}
        return [import_target(self.source.read)(run, **readers) if isinstance(run, Path) else run for run in runs]

    def draw_runs(self, runs: Sequence[Any], options: Any = None, style: Any = None) -> Any:
        """The matplotlib Figure of runs from `read`, in a `FigureStyle`; for a page its report."""
        if self.page:
            return import_target(self.draw)(runs)
        from headscope.report.sheet import Sheet
        from headscope.report.styles import FigureStyle

        style = style or FigureStyle()
        with style.in_use():
            sheet = Sheet(style, "\n".join(dict.fromkeys(str(run.signature) for run in runs)))
            run_or_runs = runs[0] if self.runs in ("each", 1) else list(runs)
            import_target(self.draw)(run_or_runs, sheet, options or self.Options())
            return sheet.finish()

    def render(self, runs: Sequence[Any], options: Any, style: Any, path: Path | None, *, force: bool) -> Any:
        """Draw paths and studies, and write the figure if there is a `path`; returns it (of a page the file)."""
        from headscope.report.styles import check_path, write_figure
        from headscope.results.study_tables import files_of

        if path is not None:
            check_path(path, page=self.page, force=force)
        with files_of([run for run in runs if isinstance(run, Path)]):
            figure = self.draw_runs(self.read(runs), options, style)
        if self.page:
            return import_target("headscope.report.page.write:save_page")(figure, path)
        if path is not None:
            write_figure(figure, path, dpi=style.dpi, force=force)
        return figure

    def is_of(self, run: Any) -> bool:
        """Whether it is among the figures of a run that was analysed."""
        if self.analysis:
            return run.analyses is None or self.analysis in {name.partition(".")[0] for name in run.analyses}
        return self.every_run


def plot_figures() -> dict[str, PlotFigure]:
    """Every figure by its name, in their `order`; ConfigError if two have the same name."""
    figures: dict[str, PlotFigure] = {}
    for figure in sorted([*declared_figures(), *_of_analyses()], key=lambda figure: figure.order):
        if figures.setdefault(figure.name, figure) is not figure:
            raise ConfigError(f"there are two figures {figure.name!r}; rename one of them")
    return figures


def find_figure(name: str) -> PlotFigure:
    """A figure by its name; ConfigError for an unknown one."""
    figures = plot_figures()
    if name not in figures:
        _figure_registry().names()  # raises an error that names a package which cannot be loaded
        raise ConfigError(unknown("figure", name, list(figures)))
    return figures[name]


def draw_standard(run_dir: Path | str, *, dpi: int | None = None) -> list[Path]:
    """Draw all figures that a run has tables for, as PNG in its `figures` folder."""
    from headscope.report.styles import write_figure
    from headscope.results.study import Study
    from headscope.results.study_tables import MissingTable

    run = Study.open(run_dir)
    paths = []
    for figure in plot_figures().values():
        try:
            if figure.is_of(run):
                target = Path(run_dir) / "figures" / f"{figure.stem}.png"
                paths.append(write_figure(figure.draw_runs([run]), target, dpi=dpi, force=True))
        except MissingTable:
            continue
    return paths


def _of_analyses() -> Iterator[PlotFigure]:
    kinds = {"from_checkpoint": ("CKPT", "checkpoints"), "from_pickle": ("PICKLE", "pickles that the MHR fork wrote")}
    for analysis in declarations.declarations("figures"):
        for figure in analysis.figures:
            kinds_read = [words for name, words in kinds.items() if getattr(figure, name)]
            metavar = "|".join([RUNS.metavar, *(word for word, _ in kinds_read)])
            help = ", ".join([RUNS.help.rstrip("."), *(word for _, word in kinds_read)])
            source = replace(RUNS, metavar=metavar, help=f"{help}.")
            yield PlotFigure(**vars(figure), source=source, order=100, analysis=analysis.name)


@lru_cache(maxsize=1)
def declared_figures() -> tuple[PlotFigure, ...]:
    """The figures in modules that were not imported yet."""
    modules = declarations.read_sources(_figure_registry(), r"PlotFigure\(")
    return tuple(value for names in modules for value in names.values() if isinstance(value, PlotFigure))
