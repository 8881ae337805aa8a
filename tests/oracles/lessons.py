"""Runs of a tiny model on a made-up parallel text, update by update, for tests of training variants."""

import os
import random
import signal
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headscope.config.option import make_config
from headscope.data.encoded import Batch
from headscope.progress import Step
from headscope.results.training import Training
from headscope.training.config import TrainConfig
from headscope.training.prepare import collate, epoch_plan
from headscope.training.run_state import TrainingRun
from headscope.training.trainer import make_run, train
from headscope.training.variant import find_variant
from tests.makers.shared import write_lines

SIZES: dict[str, Any] = {
    "encoder_layers": 1, "decoder_layers": 2, "d_model": 12, "d_ffn": 17, "heads": 3, "vocab_size": 60,
    "max_tokens": 60, "warmup": 3, "lr": 0.01, "dropout": 0.1, "device": "cpu", "beam": 1, "bleu_every": 0,
}  # fmt: skip


def texts(folder: Path, *, lines: int = 40) -> dict[str, Any]:
    """A parallel text of short lines and its first sixth again for validation."""
    chance = random.Random(0)
    words = ["lo", "mira", "tek", "sun", "apo", "vel", "kor", "dim", "ras", "ney"]
    options: dict[str, Any] = {}
    for name, count in (("", lines), ("valid_", lines // 6)):
        chance.seed(0)
        sentences = [" ".join(chance.choices(words, k=chance.randint(2, 9))) for _ in range(count)]
        for side, text in (("source", sentences), ("target", [" ".join(reversed(line.split())) for line in sentences])):
            options[name + side] = write_lines(folder / f"{name}{side}.txt", text)
    return options


def config(folder: Path, **options: Any) -> TrainConfig:
    """Options of a tiny run in `folder`."""
    settings = SIZES | {"precision": "float64", "max_epochs": 6, "out": folder / "run"} | options
    return make_config(TrainConfig, {**texts(folder), **settings})


def begin(folder: Path, name: str, *, shared: dict[str, Any] | None = None, **options: Any) -> TrainingRun:
    """A run of a variant, or of several (`mixing+swap`), that has done nothing yet."""
    cls = find_variant(name)
    return make_run(config(folder, **(shared or {})), cls(cls.Options(**options)))


def run_variant(folder: Path, name: str = "baseline", options: dict[str, Any] | None = None, **shared: Any) -> Training:
    """Train a variant; `shared`: options of all variants, and arguments of `train`."""
    cls = find_variant(name)
    train_options = {key: shared.pop(key) for key in ("resume", "progress", "remark") if key in shared}
    return train(config(folder, **shared), cls(cls.Options(**(options or {}))), **train_options)


def next_batch(run: TrainingRun) -> list[Batch]:
    """The micro-batch of the next update."""
    position = run.position
    groups = epoch_plan(run.data.train, tokens=run.config.max_tokens, seed=run.config.seed, epoch=position.epoch)
    return [collate(run.data.train, groups[position.update_in_epoch % len(groups)]).to(run.device)]


@dataclass
class StopsAfter:
    """A display of progress that presses Ctrl-C after an update."""

    update: int
    updates: int = 0

    def __call__(self, title: str, total: int | None, *, unit: str) -> AbstractContextManager[Step]:
        return nullcontext(self.step)

    def step(self, count: int, note: str) -> None:
        self.updates += count
        if self.updates == self.update:
            os.kill(os.getpid(), signal.SIGINT)


def variant(run: TrainingRun) -> Any:
    """The variant of a run, with the hooks and attributes that the run itself does not ask for."""
    return run.variant


def updates(run: TrainingRun, count: int = 1) -> None:
    """So many updates, hooks included, within one epoch."""
    for _ in range(count):
        variant(run).before_update(run, run.position)
        sums, _ = run.update(next_batch(run))
        position = run.position
        run.position = replace(
            position,
            update=position.update + 1,
            update_in_epoch=position.update_in_epoch + 1,
            sentences=position.sentences + sums.sentences,
        )
        variant(run).after_update(run, run.position)


def weights(run: TrainingRun) -> dict[str, Tensor]:
    """A copy of everything in the model's state dict."""
    return {key: value.detach().clone() for key, value in run.model.state_dict().items()}
