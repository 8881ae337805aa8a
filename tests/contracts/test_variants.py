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

OPTIONS: dict[str, dict[str, Any]] = {
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
RESUMABLE = ["disagreement+mae", "mae+swap", "mixing+wide", "narrow+swap", TOGETHER[-1]]
"""Every variant that can be combined, with one that has a state and with one that has none."""


def options_for(name: str) -> dict[str, Any]:
    return {key: value for part in name.split("+") for key, value in OPTIONS.get(part, {}).items()}


def train(
    folder: Path, name: str, options: dict[str, Any], *, stop: int | None = None, resume: bool = False, **shared: Any
) -> tuple[str, dict[str, Tensor]]:
    """The reason for which a short training ended, and its weights."""
    shared = {"log_every": 1000, "max_epochs": 2, "max_tokens": 120, **shared}
    progress = no_progress if stop is None else lessons.StopsAfter(stop)
    run = lessons.run_variant(folder, name, options, progress=progress, resume=resume, **shared)
    if not (run.folder / "last").exists():
        return run.reason, {}
    model: Any = open_checkpoint(str(run.folder / "last"), device="cpu", dtype="float64").model
    return run.reason, {key: value.clone() for key, value in model.state_dict().items()}


def load_state(folder: Path) -> Any:
    """The state that a training resumes from, after the swaps of its last epoch."""
    return torch.load(folder / "run" / "state.pt", weights_only=True)


def loss(folder: Path, name: str, precision: str) -> float:
    """Validation loss after an epoch; the weights kept are float32."""
    shared = {"precision": precision, "dropout": 0.0, "log_every": 1000, "max_epochs": 1}
    run = lessons.run_variant(folder, name, options_for(name), **shared)
    model: Any = open_checkpoint(str(run.folder / "last"), device="cpu").model
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert run.nll is not None
    return run.nll


@pytest.mark.parametrize("name", ["mae", "wide", TOGETHER[-1]])
def test_a_variant_learns_the_same_in_half_precision(name: str, tmp_path: Path) -> None:
    single, low = (loss(tmp_path / kind, name, kind) for kind in ("float32", "bf16"))
    assert low == pytest.approx(single, abs=0.05) and low != single


@pytest.mark.parametrize("name", RESUMABLE)
def test_variants_together_go_on_after_an_interruption_as_if_there_had_been_none(name: str, tmp_path: Path) -> None:
    """Stopped within the second epoch, during dynamic swaps, which are undone after it."""
    train(tmp_path / "whole", name, options_for(name))
    reason, _ = train(tmp_path / "parts", name, options_for(name), stop=5)
    halfway = load_state(tmp_path / "parts")
    assert reason == "interrupted" and halfway["moment"]["epoch"] == 2
    assert set(halfway["variant"]) == set(name.split("+"))
    reason, _ = train(tmp_path / "parts", name, options_for(name), resume=True)
    single, parts = load_state(tmp_path / "whole"), load_state(tmp_path / "parts")
    assert reason == "epochs" and not differing(single["model"], parts["model"])
    assert single["variant"] == parts["variant"] and torch.equal(single["generator"], parts["generator"])


@pytest.fixture(scope="module")
def alone_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """The final weights of every combinable variant, trained alone."""
    folder = tmp_path_factory.mktemp("alone")
    names = sorted({part for pair in RESUMABLE for part in pair.split("+")})
    return {name: train(folder / name, name, options_for(name))[1] for name in names}


@pytest.mark.parametrize("pair", RESUMABLE[:-1])
def test_a_variant_that_does_nothing_leaves_the_other_as_it_is(
    pair: str, alone_weights: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    """`mixing+swap` without a swap that is due is `mixing`, with matrices that are not trained `swap`, and so on."""
    names = pair.split("+")
    count = 0
    for active, idle in (names, names[::-1]):
        if idle in IDLE:
            _, weights = train(tmp_path / active, pair, {**options_for(active), **IDLE[idle]})
            assert not differing(alone_weights[active], weights)
            new = {key: value for key, value in weights.items() if key not in alone_weights[active]}
            assert all(torch.equal(value, torch.eye(3).double()) for value in new.values())
            count += 1
    assert count


def test_every_variant_but_those_with_steps_of_their_own_can_be_idle() -> None:
    assert {part for pair in PAIRS for part in pair.split("+")} - set(IDLE) == {"mae"}


def test_a_chain_passes_on_every_hook() -> None:
    hooks = {name for name, value in vars(Variant).items() if callable(value) and not name.startswith("__")}
    assert hooks - {"Options"} <= set(vars(VariantChain))


@pytest.mark.parametrize("name", TOGETHER)
def test_options_of_all_are_accepted_and_checked(name: str) -> None:
    cls = find_variant(name)
    parts = [VARIANTS.get(part) for part in name.split("+")]
    assert {item.name for item in fields(cls.Options)} == {item.name for part in parts for item in fields(part.Options)}
    assert cls.name == name and all(part.summary in cls.summary for part in parts)


def test_every_variant_that_combines_is_interrupted() -> None:
    parts = {part for pair in PAIRS for part in pair.split("+")}
    assert {part for name in RESUMABLE for part in name.split("+")} == parts and set(RESUMABLE) <= set(TOGETHER)


def test_no_variant_has_an_option_that_all_have() -> None:
    shared = {item.name for item in fields(TrainConfig)}
    for _, cls in VARIANTS:
        assert not shared & {item.name for item in fields(cls.Options)}


PLUGIN_NAME = "sigmoid"
PLUGIN = Path(__file__).resolve().parents[1] / "plugin"


@pytest.fixture(params=["l0", "subset", PLUGIN_NAME])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """`sigmoid` is a learner of another package (tests/plugin)."""
    with register_plugin(LEARNERS, PLUGIN_NAME) if request.param == PLUGIN_NAME else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_words(tmp_path_factory.mktemp("words"), checkpoints.small())


def arguments(words: dict[str, Any], *more: object) -> list[str]:
    flags = [str(part) for key, value in words.items() if key != "checkpoint" for part in (f"--{key}", value)]
    quick = ["--updates", "2", "--device", "cpu", "--batch-tokens", "100"]
    return [*(flag.replace("_", "-") if flag.startswith("--") else flag for flag in flags), *quick, *map(str, more)]


def test_what_it_declares_is_read_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    LEARNERS.names()
    point = EntryPoint(name=PLUGIN_NAME, value="headscope_plugin.sigmoid", group="headscope.pruning.learners")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.syspath_prepend(str(PLUGIN))
    fresh: registry.Registry[Any] = registry.Registry("learner", package=LEARNERS.package, group=point.group)
    monkeypatch.setattr(learn, "LEARNERS", fresh)
    by_name = learners()
    assert not fresh.loaded_variants() and "headscope_plugin.sigmoid" not in sys.modules
    assert list(by_name) == ["l0", PLUGIN_NAME, "subset"] and by_name[PLUGIN_NAME].gate_lr == 0.05
    for name in ("l0", "subset"):
        source, cls = by_name[name], LEARNERS.get(name)
        assert (source.summary, source.__doc__, source.gate_lr) == (cls.summary, cls.__doc__, cls.gate_lr)
        assert [entry.name for entry in fields(source.Options)] == [entry.name for entry in fields(cls.Options)]


def test_a_command_learns_with_it(name: str, words: dict[str, Any], tmp_path: Path) -> None:
    help_text = CliRunner().invoke(app, ["prune", name, "--help-all"]).output
    assert "--keep" in help_text and "--gate-lr" in help_text and ("--lambda" in help_text) is (name == "l0")
    out = tmp_path / "run"
    command = ["prune", name, str(words["checkpoint"]), *arguments(words, "--keep", 5, "--out", out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    record = json.loads((out / "pruning.json").read_text(encoding="utf-8"))
    assert record["method"] == name == record["options"]["method"]["name"] and record["kept"] == 5
    assert record["learning"]["gate_lr"] == LEARNERS.get(name).gate_lr


def test_options_are_its_own() -> None:
    class Heir(LEARNERS.get("subset")):  # type: ignore[misc]
        name = "heir"

    with pytest.raises(ConfigError, match=r"'heir'.*Options"):
        learner(Heir)
    assert issubclass(Heir, GateLearner) and "heir" not in LEARNERS.names()
