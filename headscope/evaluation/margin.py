"""The margin of non-inferiority: how much worse a model may be and still count as good as the baseline.

Options are checked with it, so this module imports nothing heavy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headscope.errors import ConfigError, flag

MARGIN = "1 %"  # a loss that readers of BLEU, perplexity or accuracy do not notice, in a unit that all of them have


@dataclass(frozen=True)
class Margin:
    """The margin of non-inferiority: in the metric's unit, or as a share of the baseline's value."""

    amount: float
    relative: bool = False

    @classmethod
    def parse(cls, text: str) -> Margin:
        """`0.25` or `1 %`; ConfigError for anything else, and below 0."""
        number, relative = text.strip(), text.strip().endswith("%")
        try:
            amount = float(number.removesuffix("%"))
        except ValueError:
            amount = math.nan
        if not 0 <= amount < math.inf:
            raise ConfigError(
                f"{flag.margin} {text!r} must be at least 0, in the metric's unit, or a percentage such as 1 %"
            )
        return cls(amount / 100 if relative else amount, relative)

    def of(self, baseline: float) -> float:
        """The margin in the metric's unit, given the baseline's value."""
        return self.amount * abs(baseline) if self.relative else self.amount

    def __str__(self) -> str:
        return f"{100 * self.amount:g} %" if self.relative else f"{self.amount:g}"
