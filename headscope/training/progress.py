"""Running values of a training run: the best validation, patience, kept weights, sums since the last logged line."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headscope.training.losses.cross_entropy import Sums


@dataclass
class Progress:
    """Plain numbers, saved with the training state.

    `best` is the best value so far (lower is better: BLEU is kept negated) at update `best_update`; `since_best`
    counts validations after it, `validations` all of them. `kept` are updates whose weights are kept for the
    average, `values` their values; `nll` and `bleu` are the last validation's. `window` sums what was trained since
    the last line of metrics.csv.
    """

    best: float | None = None
    best_update: int = 0
    since_best: int = 0
    validations: int = 0
    kept: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    nll: float | None = None
    bleu: float | None = None
    window: Sums = Sums()  # noqa: RUF009 — a tuple
    seconds: float = 0.0
    latest: dict[str, float] = field(default_factory=dict)

    def validated(self, value: float, update: int) -> bool:
        """Note a validation; whether it is the best so far."""
        self.validations += 1
        better = self.best is None or value < self.best
        if better:
            self.best, self.best_update, self.since_best = value, update, 0
        else:
            self.since_best += 1
        return better

    def keep(self, value: float, update: int, *, count: int, best: bool) -> bool:
        """Whether the weights of this update belong to the average, of the last or the best `count`."""
        entries = [*zip(self.values, self.kept, strict=True), (value, update)]
        order = sorted(entries) if best else sorted(entries, key=lambda entry: -entry[1])
        kept = sorted(order[:count], key=lambda entry: entry[1])
        self.values, self.kept = [entry[0] for entry in kept], [entry[1] for entry in kept]
        return update in self.kept

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"window": list(self.window)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Progress:
        """Inverse of `plain`."""
        known = {entry.name: values[entry.name] for entry in fields(cls) if entry.name in values}
        return cls(**known | {"window": Sums(*values["window"])})
