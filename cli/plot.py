"""`headscope plot`: redraw the figures of finished runs as PNG, SVG or PDF, or all of them as one HTML page.

Its commands are made of what figures declare (`headscope.report.registry`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.console import Printer
from headscope.cli.lazy_commands import LazyGroup, build_command
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
    """The file of a figure or a page."""

    out: Path = option(
        help="File to write: .png, .svg, .pdf, or .html of report. For several runs a directory, or a name with {run} "
        "in it.",
        metavar="PATH",
        is_output=True,
    )
    force: bool = option(False, "Replace a file that exists.")


def group(**settings: Any) -> LazyGroup:
    """The group of the commands of figures."""
    summaries = {name: figure.summary for name, figure in plot_figures().items()}
    return LazyGroup(summaries, _command, kind="figure", **settings)


def _command(name: str) -> Any:
    figure = plot_figures()[name]
    classes = _runs_class(figure), FigureFile, figure.Options, FigureStyle
    own_classes = classes[: 3 if figure.page else 4]

    @options_from(*own_classes, config=False, read=lambda values: [take_config(cls, values) for cls in classes])
    def command(runs: Any, file: FigureFile, options: Any, style: FigureStyle, printer: Printer) -> None:
        paths = list(runs.runs) if hasattr(runs, "runs") else list(vars(runs).values())
        if file.out.is_file():
            check_inputs(file.out, inputs_of({**vars(options), **vars(runs)}))
        targets = _targets(figure, paths, file)
        for target, group in targets.items():
            figure.render(group, options, style, target, force=file.force)
        result = import_target(figure.answers)(figure.read(paths), options) if figure.answers else None
        _print_result(figure, targets, result, printer)

    return build_command(command, figure.name, figure.summary)


def _targets(figure: PlotFigure, paths: list[Path], file: FigureFile) -> dict[Path, list[Path]]:
    """The runs to draw by the file to write; files are checked before any run is read."""
    if figure.runs != "each":
        return {check_path(file.out, page=figure.page, force=file.force): paths}
    targets = target_paths(file.out, paths, figure=figure.stem, force=file.force)
    return {target: [path] for target, path in zip(targets, paths, strict=True)}


def _runs_class(figure: PlotFigure) -> type[Any]:
    """A config class with the runs of a figure's command as arguments: a fixed number, or any number."""
    source = figure.source
    if isinstance(figure.runs, int):
        argument = partial(option, help=source.help, metavar=source.metavar, argument=True)
        return make_dataclass("Runs", [(f"run{n}", Path, argument()) for n in range(figure.runs)], frozen=True)
    runs = option(help=source.help, metavar=f"{source.metavar}…", argument=True, repeat=True)
    return make_dataclass("Runs", [("runs", tuple[Path, ...], runs)], frozen=True)


def _print_result(
    figure: PlotFigure, targets: Mapping[Path, list[Path]], result: Result | None, printer: Printer
) -> None:
    """Print the answers that belong to a figure, if any, and the files that were written."""
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
