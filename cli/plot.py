"""`headscope plot`: redraw the figures of finished runs as PNG, SVG or PDF, or all of them as one HTML page.

Its commands are made of what figures declare (`headscope.report.registry`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.console import Printer
from headscope.cli.failures import LazyGroup, build_command
from headscope.cli.options import options_from
from headscope.config.declarations import import_target
from headscope.config.option import option, take_config
from headscope.files.output_checks import check_inputs, inputs_of
from headscope.report.registry import PlotFigure, plot_figures
from headscope.report.styles import FigureStyle, check_path, target_paths

if TYPE_CHECKING:
    from headscope.results.answer import Result


@dataclass(frozen=True)
class FigureFile:
    """Where a figure, or a page, goes."""

    out: Path = option(
        help="File to write: .png, .svg, .pdf, or .html of report. For several runs a directory, or a name with {run} "
        "in it.",
        metavar="PATH",
        is_output=True,
    )
    force: bool = option(False, "Replace a file that exists.")


def group(**settings: Any) -> LazyGroup:
    """The commands of figures."""
    summaries = {name: figure.summary for name, figure in plot_figures().items()}
    return LazyGroup(summaries, _command, kind="figure", **settings)


def _command(name: str) -> Any:
    figure = plot_figures()[name]
    classes = _runs(figure), FigureFile, figure.Options, FigureStyle
    own_classes = classes[: 3 if figure.page else 4]

    @options_from(*own_classes, config=False, read=lambda values: [take_config(cls, values) for cls in classes])
    def command(runs: Any, file: FigureFile, options: Any, style: FigureStyle, printer: Printer) -> None:
        paths = list(runs.runs) if hasattr(runs, "runs") else list(vars(runs).values())
        if file.out.is_file():
            check_inputs(file.out, inputs_of({**vars(options), **vars(runs)}))
        targets = _targets(figure, paths, file)
        for target, group in targets.items():
            figure.render(group, options, style, target, force=file.force)
        answering = import_target(figure.answers) if figure.answers else None
        _say(figure, targets, None if answering is None else answering(figure.read(paths), options), printer)

    return build_command(command, figure.name, figure.summary)


def _targets(figure: PlotFigure, paths: list[Path], file: FigureFile) -> dict[Path, list[Path]]:
    """Where to write, which is checked before anything is read, and the runs that are drawn there."""
    if figure.runs != "each":
        return {check_path(file.out, page=figure.page, force=file.force): paths}
    targets = target_paths(file.out, paths, figure=figure.stem, force=file.force)
    return {target: [path] for target, path in zip(targets, paths, strict=True)}


def _runs(figure: PlotFigure) -> type[Any]:
    """The arguments of a figure's command: any number of runs, or a fixed one."""
    source = figure.source
    about: dict[str, Any] = {"help": source.help, "argument": True}
    if isinstance(figure.runs, int):
        one = [(f"run{n}", Path, option(**about, metavar=source.metavar)) for n in range(figure.runs)]
        return make_dataclass("Runs", one, frozen=True)
    runs_option = option(**about, metavar=f"{source.metavar}…", repeat=True)
    return make_dataclass("Runs", [("runs", tuple[Path, ...], runs_option)], frozen=True)


def _say(figure: PlotFigure, targets: Mapping[Path, list[Path]], result: Result | None, printer: Printer) -> None:
    """The answers of a figure that has some, and the files written."""
    if printer.json:
        names = {target: [path.resolve().name for path in paths] for target, paths in targets.items()}
        files = [{"figure": figure.name, "runs": runs, "path": str(target)} for target, runs in names.items()]
        console.print_json({"written": files, **(result.to_json() if result else {})})
        return
    line = f"wrote {', '.join(map(str, targets))}"
    if result:
        printer.show(result, files=[line])
    else:
        console.show([line])
