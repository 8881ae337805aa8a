"""Calibration of a removal: the text that W_O is refitted on, the text held out, and what a refit has done there.

Of several compensations the one is taken that harms least, on the worse of two texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headscope.data.corpus import Corpus, line_digests
from headscope.errors import DataError, flag
from headscope.formats.base import Checkpoint
from headscope.pruning.closed_form.compensate import ModuleRefit
from headscope.pruning.closed_form.damage import Performance
from headscope.pruning.options.shared import Refit, anchor_name, stage_parts, strength_part

FEWEST = 8
"""Sentences that a refit needs at least."""
HELD_OUT = 200
"""Sentences that are held out of the calibration text at most; a fifth of it, where that is less."""


@dataclass(frozen=True)
class CalibrationText:
    """What is calibrated on, and other text to measure on."""

    calibration: Corpus
    held_out: Corpus


def split_text(corpus: Corpus, valid: Corpus | None, *, sentences: int) -> CalibrationText:
    """The first `sentences` of a corpus to calibrate on; `valid` is held out, else the last fifth, at most 200."""
    held_out = min(HELD_OUT, corpus.count // 5) if valid is None else 0
    calibration = corpus.first(min(sentences, corpus.count - held_out))
    if calibration.count < FEWEST:
        raise DataError(
            f"too few to refit output projections on: {calibration.count} of {corpus.name}, {held_out} more held out; "
            f"at least {FEWEST} sentences are needed, a few hundred are usual"
        )
    return CalibrationText(calibration, corpus.after(corpus.count - held_out) if valid is None else valid)


@dataclass(frozen=True)
class Compensated:
    """A checkpoint of the same size whose output projections make up for `heads` that are masked.

    `refits` has every module that changed, `performance` the objective on held-out text of the "intact", the "removed"
    and the "refitted" model. `choice` compares on a second text too; None where nothing was refitted.
    """

    checkpoint: Checkpoint
    options: Refit
    text: CalibrationText
    refits: Sequence[ModuleRefit]
    performance: dict[str, Performance]
    seconds: float
    choice: Choice | None = None
    anchor_digest: str = ""

    def record(self) -> dict[str, Any]:
        """What `pruning.json` says of it; errors are shares of the energy of a module's output."""
        chose = self.choice is not None and len(self.choice.candidates) > 2  # one refit beside masking is no choice
        return {
            "method": self.options.method,
            "damping": self.options.share,
            "anchor": anchor_name(self.options.anchor) or "none",
            "sequential": self.options.sequential,
            "feed_forward": self.options.feed_forward,
            "strength": self.options.strength,
            "calibration": {"text": self.text.calibration.name, "sentences": self.text.calibration.count},
            "held_out": {"text": self.text.held_out.name, "sentences": self.text.held_out.count},
            "lines": line_digests(self.text.calibration, *([self.text.held_out] if chose else [])),
            "performance": {name: asdict(performance) for name, performance in self.performance.items()},
            "choice": None if self.choice is None else self.choice.record(),
            "modules": [
                {
                    "module": refit.projection.owner,
                    "layers": [f"{site}.{layer}" for site, layer in refit.projection.places],
                    **{name: getattr(refit, name) for name in ("affine", "residual", "error", "error_without")},
                    "lambda": refit.refit.damping,
                    "raised": refit.refit.times_raised,
                }
                for refit in self.refits
            ],
            "seconds": round(self.seconds, 3),
        }

    def signature(self) -> dict[str, str]:
        """What of it shapes the weights, for the signature of a removal."""
        if self.options.method == "none":
            return {}
        text = self.text.calibration
        anchor = anchor_name(self.options.anchor)
        how = stage_parts(self.options) + [f"anchor={anchor}{self.anchor_digest[:8]}"] * bool(anchor)
        how += strength_part(self.options)
        return {
            "compensate": "-".join([self.options.method, *how]),
            "damping": f"{self.options.share:g}",
            "calibration": f"{text.digest[:8]}x{text.count}",
        }

    def remarks(self) -> list[str]:
        """What the user should know of how modules were refitted."""
        linear = [refit for refit in self.refits if not refit.affine]
        with_damping = [refit for refit in self.refits if refit.refit.times_raised]
        own_only = [refit for refit in self.refits if self.options.sequential and not refit.residual]
        remarks = [self.choice.warning] if self.choice is not None and self.choice.warning else []
        if own_only:
            remarks.append(
                f"{len(own_only)} of {len(self.refits)} attention modules are refitted to their own outputs only: "
                "something else than an addition to the residual stream reads these first"
            )
        if linear and self.options.method == "least-squares":
            remarks.append(
                f"{len(linear)} of {len(self.refits)} output projections have no bias, and this export adds none: "
                "their refit is linear"
            )
        if with_damping:
            powers = max(refit.refit.times_raised for refit in with_damping)
            remarks.append(
                f"second moments of {len(with_damping)} modules are singular (fewer tokens than columns, or heads that "
                f"write nothing): damping was raised up to 10^{powers} times"
            )
        return remarks


SMALLEST = 1e-12
"""A damage below this is none."""


@dataclass(frozen=True)
class Candidate:
    """A compensation, and what a model with it does on held-out text and on a second text."""

    options: Refit
    held_out: Performance
    check: Performance

    @property
    def name(self) -> str:
        """`least-squares, sequential, anchor mixed, damping 0.1, strength 0.5`."""
        anchor = anchor_name(self.options.anchor)
        refits = self.options.method == "least-squares"
        how = stage_parts(self.options) + [f"anchor {anchor}"] * bool(anchor)
        how += [f"damping {self.options.share:g}"] * refits + strength_part(self.options, " ")
        return ", ".join([self.options.method, *how])

    def gains_on(self, other: Candidate) -> bool:
        """Whether it does less damage than another on both texts."""
        return self.held_out.damage < other.held_out.damage and self.check.damage < other.check.damage

    def harms(self, masked: Candidate) -> tuple[float, float]:
        """Its damage on both texts as shares of that of the masked heads; 0 where neither is worse than intact."""
        return (share(self.held_out.damage, masked.held_out.damage), share(self.check.damage, masked.check.damage))

    def record(self, masked: Candidate) -> dict[str, Any]:
        """What `pruning.json` says of it."""
        record: dict[str, Any] = {"name": self.name}
        for text, harm in zip(("held_out", "check"), self.harms(masked), strict=True):
            performance: Performance = getattr(self, text)
            record[text] = {"value": performance.value, "damage": performance.damage, "harm": harm}
        return record


@dataclass(frozen=True)
class Choice:
    """The candidates that were compared, "none" (called `without`) first, and the one that was taken."""

    candidates: Sequence[Candidate]
    best: Candidate
    text: str
    sentences: int
    baseline: str = "masking"

    @property
    def masked(self) -> Candidate:
        """Heads that are only masked."""
        return self.candidates[0]

    @property
    def warning(self) -> str:
        """What is said where the one taken is worse on the second text than masking and than the intact model."""
        refit_check, masked = self.best.check, self.masked.check
        if self.best.harms(self.masked)[1] <= 1:
            return ""
        return (
            f"{self.best.name} is worse than {self.baseline} on other text: {refit_check.objective} "
            f"{refit_check.value:.4f} against {masked.value:.4f} on {self.sentences} sentences ({self.text}); "
            f"{flag.compensate} auto takes what harms least"
        )

    def record(self) -> dict[str, Any]:
        """What `pruning.json` says of it; the harm of masking is 1, or 0 where it costs nothing."""
        return {
            "text": self.text,
            "sentences": self.sentences,
            "objective": self.masked.check.objective,
            "taken": self.best.name,
            "candidates": [candidate.record(self.masked) for candidate in self.candidates],
        }


def share(damage: float, masked: float) -> float:
    """A damage as a share of that of masked heads: 0 where both gain, more than 1 where only masking gains."""
    if masked > SMALLEST:
        return damage / masked
    if damage <= SMALLEST:
        return 0.0
    return 1 + (damage - masked) / max(abs(masked), SMALLEST)


def best_candidate(candidates: Iterable[Candidate], masked: Candidate) -> Candidate:
    """The candidate whose harm on the worse of both texts is least; of several the one of the least damage on both.

    A harm of masking is 1 at most, so what masking gains on one text is no reason to leave the other as it is.
    """
    return min(candidates, key=lambda one: (max(one.harms(masked)), one.held_out.damage + one.check.damage))
