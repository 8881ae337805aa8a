"""How output projections are refitted in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

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
class Refit:
    """How the heads that stay make up for those that go: `method` is "least-squares", "mean" or "none".

    `damping` is λ as a share of the mean second moment of the contexts. `sentences` of the text are calibrated on.
    `sequential`: module after module, for the contexts and the residual stream of the model that is pruned so far.
    `objective` is what held-out text is measured by (empty: what fits the model).
    ConfigError for values of a wrong type, an unknown method, a negative damping, and options that a method lacks.
    """

    method: str = "least-squares"
    damping: float = DAMPING
    sentences: int = 1000
    sequential: bool = False
    objective: str = ""

    def __post_init__(self) -> None:
        for name, (kind, words) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                raise ConfigError(f"{name}={value!r:.60} is of the wrong type; give {words}")
        check_refit(self.method, damping=self.damping, sentences=self.sentences, sequential=self.sequential)


_KINDS: dict[str, tuple[type, str]] = {
    "method": (str, "a string"),
    "damping": (Real, "a number"),
    "sentences": (Integral, "a whole number"),
    "sequential": (bool, "True or False"),
    "objective": (str, "a string"),
}


def check_refit(
    method: str, *, damping: float, sentences: int, sequential: bool, names: tuple[str, ...] = tuple(_KINDS)
) -> None:
    """ConfigError for options of a removal's refit that are out of bounds or do not fit `method`.

    `names` are what the caller has for method, damping, sentences and sequential.
    """
    RefitOptions(method=method)
    check_damping(damping, name=names[1])
    if sentences < 1:
        raise ConfigError(f"{names[2]} {sentences}: at least 1 is needed")
    for name, is_given in ((names[1], damping != DAMPING), (names[3], sequential)):
        if is_given and method != "least-squares":
            raise ConfigError(f"{name} is for {names[0]} least-squares, not {method}")


def check_texts(options: Refit, *, has_text: bool) -> None:
    """ConfigError where the text is missing that a calibration needs."""
    if not has_text and options.method != "none":
        what = f"--compensate {options.method}"
        raise ConfigError(f"{what} measures contexts on text: give --source FILE, and --target for translation")


def check_damping(share: float, *, name: str = "--damping") -> None:
    """ConfigError for a damping that is negative or not finite."""
    if not 0 <= share < math.inf:
        raise ConfigError(f"{name} {share:g}: a share of the mean second moment, at least 0 and finite")
