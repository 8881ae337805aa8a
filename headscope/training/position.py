"""The position within a training run (epoch, update, tokens) and its planned length; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingPosition:
    """How far training has come. Hooks of the first update of all see epoch 1, update 0, sentences 0.

    `epoch` counts from 1; `update` is how many optimizer updates are done, `update_in_epoch` how many of them
    in this epoch; `sentences` and `tokens` (target tokens, the closing one included) are what those updates
    have read, over all processes. `updates_planned` and `epochs_planned` are the length that the run was begun
    with, which schedules go by, None where there is no such limit; of the two at least one is known. A run that is
    resumed with other limits ends by these (`TrainConfig.max_updates`, `epochs`), and its plan stays as it was.
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
            shares.append((self.epoch - 1 + self.within_epoch) / self.epochs_planned)
        return min(max(shares), 1.0)

    @property
    def planned_length(self) -> int | None:
        """Updates that were planned, by whichever limit is nearer; None before the first epoch where epochs say it."""
        return length(self.updates_planned, self.epochs_planned, self.updates_per_epoch)

    @property
    def within_epoch(self) -> float:
        """The share of this epoch that is done, 0 where the length of epochs is not known."""
        return self.update_in_epoch / self.updates_per_epoch if self.updates_per_epoch else 0.0


def length(updates: int | None, epochs: int | None, updates_per_epoch: int | None) -> int | None:
    """Updates after which the nearer of two limits is reached; None where neither can be told in updates."""
    by_epochs = epochs * updates_per_epoch if epochs and updates_per_epoch else None
    limits = [limit for limit in (updates, by_epochs) if limit]
    return min(limits) if limits else None
