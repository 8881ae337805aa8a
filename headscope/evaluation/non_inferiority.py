"""A test of non-inferiority: whether a model is as good as another up to a margin, on the same sentences.

A loss that is not significant may still exist, on a text too small to show it. So the loss is bounded from above
(one-sided, 95 %), and the model is called non-inferior only if the bound is within the margin (Walker & Nowacki 2011).
The smallest margin that the text could confirm is reported too.

`judge` computes the bound; `benchmarks/verdicts.py` measures how often it is wrong on simulated text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from scipy.special import ndtri, stdtrit

from headscope.bootstrap import LEVEL, Array

STEP = 0.03  # of integration; relative error 1e-8, also for 1,024 sentences of which one is lost altogether


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
FEWEST = 60  # sentences for a verdict: of fewer, 5 % may be lost without a single lost one among them
BEYOND = 1.25  # assumed largest loss of an unbounded metric: so many times as far from the mean as the largest seen
NON_INFERIOR, WORSE, OPEN, UNTESTED = "non-inferior", "worse", "not established", "not tested"


@dataclass(frozen=True)
class NonInferiority:
    """The loss of a model against the baseline, `worse` (below 0: better), with its one-sided `worse_limit`.

    `detectable` is the margin at which a model without any loss would be called non-inferior with 80 % power: the
    smallest loss that this text could show. `verdict` is "non-inferior" if the upper limit is within the `margin`,
    "worse" if the lower limit is beyond it, else "not established"; "not tested" if an earlier, larger size of a fixed
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

    The loss of one group is its influence (jackknife: g − 1 times the change when it is left out). The upper limit of
    the mean loss is Gaffke's: the quantile of the mean of losses with Dirichlet(1, …, 1) weights, with the largest
    possible loss as one additional loss (Gaffke 2005; Learned-Miller & Thomas 2019, 1905.06208; no violation is known,
    but there is no proof). For losses of 0 or 1 it is the limit of Clopper & Pearson; if nothing differs, it is
    1 − 0.05^(1/g) of the text (the rule of three). The `largest` loss is that of a line that is lost altogether
    (`Metric.largest_loss`), whatever the model's own value. For a metric without a range (`max_loss` is infinite) it is
    at least a quarter farther above the mean than the largest loss of a group. Student's limit is taken if larger.

    Seeds are a second sample: Student's limit of their means is combined with that of sentences as the root of the sum
    of squared distances from the mean (MOVER: Zou & Donner 2008). Fewer than 60 groups establish nothing. Limits are
    clipped to `max_loss`, and `detectable` is NaN if it would exceed `max_loss`. Limits are NaN if the metric is not
    finite, or for a single group.
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
    """The loss of every group [g] from the loss of all groups and without each [1 + g]; their mean is that of all."""
    leave_one_out = worse[1:]
    return worse[0] + (len(leave_one_out) - 1) * (leave_one_out.mean() - leave_one_out)


def sentence_reach(losses: Array, largest: float, level: float, *, beyond: float) -> float:
    """The distance from the mean of losses [g] to the upper limit of the true mean loss.

    The largest possible loss is `largest`, or the largest seen loss at `beyond` times its distance from the mean.
    """
    mean = float(losses.mean())
    extreme = max(largest, mean + beyond * (float(losses.max()) - mean))
    limit = dirichlet_mean_quantile(np.append(losses, extreme), level)
    return max(limit - mean, float(stdtrit(len(losses) - 1, level)) * _standard_error(losses))


def take_established(verdicts: Iterable[NonInferiority]) -> Iterator[NonInferiority]:
    """The verdicts of a fixed sequence of sizes, largest first, before the first that is not "non-inferior".

    Iteration stops there, so that a generator measures no further size. In a fixed sequence every size is tested at the
    full level, and still the chance that any verdict is wrong is that of a single test (Maurer, Hothorn & Lehmacher
    1995; Westfall & Krishen 2001).
    """
    return takewhile(lambda verdict: verdict.verdict == NON_INFERIOR, verdicts)


def in_fixed_sequence(verdicts: Sequence[NonInferiority]) -> list[NonInferiority]:
    """All verdicts of a fixed sequence, largest size first; after the first failure "not tested", or "worse"."""
    n_passed = len(list(take_established(verdicts)))
    later = verdicts[n_passed + 1 :]
    remaining = [verdict if verdict.verdict == WORSE else replace(verdict, verdict=UNTESTED) for verdict in later]
    return [*verdicts[: n_passed + 1], *remaining]


def format_bound(worse: float, limit: float, *, level: float = LEVEL) -> str:
    """A loss and its upper limit in words; a gain is called better. The limit is NaN for a single sentence."""
    if math.isnan(limit):
        return f"{'worse' if worse >= 0 else 'better'} by {abs(worse):.3g}"
    sure = f"({100 * level:.3g} %)"
    if worse >= 0:
        return f"worse by {worse:.3g}, at most {limit:.3g} {sure}"
    bound = f"worse by at most {limit:.3g}" if limit >= 0 else f"by {-limit:.3g} at least"
    return f"better by {-worse:.3g}, {bound} {sure}"


def why_open(*, worse_limit: float, margin: float, detectable: float, text: str) -> str:
    """Why a verdict on a text, named `text`, is "not established"."""
    if not worse_limit > margin:  # NaN too, of one sentence
        return f"fewer than {FEWEST} sentences establish nothing"
    if math.isnan(detectable):
        return f"{text} could have seen no loss, not even of all there is to lose"
    return f"{text} could have seen a loss of {detectable:.3g} at least"


def groups_needed(verdict: NonInferiority, groups: int) -> int | None:
    """An estimate, to two digits, of the groups that would show a model without loss non-inferior with 80 % power.

    Returns None if the verdict's `groups` are enough, or if that cannot be estimated. The distance from the mean to the
    limit has two parts: that of a normal limit shrinks with the root of the number of groups, the rest with the number
    itself (1 − 0.05^(1/g) ≈ 3/g for losses that were not seen).
    """
    if verdict.verdict != OPEN or not math.isfinite(verdict.detectable) or not verdict.margin > 0:
        return FEWEST if verdict.verdict == OPEN and groups < FEWEST else None
    above = verdict.worse_limit - verdict.worse
    error = max(verdict.detectable - above, 0.0) / float(ndtri(POWER))
    usual, wide = (float(z) * error for z in (ndtri(verdict.level), ndtri(verdict.level) + ndtri(POWER)))
    group_part = max(above - usual, 0.0)
    if verdict.detectable <= verdict.margin or wide + group_part == 0:
        return FEWEST if groups < FEWEST else None
    # the root of the factor by which groups must grow: margin · root² = wide · root + group_part
    root = (wide + math.sqrt(wide**2 + 4 * group_part * verdict.margin)) / (2 * verdict.margin)
    needed_groups = max(groups * root**2, FEWEST)
    digits: int = 10 ** max(int(math.log10(needed_groups)) - 1, 0)
    return math.ceil(needed_groups / digits) * digits


def _standard_error(values: Array) -> float:
    """The standard error of the mean; 0 for one value."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
