"""Four words for a claim, from paired differences over seeds: reproduced, contradicted, undecided, untested.

A difference is of two runs with one seed. Its mean has a 95 % interval by Student's t; its two-sided p-value is
adjusted for the number of claims that were tested in the same family (Holm 1979). At 5 % an adjusted difference in the
claimed direction is reproduced, one in the other direction contradicts, anything else is undecided; without two pairs
of runs, or where an arm did not do what it is named after, a claim is untested.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import nctdtrinc, stdtr, stdtrit
from variants.design import Arm, Claim

LEVEL, POWER = 0.05, 0.8
REPRODUCED, CONTRADICTED, UNDECIDED, UNTESTED = "reproduced", "contradicted", "undecided", "untested"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """Mean paired difference over `pairs` seeds, half the width of its 95 % interval, and its two-sided p-value."""

    mean: float
    reach: float
    p: float
    pairs: int
    deviation: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Difference | None:
        """None of fewer than two differences, which have no interval."""
        pairs = len(differences)
        if pairs < 2:
            return None
        mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
        error = deviation / math.sqrt(pairs)
        p = two_sided(mean / error, pairs - 1) if error else float(mean == 0)
        return cls(mean, float(stdtrit(pairs - 1, 1 - LEVEL / 2)) * error, p, pairs, deviation)

    def as_text(self, digits: int) -> str:
        """Mean and half width."""
        return f"{self.mean:+.{digits}f} ± {self.reach:.{digits}f}"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim; `p_adjusted` is by Holm over the tested claims of its family."""

    claim: Claim
    word: str
    difference: Difference | None
    p_adjusted: float | None
    why: str = ""

    @property
    def holds_published(self) -> bool | None:
        """Whether the interval has the published difference in it; None where one of the two is not there."""
        if self.difference is None or self.claim.published_value is None:
            return None
        return abs(self.difference.mean - self.claim.published_value) <= self.difference.reach


def two_sided(statistic: float, freedom: int) -> float:
    """P(|T| > |t|) for Student's t."""
    return min(2 * float(stdtr(freedom, -abs(statistic))), 1.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: the i-th smallest of m times m − i + 1, never less than one before it, at most 1."""
    result, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(p_values[index] * (len(p_values) - rank), 1.0))
        result[index] = largest
    return result


def idle(arms: Iterable[Arm], rows: Sequence[Row]) -> dict[str, str]:
    """The arms of which a run did not do what they are named after, with the number that shows it."""
    reasons: dict[str, str] = {}
    for arm in arms:
        for row in (row for row in rows if row["arm"] == arm.name):
            for effect in arm.effects:
                value = row.get(effect.column)
                if value is None or not effect.holds(float(value)):
                    text = "not there" if value is None else f"{float(value):.4g}"
                    reasons.setdefault(
                        arm.name, f"{effect.column} of seed {row['seed']} is {text}, must be {effect.demand}"
                    )
    return reasons


def verdicts(claims: Sequence[Claim], rows: Sequence[Row], out_of_work: Mapping[str, str]) -> list[Verdict]:
    """One for every claim, in order; `out_of_work` are the arms of `idle`."""
    effects = {}
    for claim in claims:
        if not {claim.arm, claim.against} & out_of_work.keys():
            effects[claim] = Difference.of(differences_of_claim(claim, rows))
    p_adjusted: dict[Claim, float] = {}
    for family in {claim.family for claim in claims}:
        members = [(claim, value) for claim, value in effects.items() if claim.family == family and value]
        p_adjusted |= dict(zip((claim for claim, _ in members), holm([value.p for _, value in members]), strict=True))
    return [judge_claim(claim, effects.get(claim), p_adjusted.get(claim), out_of_work) for claim in claims]


def judge_claim(
    claim: Claim, difference: Difference | None, p_adjusted: float | None, out_of_work: Mapping[str, str]
) -> Verdict:
    """The word for one claim."""
    for arm in (claim.arm, claim.against):
        if arm in out_of_work:
            return Verdict(claim, UNTESTED, None, None, f"{arm}: {out_of_work[str(arm)]}")
    if difference is None or p_adjusted is None:
        return Verdict(claim, UNTESTED, None, None, "fewer than two pairs of runs")
    if p_adjusted > LEVEL:
        return Verdict(claim, UNDECIDED, difference, p_adjusted)
    word = REPRODUCED if difference.mean * claim.sign > 0 else CONTRADICTED
    return Verdict(claim, word, difference, p_adjusted)


def differences_of_claim(claim: Claim, rows: Sequence[Row]) -> list[float]:
    """Differences of a claim's column over the seeds that both its arms have."""
    return paired_with(rows, claim.arm, claim.against, claim.column)


def paired_with(rows: Sequence[Row], arm: str, against: str | float, column: str) -> list[float]:
    """Differences of an arm from another, or from a number, over the seeds that there are of both, by seed."""
    values = {(row["arm"], row["seed"]): float(row[column]) for row in rows if row.get(column) is not None}
    differences = []
    for (name, seed), value in sorted(values.items(), key=lambda item: item[0][1]):
        other = values.get((against, seed)) if isinstance(against, str) else against
        if name == arm and other is not None:
            differences.append(value - other)
    return differences


def seeds_needed(deviation: float, reach: float) -> int:
    """The fewest seeds whose 95 % interval of a paired difference of this deviation is narrower than ± `reach`."""
    seeds = 2
    while stdtrit(seeds - 1, 1 - LEVEL / 2) * deviation / math.sqrt(seeds) > reach:
        seeds += 1
    return seeds


def detectable(deviation: float, seeds: int, tests: int = 1) -> float:
    """The difference that so many seeds find with 80 % power at 5 %, the smallest of `tests` p-values counted.

    By the noncentral t, the distribution of the statistic where there is such a difference; its other tail is nothing.
    """
    critical = stdtrit(seeds - 1, 1 - LEVEL / tests / 2)
    return float(nctdtrinc(seeds - 1, 1 - POWER, critical)) * deviation / math.sqrt(seeds)
