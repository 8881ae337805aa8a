"""How output projections are refitted in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headscope.errors import ConfigError
from headscope.registry import unknown

COMPENSATIONS = ("none", "mean", "least-squares")
DAMPING = 1e-4
"""λ as a share of the mean of the diagonal of second moments."""


@dataclass(frozen=True, kw_only=True)
class RefitOptions:
    """How output projections are refitted: `method` is one of `COMPENSATIONS`, λ a share of the mean second moment.

    `damping` is that share. `add_bias`: an output projection without a bias gets one; else its refit is linear.
    `sequential`: module after module (see `sequential`), for least squares only. ConfigError for a method that there is
    not.
    """

    method: str = "least-squares"
    damping: float = DAMPING
    add_bias: bool = False
    sequential: bool = False

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if self.method not in COMPENSATIONS:
            raise ConfigError(unknown("compensation", self.method, list(COMPENSATIONS)))
        if self.sequential and self.method != "least-squares":
            raise ConfigError(f"--sequential is for --compensate least-squares, not {self.method}")

    @property
    def name(self) -> str:
        """For signatures."""
        return f"{self.method}{'-sequential' if self.sequential else ''}"


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How the heads that stay make up for those that go: `compensate` is "none", "mean" or "least-squares".

    `damping` is λ as a share of the mean second moment of the contexts. `sentences` of the text are calibrated on.
    `sequential`: module after module, for the contexts and the residual stream of the model that is pruned so far.
    `objective` is what held-out text is measured by (empty: what fits the model).
    ConfigError for an unknown compensation, a negative damping, and for options that this compensation does not have.
    """

    compensate: str = "none"
    damping: float = DAMPING
    sentences: int = 1000
    sequential: bool = False
    objective: str = ""

    def __post_init__(self) -> None:
        RefitOptions(method=self.compensate, damping=self.damping)
        if self.sentences < 1:
            raise ConfigError(f"--calibration-sentences {self.sentences}: at least 1 is needed")
        for name, is_given in (("--damping", self.damping != DAMPING), ("--sequential", self.sequential)):
            if is_given and self.compensate != "least-squares":
                raise ConfigError(f"{name} is for --compensate least-squares, not {self.compensate}")


def check_texts(options: CalibrationOptions, *, has_text: bool) -> None:
    """ConfigError where the text is missing that a calibration needs."""
    if not has_text and options.compensate != "none":
        what = f"--compensate {options.compensate}"
        raise ConfigError(f"{what} measures contexts on text: give --source FILE, and --target for translation")


def check_damping(share: float) -> None:
    """ConfigError for a damping that is negative or not finite."""
    if not 0 <= share < math.inf:
        raise ConfigError(f"--damping {share:g}: a share of the mean second moment, at least 0 and finite")
