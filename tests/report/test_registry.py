"""Figures as they are declared: read without importing them, added by another package, drawn by commands and Python."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headscope as hs
from headscope import registry
from headscope.cli.plot import app
from headscope.config.declarations import import_target
from headscope.errors import ConfigError
from headscope.report.registry import PlotFigure, declared_figures, plot_figures
from tests.makers.runs import make_run

PLUGIN = Path(__file__).resolve().parents[1] / "plugin"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The figure of tests/plugin, as if its package were installed."""
    point = EntryPoint(name="spread", value="headscope_plugin.spread", group="headscope.figures")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setattr("headscope.report.registry.declared_figures", declared_figures.__wrapped__)
    return monkeypatch


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


@pytest.mark.slow
def test_a_figure_of_another_package(installed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert list(plot_figures())[-2:] == ["spread", "report"] and "headscope_plugin.spread" not in sys.modules
    runs = [make_run(tmp_path / name, {"encoder-self": [3, 2]}, seed=seed) for seed, name in enumerate("ab")]
    out = tmp_path / "x.svg"
    words = ["spread", *map(str, runs), "--column", "distance", "--out", str(out), "--no-title"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert "distance" in out.read_text(encoding="utf-8")
    (axes,) = hs.plot(runs, "spread").axes
    assert axes.get_ylabel() == "confidence" and [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"'colum'.*'column'"):
        hs.plot(runs, "spread", colum="distance")
    point = EntryPoint(name="other", value="tests.plugin.headscope_plugin.spread", group="headscope.figures")
    twice = [EntryPoint(name="spread", value="headscope_plugin.spread", group=point.group), point]
    installed.setattr(registry, "entry_points", lambda group: twice)
    with pytest.raises(ConfigError, match="'spread'"):
        plot_figures()
