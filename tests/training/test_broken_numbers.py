"""Losses and gradients that are no numbers: where training stops, what it says, and what it leaves behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.errors import TrainingError
from headscope.formats.base import open_checkpoint
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.learning.examples import TrainingExamples
from headscope.pruning.learning.finetuning import Recipe, Tuner
from headscope.pruning.learning.learners.l0 import L0, L0Options
from headscope.training import checkpoints
from headscope.training.run_state import MIN_SCALE, TrainingRun
from headscope.training.trainer import make_run, train
from headscope.training.variant import VARIANTS, Variant
from tests.oracles import lessons, speakers
from tests.oracles.swaps import differing

GATE = ".mixing.gate."


def tuning(folder: Path, *, tune: str = "gates", scale: float = 2.0**16) -> TrainingRun:
    """A run that tunes the gates of a mixture, with a scaled loss as fp16 has it."""
    first = lessons.begin(folder / "a", "mae", gate_hidden=7)
    checkpoints.save(first, "last")
    cls = VARIANTS.get("mae")
    config = lessons.config(folder, init=str(folder / "a" / "run" / "last"), dropout=0.0, precision="float32")
    run = make_run(config, cls(cls.Options(tune=tune, gate_dropout=0.0)))
    run.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return run


def overflowing(run: TrainingRun, *, times: int) -> None:
    """The first gradients of a gate are infinite."""
    remaining = [times]

    def hook(slope: torch.Tensor) -> torch.Tensor:
        remaining[0] -= 1
        return slope if remaining[0] < 0 else torch.full_like(slope, float("inf"))

    lessons.variant(run).gates[-1].register_hook(hook)


def changed_gates(run: TrainingRun, before: dict[str, torch.Tensor]) -> set[str]:
    """Parameters of gates that have changed; statistics of batch norm are of forward passes."""
    return {name for name in differing(before, lessons.weights(run)) if GATE in name and "running" not in name}


@pytest.mark.parametrize("tune", ["gates", "gates+output"])
def test_gates_are_tuned_alike_with_a_scaled_loss(tune: str, tmp_path: Path) -> None:
    """With `--tune gates` the main optimizer has nothing to step, which GradScaler does not take."""
    weights = []
    for scale in (1.0, 2.0**16):
        run = tuning(tmp_path / f"{scale}", tune=tune, scale=scale)
        before = lessons.weights(run)
        lessons.updates(run, 3)
        weights.append(lessons.weights(run))
        names = differing(before, weights[-1])
        assert lessons.variant(run).history(run)["gate_steps"] == 3 and any(GATE in name for name in names)
        assert any("output" in name and GATE not in name for name in names) is (tune == "gates+output")
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tune", ["gates", "gates+output"])
def test_a_g_step_that_overflows_lowers_the_scale(tune: str, tmp_path: Path) -> None:
    run = tuning(tmp_path, tune=tune)
    overflowing(run, times=2)
    before = lessons.weights(run)
    lessons.updates(run, 2)
    assert not changed_gates(run, before)
    assert run.scaler.get_scale() == 2.0**14
    lessons.updates(run)
    assert lessons.variant(run).history(run)["gate_steps"] == 1
    assert changed_gates(run, before)


def test_gradients_that_overflow_at_every_scale_stop_the_run(tmp_path: Path) -> None:
    """They would otherwise be left out update after update, and nothing would be learnt."""
    run = tuning(tmp_path, scale=3 * MIN_SCALE)
    overflowing(run, times=99)
    with pytest.raises(TrainingError, match=r"7\.5e-05.*2.*--precision bf16$"):
        lessons.updates(run, 9)


class Breaks(Variant):
    name, summary = "breaks", "Makes the loss no number in the update that it is told."
    update = 0

    def extra_loss(self, run: TrainingRun, batch: Any) -> torch.Tensor | None:
        return torch.tensor(float("nan")) if run.position.update == self.update else None


@pytest.mark.parametrize(
    ("update", "note"), [(0, "no checkpoint was written before it"), (3, "last is from before it")]
)
def test_a_stopped_run_says_so(update: int, note: str, tmp_path: Path) -> None:
    variant = Breaks(Breaks.Options())
    variant.update = update
    with pytest.raises(TrainingError, match=rf"nan.*{update + 1} \(epoch 1, batch {update + 1}") as error:
        train(lessons.config(tmp_path, precision="float32", validate_every=2), variant)
    assert f"{note}; take a lower --lr" in str(error.value)
    assert not update or open_checkpoint(str(tmp_path / "run" / "last"), device="cpu"), "its weights are finite"
    about = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert about["status"] == "failed" and about["error"] == str(error.value)


@pytest.mark.parametrize(
    ("part", "tunes_model", "learns", "clip", "advice"),
    [
        ("model", True, False, 1.0, "--lr"),
        ("model", True, False, 0.0, "--lr"),
        ("model", True, True, 1.0, "--lr.*--gate-lr"),
        ("gates", False, True, 1.0, "--gate-lr"),
    ],
)
def test_fine_tuning_stops_at_a_gradient_that_is_no_number(
    part: str, tunes_model: bool, learns: bool, clip: float, advice: str
) -> None:
    """In the last update nothing would come after it to notice."""
    ckpt = speakers.checkpoint("native-pre")
    learner = L0(
        GateLayout(ckpt.attention_sites), L0Options(strength=0.1), updates=1, generator=torch.Generator().manual_seed(7)
    )
    parameters = [p for p in ckpt.model.parameters() if p.is_floating_point()] if tunes_model else []
    broken = learner.weights if part == "gates" else parameters[-1]
    hook = broken.register_hook(lambda slope: torch.full_like(slope, float("nan")))
    data = TrainingExamples(ckpt, speakers.corpus("native-pre"), limit=60)
    recipe = Recipe(updates=1, lr=0.1, clip=clip)
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(TrainingError, match=f"nan.*1.*{advice}$"):
        Tuner(ckpt, data, recipe, parameters, learner if learns else None).run()
    hook.remove()
    assert all(torch.equal(p, start) for p, start in zip(parameters, before, strict=True))
