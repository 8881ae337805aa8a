"""Figures of studies and runs, drawn in memory or written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from headscope.api.options import PathName, public_api
from headscope.config.option import configured
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

    runs: a study, or the folder of a run, or several of these; what a figure is drawn of is as in `headscope plot`.
    name: heads, functions, rankings, faithfulness, attention (`heads=`, `sentence=` or `index=`) or the figure of an
        analysis (positional, similarity, …) of a study; compare (`measure=`) of two; training (`axis=`) of runs of
        `train`, gates and confidence of one; pruning (`figure=`, `functions=`) of runs of `prune`; report of any runs.
    out: a .png, .svg or .pdf file to write; `force` replaces a file that is there.
    options: those of the figure, and `style` (screen, or paper, which has letters of print), `width` in inches, whether
        to write `title` and `signature`, and `dpi` of PNG.

    ConfigError for an unknown figure or option, MissingTable where the run has no data for it.
    """
    from headscope.report.registry import find_figure
    from headscope.report.styles import FigureStyle, check_page, check_path, write_figure

    figure = find_figure(name)
    look = {entry.name: options.pop(entry.name) for entry in fields(FigureStyle) if entry.name in options}
    settings, looks = configured(figure.Options, options, what=f"plot {name}"), configured(FigureStyle, look)
    several = isinstance(runs, Sequence) and not isinstance(runs, str)
    shown: list[Any] = [*runs] if several else [runs]  # type: ignore[misc]  # a sequence, as it says
    if strange := [run for run in shown if not isinstance(run, (Study, str, PathLike))]:
        raise ConfigError(
            f"runs: a {type(strange[0]).__name__} is not a run; give a study, a folder or a list of these"
        )
    path = None if out is None else Path(out)
    if figure.page and path is None:
        raise ConfigError(f"{name!r} is a page; give out='page.html'")
    if path is not None:
        (check_page if figure.page else check_path)(path, force=force)
    shown = [run if isinstance(run, Study) else Path(run) for run in shown]
    reading = files_of([run for run in shown if isinstance(run, Path)])
    if figure.page:
        from headscope.report.page.write import save_page

        assert path is not None
        with reading:
            page = figure.drawn(figure.read(shown), settings)
        return save_page(page, path)
    _show_in_notebook()
    with reading:
        drawn: Figure = figure.drawn(figure.read(shown), settings, looks)
    if path is not None:
        write_figure(drawn, path, dpi=looks.dpi, force=force)
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
