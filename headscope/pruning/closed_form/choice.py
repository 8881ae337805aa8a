"""Which compensation is taken: the one that harms least, on the worse of two texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headscope.pruning.closed_form.damage import Performance
from headscope.pruning.options.refit import RefitOptions, anchor_name, in_turn

SMALLEST = 1e-12
"""A damage below this is none."""


@dataclass(frozen=True)
class Candidate:
    """A compensation, and what a model with it does on held-out text and on a second text.

    Where it was measured on a few lines of both texts only, `first` are the masked heads on the same lines.
    """

    options: RefitOptions
    held_out: Performance
    check: Performance
    first: Candidate | None = None

    @property
    def name(self) -> str:
        """`least-squares, sequential, anchor mixed, damping 0.1`."""
        anchor = anchor_name(self.options.anchor)
        refits = self.options.method == "least-squares"
        how = in_turn(self.options) + [f"anchor {anchor}"] * bool(anchor)
        return ", ".join([self.options.method, *how, *([f"damping {self.options.damping:g}"] if refits else [])])

    @property
    def remark(self) -> str:
        """On how many lines it was measured, if not on all."""
        if self.first is None:
            return ""
        return f"{self.held_out.sentences} and {self.check.sentences} lines"

    def harms(self, masked: Candidate) -> tuple[float, float]:
        """Its damage on both texts as shares of that of the masked heads, on the lines that it was measured on."""
        masked = self.first or masked
        return (share(self.held_out.damage, masked.held_out.damage), share(self.check.damage, masked.check.damage))


@dataclass(frozen=True)
class Choice:
    """The candidates that were compared, "none" first, and the one that was taken; `text` is the second text."""

    candidates: Sequence[Candidate]
    taken: Candidate
    text: str
    sentences: int

    @property
    def masked(self) -> Candidate:
        """Heads that are only masked."""
        return self.candidates[0]

    @property
    def warning(self) -> str:
        """What is said where the one that was taken is worse than masking on the second text."""
        refitted, masked = self.taken.check, self.masked.check
        if refitted.damage <= masked.damage:
            return ""
        return (
            f"{self.taken.name} is worse than masking on other text: {refitted.objective} {refitted.value:.4f} against "
            f"{masked.value:.4f} on {self.sentences} sentences ({self.text}); --compensate auto takes what harms least"
        )

    def record(self) -> dict[str, Any]:
        """What `pruning.json` says of it; the harm of masking is 1 on both texts."""
        return {
            "text": self.text,
            "sentences": self.sentences,
            "objective": self.masked.check.objective,
            "taken": self.taken.name,
            "candidates": [_row(candidate, self.masked) for candidate in self.candidates],
        }


def _row(candidate: Candidate, masked: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "remark": candidate.remark,
        **{
            text: {"value": measured.value, "damage": measured.damage, "harm": harm}
            for text, measured, harm in zip(
                ("held_out", "check"), (candidate.held_out, candidate.check), candidate.harms(masked), strict=True
            )
        },
    }


def share(damage: float, masked: float) -> float:
    """A damage as a share of that of masked heads: 1 where it is the same, also where masking is no damage."""
    if masked > SMALLEST:
        return damage / masked
    return 1 + (damage - masked) / max(abs(masked), SMALLEST)


def least_harm(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate whose harm on the worse of both texts is least; the first of them is that of masked heads.

    Masking harms both texts by 1, so what is taken is worse than masking on neither.
    """
    return min(candidates, key=lambda each: max(each.harms(candidates[0])))
