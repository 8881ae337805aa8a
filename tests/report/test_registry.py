"""Figures as they are declared: read without importing them, added by another package, drawn by commands and Python."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headscope as hs
from headscope import registry
from headscope.cli.plot import app
from headscope.config.declarations import imported
from headscope.config.option import declared_options
from headscope.errors import ConfigError
from headscope.report.registry import PlotFigure, declared_figures, find_figure, plot_figures
from tests.makers.figures import make_training
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
        draw = imported(figure.draw)
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


def test_help_of_every_figure_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from headscope.cli.plot import app, plot_figures\n"
        "for name in plot_figures(): assert '--out' in CliRunner().invoke(app, [name, '--help']).output, name\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"matplotlib", "pandas", "numpy", "torch"} & set(loaded)


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


def test_options_of_figures_have_flags_of_their_own() -> None:
    taken = {"out", "width", "style", "signature", "title", "dpi", "force", "json"}
    for figure in plot_figures().values():
        assert taken.isdisjoint(entry.name for entry, _ in declared_options(figure.Options)), figure.name


def test_figures_that_only_commands_drew_are_there_in_python(tmp_path: Path) -> None:
    layout = {"encoder-self": [3, 2]}
    runs = [make_run(tmp_path / name, layout, seed=seed) for seed, name in enumerate("ab")]
    trained = make_training(tmp_path / "trained", layout, "baseline")
    page = hs.plot([*runs, trained], "report", out=tmp_path / "page.html")
    assert page == tmp_path / "page.html" and "Do they order the heads alike" in page.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'report'.*out="):
        hs.plot(runs, "report")
    with pytest.raises(ConfigError, match="heads is missing"):
        hs.plot(runs[0], "attention", sentence="a")
    with pytest.raises(ConfigError, match=r"TEXT.*N"):
        hs.plot(runs[0], "attention", heads="encoder-self.0.*")
    with pytest.raises(ConfigError, match=r"index is -1.*0"):
        hs.plot(runs[0], "attention", heads="encoder-self.0.*", index=-1)
    with pytest.raises(ConfigError, match=r"'compare'.*1"):
        hs.plot(runs[0], "compare")
    assert find_figure("gates").runs == "each"
