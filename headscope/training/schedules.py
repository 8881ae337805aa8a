"""Learning rates by update, named."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from headscope.training.config import TrainConfig
from headscope.training.position import TrainingPosition

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


def constant(config: TrainConfig, position: TrainingPosition) -> float:
    """lr."""
    return config.lr


SCHEDULES: Mapping[str, Schedule] = {"inverse-sqrt": inverse_sqrt, "cosine": cosine, "constant": constant}
