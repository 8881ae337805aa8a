"""Figures as they are declared: read without importing them, added by another package, drawn by commands and Python."""

from __future__ import annotations

import sys
from dataclasses import fields

from headscope.config.declarations import import_target
from headscope.report.registry import PlotFigure, declared_figures, plot_figures


def test_declarations_are_read_as_they_are_imported() -> None:
    read = {figure.name: figure for figure in declared_figures()}
    assert len(read) >= 15 and read.keys() < plot_figures().keys()
    for name, figure in read.items():
        draw = import_target(figure.draw)
        made = next(
            (value for value in vars(sys.modules[draw.__module__]).values() if getattr(value, "name", "") == name), None
        )
        if not figure.page:
            assert isinstance(made, PlotFigure) and made.draw is draw
            assert (made.summary, made.source, made.runs) == (figure.summary, figure.source, figure.runs)
            options = (
                [(entry.name, entry.default, entry.metadata) for entry in fields(it.Options)] for it in (made, figure)
            )
            assert next(options) == next(options)
