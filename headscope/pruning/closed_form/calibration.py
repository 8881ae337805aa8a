"""Calibration of a removal: the text that W_O is refitted on, the text held out, and what a refit has done there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headscope.data.corpus import Corpus
from headscope.errors import DataError
from headscope.formats.base import Checkpoint
from headscope.pruning.closed_form.choice import Choice
from headscope.pruning.closed_form.compensate import ModuleRefit
from headscope.pruning.closed_form.damage import Performance
from headscope.pruning.options.refit import Refit, anchor_name, check_texts, in_turn

FEWEST = 8
"""Sentences that a refit needs at least."""
HELD_OUT = 200
"""Sentences that are held out of the calibration text at most; a fifth of it, where that is less."""


@dataclass(frozen=True)
class CalibrationText:
    """What is calibrated on, and other text to measure on."""

    calibration: Corpus
    held_out: Corpus


def calibration_text(options: Refit, corpus: Corpus | None, valid: Corpus | None) -> CalibrationText | None:
    """The texts of a calibration; None where nothing is to be refitted nor measured.

    ConfigError where a text is missing, DataError where it is too short.
    """
    check_texts(options, has_text=corpus is not None)
    if corpus is None or (options.method == "none" and valid is None):
        return None
    return split_text(corpus, valid, sentences=options.sentences)


def split_text(corpus: Corpus, valid: Corpus | None, *, sentences: int) -> CalibrationText:
    """The first `sentences` of a corpus to calibrate on; `valid` is held out, else the last fifth, at most 200.

    DataError where fewer than 8 are left to calibrate on.
    """
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
    """A checkpoint whose output projections make up for `heads` that are masked, of the same size.

    `options` are those of the compensation that was taken. `refits` has every module that changed, `performance` the
    objective on held-out text of the intact model, with the heads masked or key/value groups merged ("removed"), and
    "refitted". `choice` has the same on a second text, of all that was compared; None where nothing was refitted.
    `seconds` are those of moments and refits; `anchor_digest` is that of an anchor that is a text of the user's.
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
        return {
            "method": self.options.method,
            "damping": self.options.damping,
            "anchor": anchor_name(self.options.anchor) or "none",
            "sequential": self.options.sequential,
            "feed_forward": self.options.feed_forward,
            "calibration": {"text": self.text.calibration.name, "sentences": self.text.calibration.count},
            "held_out": {"text": self.text.held_out.name, "sentences": self.text.held_out.count},
            "performance": {name: asdict(performance) for name, performance in self.performance.items()},
            "choice": None if self.choice is None else self.choice.record(),
            "modules": [_module_record(refit) for refit in self.refits],
            "seconds": round(self.seconds, 3),
        }

    def signature(self) -> dict[str, str]:
        """What of it shapes the weights, for the signature of a removal."""
        if self.options.method == "none":
            return {}
        text = self.text.calibration
        anchor = anchor_name(self.options.anchor)
        how = in_turn(self.options) + [f"anchor={anchor}{self.anchor_digest[:8]}"] * bool(anchor)
        return {
            "compensate": "-".join([self.options.method, *how]),
            "damping": f"{self.options.damping:g}",
            "calibration": f"{text.digest[:8]}x{text.count}",
        }

    def remarks(self) -> list[str]:
        """What the user should know of how modules were refitted."""
        linear = [refit for refit in self.refits if not refit.affine]
        raised = [refit for refit in self.refits if refit.refit.raised]
        unfollowed = [refit for refit in self.refits if self.options.sequential and not refit.residual]
        remarks = [self.choice.warning] if self.choice is not None and self.choice.warning else []
        if unfollowed:
            remarks.append(
                f"{len(unfollowed)} of {len(self.refits)} attention modules are refitted to their own outputs only: "
                "something else than an addition to the residual stream reads these first"
            )
        if linear and self.options.method == "least-squares":
            remarks.append(
                f"{len(linear)} of {len(self.refits)} output projections have no bias, and this export adds none: "
                "their refit is linear"
            )
        if raised:
            most = max(refit.refit.raised for refit in raised)
            remarks.append(
                f"second moments of {len(raised)} modules are singular (fewer tokens than columns, or heads that write "
                f"nothing): damping was raised up to 10^{most} times"
            )
        return remarks


def _module_record(refit: ModuleRefit) -> dict[str, Any]:
    return {
        "module": refit.projection.owner,
        "layers": [f"{site}.{layer}" for site, layer in refit.projection.places],
        "affine": refit.affine,
        "residual": refit.residual,
        "error": refit.error,
        "error_without": refit.error_without,
        "lambda": refit.refit.damping,
        "raised": refit.refit.raised,
    }
