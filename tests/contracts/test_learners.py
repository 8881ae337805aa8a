"""What every learner of gates keeps: read without importing it, run by the command and in a sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headscope import registry
from headscope.cli.main import app
from headscope.errors import ConfigError
from headscope.pruning.gate_layout import gate_layout
from headscope.pruning.learning.learner import GateLearner, learner
from headscope.pruning.options import choice as learn
from headscope.pruning.options.choice import LEARNERS, DeclaredLearner, learners
from headscope.pruning.options.sweep import SweepConfig
from headscope.pruning.sweep.cells import cells_of
from tests.makers.sweeps import made_words
from tests.oracles import checkpoints
from tests.oracles.plugin import registered

ADDED = "sigmoid"
PLUGIN = Path(__file__).resolve().parents[1] / "plugin"


@pytest.fixture(params=["l0", "subset", ADDED])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """`sigmoid` is a learner of another package (tests/plugin)."""
    with registered(LEARNERS, ADDED) if request.param == ADDED else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return made_words(tmp_path_factory.mktemp("words"), checkpoints.small())


def arguments(words: dict[str, Any], *more: object) -> list[str]:
    given = [str(part) for key, value in words.items() if key != "checkpoint" for part in (f"--{key}", value)]
    quick = ["--updates", "2", "--device", "cpu", "--batch-tokens", "100"]
    return [*(flag.replace("_", "-") if flag.startswith("--") else flag for flag in given), *quick, *map(str, more)]


def test_what_it_declares_is_read_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    LEARNERS.names()
    point = EntryPoint(name=ADDED, value="headscope_plugin.sigmoid", group="headscope.pruning.learners")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.syspath_prepend(str(PLUGIN))
    unread: registry.Registry[Any] = registry.Registry("learner", package=LEARNERS.package, group=point.group)
    monkeypatch.setattr(learn, "LEARNERS", unread)
    read = learners()
    assert not unread.loaded_variants() and "headscope_plugin.sigmoid" not in sys.modules
    assert list(read) == ["l0", ADDED, "subset"] and read[ADDED].gate_lr == 0.05
    for known in ("l0", "subset"):
        found, imported = read[known], DeclaredLearner.of(LEARNERS.get(known))
        assert (found.summary, found.about, found.gate_lr) == (imported.summary, imported.about, imported.gate_lr)
        assert [entry.name for entry in fields(found.Options)] == [entry.name for entry in fields(imported.Options)]
        assert found.priced is (known == "l0")


def test_a_command_learns_with_it(name: str, words: dict[str, Any], tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["prune", name, "--help-all"]).output
    assert "--keep" in shown and "--gate-lr" in shown and ("--lambda" in shown) is (name == "l0")
    out = tmp_path / "run"
    command = ["prune", name, str(words["checkpoint"]), *arguments(words, "--keep", 5, "--out", out)]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    record = json.loads((out / "pruning.json").read_text(encoding="utf-8"))
    assert record["method"] == name == record["options"]["method"]["name"] and record["kept"] == 5
    assert record["learning"]["gate_lr"] == LEARNERS.get(name).gate_lr


def test_a_sweep_has_cells_of_it(name: str) -> None:
    config = SweepConfig(
        checkpoint="", out=Path("x"), source=Path("x"), methods=(name,), keep=(5,), seeds=2, start="open"
    )
    layout = gate_layout(checkpoints.small().attention_sites)
    _, *cells = cells_of(config, layout, lambda method: False)
    assert [(cell.keep, cell.seed) for cell in cells] == [(5, 1), (5, 2)]
    if name == "l0":
        with pytest.raises(ConfigError, match=r"--lambda 0\.123457.*twice"):  # their cells had one name
            replace(config, keep=(), lambdas=(0.12345678, 0.12345679))
    options = LEARNERS.get(name).options_of_cell(config, keep=5, strength=None)
    assert options.keep == 5 and getattr(options, "start", "open") == "open"
    if name != "l0":
        with pytest.raises(ConfigError, match=r"--lambda.*l0"):
            SweepConfig(checkpoint="", out=Path("x"), source=Path("x"), methods=(name,), keep=(5,), lambdas=(0.1,))


def test_options_are_its_own() -> None:
    class Heir(LEARNERS.get("subset")):  # type: ignore[misc]
        name = "heir"

    with pytest.raises(ConfigError, match=r"'heir'.*Options"):
        learner(Heir)
    assert issubclass(Heir, GateLearner) and "heir" not in LEARNERS.names()
