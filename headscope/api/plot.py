"""Figures of studies and runs, drawn in memory or written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from headscope.api.arguments import PathName, public_api
from headscope.config.declarations import import_target
from headscope.config.option import make_config
from headscope.errors import ConfigError
from headscope.results.study import Study
from headscope.results.study_tables import files_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs: TypeAlias = "Study | PathName | Sequence[Study | PathName]"
"""What figures are drawn of: studies, and folders of runs."""


@overload
def plot(runs: Runs, name: Literal["report"], *, out: PathName, force: bool = False) -> Path: ...


@overload
def plot(runs: Runs, name: str = "heads", **options: Any) -> Figure: ...


@public_api
def plot(
    runs: Runs,
    name: str = "heads",
    *,
    out: PathName | None = None,
    force: bool = False,
    **options: Any,
) -> Figure | Path:
    """Draw a figure of finished runs: what `headscope plot NAME` does; "report" writes a page and returns its path.

    runs: a study, the folder of a run, or several of these. name: of a figure (`headscope list figures`).
    out: a .png, .svg or .pdf file to write; `force` replaces a file that is there.
    options: those of the figure, and `style` ("screen", "paper"), `width` in inches, `title`, `signature`, `dpi`.

    ConfigError for an unknown figure or option, MissingTable where the run has no data for it.
    """
    from headscope.report.registry import find_figure
    from headscope.report.styles import FigureStyle, check_path, write_figure

    figure = find_figure(name)
    look = {entry.name: options.pop(entry.name) for entry in fields(FigureStyle) if entry.name in options}
    settings, looks = make_config(figure.Options, options, what=f"plot {name}"), make_config(FigureStyle, look)
    several = isinstance(runs, Sequence) and not isinstance(runs, str)
    run_list: list[Any] = [*runs] if several else [runs]  # type: ignore[misc]  # a sequence, as it says
    if strange := [run for run in run_list if not isinstance(run, (Study, str, PathLike))]:
        raise ConfigError(
            f"runs: a {type(strange[0]).__name__} is not a run; give a study, a folder or a list of these"
        )
    path = None if out is None else Path(out)
    if path is not None:
        check_path(path, page=figure.page, force=force)
    elif figure.page:
        raise ConfigError(f"{name!r} is a page; give out='page.html'")
    run_list = [run if isinstance(run, Study) else Path(run) for run in run_list]
    with files_of([run for run in run_list if isinstance(run, Path)]):
        figure_object: Any = figure.drawn(figure.read(run_list), settings, *([] if figure.page else [looks]))
    if figure.page and path is not None:
        return import_target("headscope.report.page.write:save_page")(figure_object, path)  # type: ignore[no-any-return]
    _show_in_notebook()
    if path is not None:
        write_figure(figure_object, path, dpi=looks.dpi, force=force)
    return figure_object  # type: ignore[no-any-return]


def _show_in_notebook() -> None:
    """Let IPython draw figures as PNG, where it does not know how to yet."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    from IPython.core.pylabtools import select_figure_formats
    from matplotlib.figure import Figure

    formatters = shell.display_formatter.formatters.values()
    if not any(Figure in formatter.type_printers for formatter in formatters if formatter.format_type != "text/plain"):
        select_figure_formats(shell, {"png"})  # type: ignore[no-untyped-call]
