"""Upper bounds of numbers.

Options that memory or time grow with declare a bound of their own (`maximum` of `headscope.config.option`). Every other
integer is below 2³¹, every other number within float32, and none is infinite or NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from headscope.errors import ConfigError

WHOLE, REAL = 2**31 - 1, 1e38
SEED = 2**63 - 2**31  # tables take 63 bits, and commands add a little to a seed
BEAM = 1000
RESAMPLES = 10_000  # an interval of 95 % needs about 1,000
POWER, RATIO, STEPS = 100.0, 100.0, 65_536  # of a length penalty, of a translation's length
MOST_LAYERS, MOST_HEADS, MOST_WIDTH = 2000, 1024, 2**20  # of a stack, of a layer, of anything in it

MOST: Mapping[str, float] = {
    **{"beam": BEAM, "best": BEAM, "power": POWER, "lenpen": POWER},
    **{"max_ratio": RATIO, "max_len_a": RATIO, "max_extra": STEPS, "max_len_b": STEPS},
}
"""The largest values of a search, by the names of fields that are no options."""


BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "maximum": ("at most", operator.le),
    "below": ("less than", operator.lt),
}
"""What a field may declare of its numbers, in the words of messages."""


def check_numbers(config: Any, *, flags: Mapping[str, str] | None = None, dashes: str = "--") -> None:
    """ConfigError for a number among the fields of a config that is out of bounds, or is infinite or NaN.

    `flags` maps fields to options of another name; the other options are `dashes` and the name of the field. What a
    field declares itself (`BOUNDS`, see `headscope.config.option`) goes before the table.
    """
    for name, value, declared in _numbers(config):
        option = (flags or {}).get(name) or (f"--{name.replace('_', '-')}" if dashes else name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{option} is {value}; it must be a finite number")
        bounds = {kind: declared[kind] for kind in BOUNDS if declared.get(kind) is not None}
        if not all(BOUNDS[kind][1](value, bound) for kind, bound in bounds.items()):
            allowed = " and ".join(f"{BOUNDS[kind][0]} {bound:,}" for kind, bound in bounds.items())
            if "minimum" in bounds and value < bounds["minimum"]:
                raise ConfigError(f"{option} {_short(value)}: {allowed} is needed")
            raise ConfigError(f"{option} is {_short(value)}; it must be {allowed}")
        bound = declared.get("maximum") or MOST.get(name, REAL if isinstance(value, float) else WHOLE)
        if abs(value) > bound:
            raise ConfigError(f"{option} is {_short(value)}; it must be at most {bound:,}")


def _numbers(config: Any) -> Iterator[tuple[str, float, Mapping[str, Any]]]:
    """Names, values and declarations of the fields that are numbers or tuples of numbers."""
    for field in fields(config):
        value = getattr(config, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, (int, float)) and not isinstance(part, bool):
                yield field.name, part, field.metadata


def _short(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 10**24:
        return f"a number of {value.bit_length()} bits"
    return str(value)
