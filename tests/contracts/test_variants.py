"""Every variant of training, alone and together, and every learner of gates."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from importlib.metadata import EntryPoint
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from headscope import registry
from headscope.cli.main import app
from headscope.errors import ConfigError
from headscope.formats.base import open_checkpoint
from headscope.progress import no_progress
from headscope.pruning.learning.learner import GateLearner, learner
from headscope.pruning.options import choice as learn
from headscope.pruning.options.choice import LEARNERS, learners
from headscope.training.config import TrainConfig
from headscope.training.variant import VARIANTS, Variant, VariantChain, find_variant, why_not_together
from tests.makers.sweeps import make_words
from tests.oracles import checkpoints, lessons
from tests.oracles.plugin import register_plugin
from tests.oracles.swaps import differing

NEEDED: dict[str, dict[str, Any]] = {
    "swap": {"dynamic": ("soft", "random", "soft")},
    "mae": {"gate_every": 2},
    "mixing": {"gamma": 0.1, "start_after": 0.0},
}
IDLE: dict[str, dict[str, Any]] = {  # options with which a variant changes nothing in the first epochs
    "disagreement": {"weight": 0.0},
    "mixing": {"start_after": 1.0},
    "narrow": {"d_head": 4, "head_input": "full"},
    "swap": {"dynamic": ("soft",), "dynamic_start": (90,)},
    "wide": {"d_head": 4},
}
PAIRS = [
    f"{one}+{other}"
    for one, other in combinations(VARIANTS.names(), 2)
    if why_not_together([VARIANTS.get(one), VARIANTS.get(other)]) is None
]
TOGETHER = [*PAIRS, "disagreement+mixing+swap"]
RESUMED = ["disagreement+mae", "mae+swap", "mixing+wide", "narrow+swap", TOGETHER[-1]]
"""Every variant that can be combined, beside one with a state and beside one without."""


def needed(name: str) -> dict[str, Any]:
    return {key: value for part in name.split("+") for key, value in NEEDED.get(part, {}).items()}


def trained(
    folder: Path, name: str, options: dict[str, Any], *, stop: int | None = None, resume: bool = False, **shared: Any
) -> tuple[str, dict[str, Tensor]]:
    """Why a short training ended, and its weights."""
    shared = {"log_every": 1000, "max_epochs": 2, "max_tokens": 120, **shared}
    shown = no_progress if stop is None else lessons.StopsAfter(stop)
    found = lessons.run_variant(folder, name, options, progress=shown, resume=resume, **shared)
    if not (found.folder / "last").exists():
        return found.reason, {}
    its: Any = open_checkpoint(str(found.folder / "last"), device="cpu", dtype="float64").model
    return found.reason, {key: value.clone() for key, value in its.state_dict().items()}


def saved(folder: Path) -> Any:
    """What a training left for going on, after swaps that its last epoch decided."""
    return torch.load(folder / "run" / "state.pt", weights_only=True)


def loss(folder: Path, name: str, precision: str) -> float:
    """Validation loss after an epoch; the weights kept are float32."""
    shared = {"precision": precision, "dropout": 0.0, "log_every": 1000, "max_epochs": 1}
    found = lessons.run_variant(folder, name, needed(name), **shared)
    its: Any = open_checkpoint(str(found.folder / "last"), device="cpu").model
    assert {value.dtype for value in its.parameters()} == {torch.float32}
    assert found.nll is not None
    return found.nll


@pytest.mark.parametrize("name", ["mae", "wide", TOGETHER[-1]])
def test_a_variant_learns_the_same_in_half_precision(name: str, tmp_path: Path) -> None:
    whole, half = (loss(tmp_path / kind, name, kind) for kind in ("float32", "bf16"))
    assert half == pytest.approx(whole, abs=0.05) and half != whole


@pytest.mark.parametrize("name", RESUMED)
def test_variants_together_go_on_after_an_interruption_as_if_there_had_been_none(name: str, tmp_path: Path) -> None:
    """Stopped within the second epoch, where dynamic swaps are in effect, which are undone after it."""
    trained(tmp_path / "whole", name, needed(name))
    reason, _ = trained(tmp_path / "parts", name, needed(name), stop=5)
    halfway = saved(tmp_path / "parts")
    assert reason == "interrupted" and halfway["moment"]["epoch"] == 2
    assert set(halfway["variant"]) == set(name.split("+"))
    reason, _ = trained(tmp_path / "parts", name, needed(name), resume=True)
    whole, parts = saved(tmp_path / "whole"), saved(tmp_path / "parts")
    assert reason == "epochs" and not differing(whole["model"], parts["model"])
    assert whole["variant"] == parts["variant"] and torch.equal(whole["generator"], parts["generator"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """The weights that every variant that can be combined ends with by itself."""
    folder = tmp_path_factory.mktemp("alone")
    names = sorted({part for pair in RESUMED for part in pair.split("+")})
    return {name: trained(folder / name, name, needed(name))[1] for name in names}


@pytest.mark.parametrize("pair", RESUMED[:-1])
def test_a_variant_that_does_nothing_leaves_the_other_as_it_is(
    pair: str, alone: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    """`mixing+swap` without a swap that is due is `mixing`, with matrices that are not trained `swap`, and so on."""
    names = pair.split("+")
    checked = 0
    for active, idle in (names, names[::-1]):
        if idle in IDLE:
            _, found = trained(tmp_path / active, pair, {**needed(active), **IDLE[idle]})
            assert not differing(alone[active], found)
            added = {key: value for key, value in found.items() if key not in alone[active]}
            assert all(torch.equal(value, torch.eye(3).double()) for value in added.values())
            checked += 1
    assert checked


def test_every_variant_but_those_with_steps_of_their_own_can_be_idle() -> None:
    assert {part for pair in PAIRS for part in pair.split("+")} - set(IDLE) == {"mae"}


def test_a_chain_passes_on_every_hook() -> None:
    hooks = {name for name, value in vars(Variant).items() if callable(value) and not name.startswith("__")}
    assert hooks - {"Options"} <= set(vars(VariantChain))


@pytest.mark.parametrize("name", TOGETHER)
def test_options_of_all_are_accepted_and_checked(name: str) -> None:
    cls = find_variant(name)
    parts = [VARIANTS.get(part) for part in name.split("+")]
    assert {each.name for each in fields(cls.Options)} == {each.name for part in parts for each in fields(part.Options)}
    assert cls.name == name and all(part.summary in cls.summary for part in parts)


def test_every_variant_that_combines_is_interrupted() -> None:
    combined = {part for pair in PAIRS for part in pair.split("+")}
    assert {part for name in RESUMED for part in name.split("+")} == combined and set(RESUMED) <= set(TOGETHER)


def test_no_variant_has_an_option_that_all_have() -> None:
    shared = {each.name for each in fields(TrainConfig)}
    for _, cls in VARIANTS:
        assert not shared & {each.name for each in fields(cls.Options)}


ADDED = "sigmoid"
PLUGIN = Path(__file__).resolve().parents[1] / "plugin"


@pytest.fixture(params=["l0", "subset", ADDED])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """`sigmoid` is a learner of another package (tests/plugin)."""
    with register_plugin(LEARNERS, ADDED) if request.param == ADDED else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_words(tmp_path_factory.mktemp("words"), checkpoints.small())


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
