"""What every learner of gates keeps: read without importing it, run by the command and in a sweep."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headscope import registry
from headscope.cli.main import app
from headscope.errors import ConfigError
from headscope.pruning.learning.learner import GateLearner, learner
from headscope.pruning.options import choice as learn
from headscope.pruning.options.choice import LEARNERS, learners
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
        found, imported = read[known], LEARNERS.get(known)
        assert (found.summary, found.__doc__, found.gate_lr) == (imported.summary, imported.__doc__, imported.gate_lr)
        assert [entry.name for entry in fields(found.Options)] == [entry.name for entry in fields(imported.Options)]


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


def test_options_are_its_own() -> None:
    class Heir(LEARNERS.get("subset")):  # type: ignore[misc]
        name = "heir"

    with pytest.raises(ConfigError, match=r"'heir'.*Options"):
        learner(Heir)
    assert issubclass(Heir, GateLearner) and "heir" not in LEARNERS.names()
