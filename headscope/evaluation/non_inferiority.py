"""Is a model as good as another, up to a margin? A test of non-inferiority on the same sentences.

That no loss is seen does not show that there is none: the text may be too small to see it. So the loss is bounded from
above (one-sided, 95 %), and only where the bound is inside the margin is the model called as good (Walker & Nowacki
2011). How small a margin the text could confirm at all is given beside it.

How the bound is made: `judge`. How often it is wrong on simulated text: `benchmarks/verdicts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from scipy.special import ndtri, stdtrit

from headscope.bootstrap import LEVEL, Array

STEP = 0.03  # of integrals by equal steps: 1e-8 of what they are, also of 1,024 sentences and one that is lost


def dirichlet_mean_quantile(values: Array, share: float) -> float:
    """Quantile of Σ w_i values_i with weights w of Dirichlet(1, …, 1), to 1e-8 of the values' range.

    Weights are exponentials E_i over their sum, so P(Σ w_i v_i ≤ u) = P(Σ E_i (v_i − u) ≤ 0), solved for u.
    """
    from scipy.optimize import brentq

    numbers, counts = np.unique(values, return_counts=True)
    low, high = float(numbers[0]), float(numbers[-1])
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return high

    def beyond(value: float) -> float:
        inside = low < value < high
        return (exponential_sum_tail(numbers - value, counts.astype(float)) if inside else value == high) - share

    return float(brentq(beyond, low, high, xtol=1e-9 * (high - low)))


def exponential_sum_tail(scales: Array, counts: Array) -> float:
    """P(Σ scales_i E_i ≤ 0) for independent standard exponentials, `counts` of each scale.

    By inversion of the characteristic function Π (1 − i s t)^−1 (Gil-Pelaez 1951), in equal steps of y, with
    t = exp(y − exp(−y)) in units of the sum's standard deviation.
    """
    scales = scales / np.sqrt(counts @ scales**2)
    coarse = np.arange(1.0, 60.0)
    decay = counts @ np.log1p((scales[:, None] * np.exp(coarse)) ** 2) / 2
    end = coarse[min(int((decay < 36).sum()), len(coarse) - 1)]  # where the integrand is e^−36 at most
    y = np.arange(-3.6, end + STEP, STEP)
    products = scales[:, None] * np.exp(y - np.exp(-y))  # [s n]
    angle = counts @ np.arctan(products)
    size = counts @ np.log1p(products**2) / 2
    return float(0.5 - STEP / np.pi * (np.sin(angle) * np.exp(-size) * (1 + np.exp(-y))).sum())


POWER = 0.8
FEWEST = 60  # sentences: of fewer, 5 % may be lost without one that shows it
BEYOND = 1.25  # the largest possible loss, in distances of the largest seen from the mean
NON_INFERIOR, WORSE, OPEN, UNTESTED = "non-inferior", "worse", "not established", "not tested"


@dataclass(frozen=True)
class NonInferiority:
    """The loss of a model against the baseline, `worse` (below 0: better), with its one-sided `worse_limit`.

    `detectable` is the margin at which a model without any loss would be called non-inferior with 80 % power: the
    smallest loss that this text could have seen. `verdict` is "non-inferior" where the limit is inside the `margin`,
    "worse" where the lower limit is outside, else "not established"; "not tested" where a larger size of a fixed
    sequence was not established. `level` is that of the limits, 0.95 unless several sequences share it.
    """

    worse: float
    worse_limit: float
    margin: float
    detectable: float
    verdict: str
    level: float = LEVEL


def judge(
    worse: Array, *, margin: float, largest: float, max_loss: float = math.inf, level: float = LEVEL
) -> NonInferiority:
    """The verdict on losses `worse` [seed 1 + g] or [1 + g]: of the whole text, then without each of g groups of lines.

    The loss of one group is its influence (jackknife: g − 1 times what leaving it out changes). Of a mean over
    groups, with a largest possible loss, Gaffke's limit is the quantile of their mean with Dirichlet(1, …, 1) weights
    in which that largest loss takes part once (Gaffke 2005; Learned-Miller & Thomas 2019, 1905.06208: no exception is
    known, a proof neither). Of losses that are 0 or 1 it is that of Clopper & Pearson; where nothing differs it leaves
    1 − 0.05^(1/g) of the text to be lost (the rule of three). The `largest` loss is that of a line that is lost
    altogether (`Metric.largest_loss`), not what the model's value is: a model that is right half of the time loses a
    line as wholly as any other. Of a metric without a range (`max_loss` is infinite) it is at least a quarter farther
    above the mean than the most that a group loses. The limit is Student's where that is farther out.

    Seeds are drawn as sentences are: Student's limit of their means, with the degrees of freedom of seeds, is put
    together with that of sentences as the root of the sum of squared distances (MOVER: Zou & Donner 2008). Of fewer
    than 60 groups nothing is established. No limit is beyond `max_loss`, all that there is to lose, and no loss can be
    seen (`detectable` NaN) where only a larger one could. NaN where the metric is not finite, or there is one group.
    """
    worse = np.atleast_2d(worse)  # [seed 1+g]
    mean_loss = float(worse[:, 0].mean())
    if not np.isfinite(worse).all() or worse.shape[1] < 3:
        return NonInferiority(mean_loss, math.nan, margin, math.nan, WORSE if mean_loss == math.inf else OPEN, level)
    losses = influences(worse.mean(axis=0))
    has_seeds, beyond = len(worse) > 1, BEYOND if max_loss == math.inf else 1.0  # one seed is this model
    seeds = float(stdtrit(len(worse) - 1, level)) * _standard_error(worse[:, 0]) if has_seeds else 0.0
    above = math.hypot(sentence_reach(losses, largest, level, beyond=beyond), seeds)
    high = min(mean_loss + above, max(max_loss, mean_loss))
    error = math.hypot(_standard_error(losses), _standard_error(worse[:, 0]))
    if high <= margin:
        verdict = NON_INFERIOR if len(losses) >= FEWEST else OPEN
    else:
        below = math.hypot(sentence_reach(-losses, -math.inf, level, beyond=BEYOND), seeds)
        verdict = WORSE if mean_loss > margin and mean_loss - below > margin else OPEN
    detectable = above + float(ndtri(POWER)) * error
    return NonInferiority(mean_loss, high, margin, detectable if detectable <= max_loss else math.nan, verdict, level)


def influences(worse: Array) -> Array:
    """The loss of every group [g], of the loss of all and without each [1 + g]: their mean is that of all."""
    leave_one_out = worse[1:]
    return worse[0] + (len(leave_one_out) - 1) * (leave_one_out.mean() - leave_one_out)


def sentence_reach(losses: Array, largest: float, level: float, *, beyond: float) -> float:
    """The upper bound of the true mean loss, minus the mean of losses [g].

    Nor more than the largest seen, so many times (`beyond`) as far from the mean.
    """
    mean = float(losses.mean())
    extreme = max(largest, mean + beyond * (float(losses.max()) - mean))
    limit = dirichlet_mean_quantile(np.append(losses, extreme), level)
    return max(limit - mean, float(stdtrit(len(losses) - 1, level)) * _standard_error(losses))


def take_established(verdicts: Iterable[NonInferiority]) -> Iterator[NonInferiority]:
    """The verdicts of a fixed sequence of sizes, largest first, up to the first that is not "non-inferior".

    Reading stops there, so that of a generator no further size is measured. In that order every size may be tested at
    the full level: that any of those given is wrongly called non-inferior is as likely as that one test is (Maurer,
    Hothorn & Lehmacher 1995; Westfall & Krishen 2001).
    """
    return takewhile(lambda verdict: verdict.verdict == NON_INFERIOR, verdicts)


def in_fixed_sequence(verdicts: Sequence[NonInferiority]) -> list[NonInferiority]:
    """All verdicts of a fixed sequence, largest size first: what `established` leaves out is "not tested", or worse."""
    n_passed = len(list(take_established(verdicts)))
    later = verdicts[n_passed + 1 :]
    remaining = [verdict if verdict.verdict == WORSE else replace(verdict, verdict=UNTESTED) for verdict in later]
    return [*verdicts[: n_passed + 1], *remaining]


def format_bound(worse: float, limit: float, *, level: float = 0.95) -> str:
    """A loss and its bound in words; a gain is called better.

    One sentence has no such limit (NaN).
    """
    if math.isnan(limit):
        return f"{'worse' if worse >= 0 else 'better'} by {abs(worse):.3g}"
    sure = f"({100 * level:.3g} %)"
    if worse >= 0:
        return f"worse by {worse:.3g}, at most {limit:.3g} {sure}"
    bound = f"worse by at most {limit:.3g}" if limit >= 0 else f"by {-limit:.3g} at least"
    return f"better by {-worse:.3g}, {bound} {sure}"


def why_open(*, worse_limit: float, margin: float, detectable: float, text: str) -> str:
    """Why a verdict establishes nothing, of what `text` names."""
    if not worse_limit > margin:  # NaN too, of one sentence
        return f"fewer than {FEWEST} sentences establish nothing"
    if math.isnan(detectable):
        return f"{text} could have seen no loss, not even of all there is to lose"
    return f"{text} could have seen a loss of {detectable:.3g} at least"


def groups_needed(verdict: NonInferiority, groups: int) -> int | None:
    """About how many groups would show a model without any loss to be as good, with 80 % power; of two digits.

    None where `groups`, on which the verdict was found, are enough, and where that cannot be known. Of the distance
    from the mean to the limit what a normal limit has shrinks with the root of the groups, the rest with their number
    (1 − 0.05^(1/g) ≈ 3/g of losses of which none was seen).
    """
    if verdict.verdict != OPEN or not math.isfinite(verdict.detectable) or not verdict.margin > 0:
        return FEWEST if verdict.verdict == OPEN and groups < FEWEST else None
    above = verdict.worse_limit - verdict.worse
    error = max(verdict.detectable - above, 0.0) / float(ndtri(POWER))
    usual, wide = (float(z) * error for z in (ndtri(verdict.level), ndtri(verdict.level) + ndtri(POWER)))
    group_part = max(above - usual, 0.0)
    if verdict.detectable <= verdict.margin or wide + group_part == 0:
        return FEWEST if groups < FEWEST else None
    root = (wide + math.sqrt(wide**2 + 4 * group_part * verdict.margin)) / (
        2 * verdict.margin
    )  # of how many times as many
    needed_groups = max(groups * root**2, FEWEST)
    digits: int = 10 ** max(int(math.log10(needed_groups)) - 1, 0)
    return math.ceil(needed_groups / digits) * digits


def _standard_error(values: Array) -> float:
    """Of the mean; 0 of one value."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
