"""What a step costs in each arm: CPU time of the same updates, the arms one after the other in every round."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from variants.design import Arm, swap_schedule
from variants.runs import Setting, train_config

from headscope.files.writing import write_json
from headscope.progress import Step
from headscope.training.trainer import train
from headscope.training.variant import VARIANTS

SENTENCES, EPOCHS, WARM = 800, 4, 5  # swaps and G steps come by epoch, so there are some; updates not counted


def measure_costs(setting: Setting, arms: Sequence[Arm], *, rounds: int, folder: Path) -> Iterator[Mapping[str, Any]]:
    """Rows of cost.csv: round, arm, mean CPU seconds of an update."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "swaps.json", swap_schedule(EPOCHS + 1))
    for number in range(rounds):
        for arm in arms:
            yield {"round": number, "arm": arm.name, "seconds": seconds_of_step(setting, arm, folder / "run", number)}


def seconds_of_step(setting: Setting, arm: Arm, out: Path, seed: int) -> float:
    """Mean CPU time of an update of a short run, without its first ones, preparation and validation."""
    shutil.rmtree(out, ignore_errors=True)
    stopwatch = Stopwatch()
    options = {**arm.options}
    if "swap_schedule" in options:
        options["swap_schedule"] = out.parent / "swaps.json"
    changes: dict[str, Any] = {"max_sentences": SENTENCES, "max_epochs": EPOCHS + 1, "vocab_size": 2000}
    config = train_config(setting, arm, seed, out=out, **changes)
    cls = VARIANTS.get(arm.variant)
    train(config, cls(cls.Options(**options)), progress=stopwatch)
    shutil.rmtree(out)
    return statistics.fmean(stopwatch.steps[WARM:])


class Stopwatch:
    """CPU seconds between the ends of updates, as a display of progress; those with a validation are left out."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.last: float | None = None
        self.valid = ""

    def __call__(self, title: str, total: int | None, *, unit: str) -> AbstractContextManager[Step]:
        """Begins to measure."""
        return nullcontext(self.step)

    def step(self, count: int, note: str) -> None:
        """The end of an update."""
        seconds, valid = time.process_time(), note.partition("valid")[2]
        if self.last is not None and valid == self.valid:
            self.steps.append(seconds - self.last)
        self.last, self.valid = seconds, valid
