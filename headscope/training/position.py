"""The position within a training run (epoch, update, tokens), its planned length, and the learning rate there.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headscope.training.config import TrainConfig


@dataclass(frozen=True)
class TrainingPosition:
    """How far training has come. Hooks of the first update of all see epoch 1, update 0, sentences 0.

    `epoch` counts from 1; `update` is how many optimizer updates are done, `update_in_epoch` how many of them
    in this epoch; `sentences` and `tokens` (target tokens, the closing one included) are what those updates
    have read, over all processes. `updates_planned` and `epochs_planned` are the length that the run was begun
    with, which schedules go by, None where there is no such limit; of the two at least one is known. A run that is
    resumed with other limits ends by these (`TrainConfig.updates`, `epochs`), and its plan stays as it was.
    """

    epoch: int = 1
    update: int = 0
    update_in_epoch: int = 0
    sentences: int = 0
    tokens: int = 0
    updates_planned: int | None = None
    epochs_planned: int | None = None
    updates_per_epoch: int | None = None

    @property
    def last_epoch(self) -> int:
        """The last epoch that has begun, 0 before the first update."""
        return self.epoch if self.update_in_epoch else self.epoch - 1

    @property
    def fraction(self) -> float:
        """The share of the planned run that is done, 0 to 1, by whichever limit is nearer; 1 beyond its end."""
        shares = [0.0]
        if self.updates_planned:
            shares.append(self.update / self.updates_planned)
        if self.epochs_planned:
            shares.append((self.epoch - 1 + self.share_of_epoch) / self.epochs_planned)
        return min(max(shares), 1.0)

    @property
    def planned_length(self) -> int | None:
        """Updates that were planned, by whichever limit is nearer; None before the first epoch where epochs say it."""
        return length(self.updates_planned, self.epochs_planned, self.updates_per_epoch)

    @property
    def share_of_epoch(self) -> float:
        """The share of this epoch that is done, 0 where the length of epochs is not known."""
        return self.update_in_epoch / self.updates_per_epoch if self.updates_per_epoch else 0.0


def length(updates: int | None, epochs: int | None, updates_per_epoch: int | None) -> int | None:
    """Updates after which the nearer of two limits is reached. Returns None if neither can be told in updates."""
    by_epochs = epochs * updates_per_epoch if epochs and updates_per_epoch else None
    limits = [limit for limit in (updates, by_epochs) if limit]
    return min(limits) if limits else None


Schedule = Callable[[TrainConfig, TrainingPosition], float]


def rate(config: TrainConfig, position: TrainingPosition) -> float:
    """The learning rate of the next update: from `warmup_lr` straight to `lr`, then by the schedule.

    The first update is one step above `warmup_lr`, and update number `warmup` has `lr`.
    """
    number = position.update + 1
    if number <= config.warmup:
        return config.warmup_lr + (config.lr - config.warmup_lr) * number / config.warmup
    return SCHEDULES[config.schedule](config, position)


def inverse_sqrt(config: TrainConfig, position: TrainingPosition) -> float:
    """lr · √(warmup / update) (Vaswani et al. 2017, §5.3, with the peak given)."""
    return config.lr * math.sqrt(max(config.warmup, 1) / (position.update + 1))


def cosine(config: TrainConfig, position: TrainingPosition) -> float:
    """Half a cosine from lr after the warm-up to min_lr at the planned end (Loshchilov & Hutter 2017, no restarts).

    Where a run is resumed to go on beyond that end, the rate stays at min_lr.
    """
    length = max((position.planned_length or math.inf) - config.warmup, 1)
    done = min((position.update + 1 - config.warmup) / length, 1.0)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * done)) / 2


SCHEDULES: Mapping[str, Schedule] = {
    "inverse-sqrt": inverse_sqrt,
    "cosine": cosine,
    "constant": lambda config, position: config.lr,
}
