"""A variant of training with an option of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headscope.config import option
from headscope.training.variant import Variant, variant


@dataclass(frozen=True)
class Options:
    """How patient it is."""

    patient_for: int = option(3, "Updates that are counted.")


@variant
class Patient(Variant):
    """Counts its updates."""

    name = "patient"
    summary = "Counts the first updates of a run."
    Options = Options
    count = 0

    def after_update(self, run: Any, position: Any) -> None:
        self.count = min(position.update, self.options.patient_for)

    def history(self, run: Any) -> dict[str, float]:
        return {"patient": float(self.count)}
