"""Is a model as good as another, up to a margin? A test of non-inferiority on the same sentences.

That no loss is seen does not show that there is none: the text may be too small to see it. So the loss is bounded from
above (one-sided, 95 %, paired bootstrap), and only where the bound is inside the margin is the model called as good
(Walker & Nowacki 2011). How small a margin the text could confirm at all is given beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headscope.bootstrap import LEVEL, Array, normal_quantile, student_quantile

POWER = 0.8
ROUNDING = 1e-6  # differences below this share of the baseline are rounding
NON_INFERIOR, WORSE, OPEN = "non-inferior", "worse", "not established"


@dataclass(frozen=True)
class NonInferiority:
    """How much `worse` a model is than the baseline (below 0: better), and at most (`worse_limit`, one-sided 95 %).

    `detectable` is the margin at which a model without any loss would be called non-inferior with 80 % power: the
    smallest loss that this text could have seen. `verdict` is "non-inferior" where the limit is inside the `margin`,
    "worse" where the lower limit (one-sided 95 %) is outside, else "not established".
    """

    worse: float
    worse_limit: float
    margin: float
    detectable: float
    verdict: str


def judge(worse: Array, *, margin: float, baseline: float, groups: int) -> NonInferiority:
    """The verdict on resampled losses `worse` [1 + replicates], the observed one first, of a text of `groups` lines.

    Limits are percentiles, or Student's with the bootstrap's standard error where those are farther out: percentiles
    of few sentences are too narrow (Hesterberg 2015). Where no sentence differs there is nothing to resample; then up
    to 1 − 0.05^(1/n) of all sentences may (the rule of three, 3 / n), each as if it were lost altogether. NaN where
    the metric is not finite.
    """
    observed, replicates = float(worse[0]), worse[1:]
    if not np.isfinite(worse).all():
        verdict = WORSE if observed == math.inf else OPEN
        return NonInferiority(observed, math.nan, margin, math.nan, verdict)
    error = float(replicates.std(ddof=1)) * math.sqrt(groups / max(groups - 1, 1))
    if error <= ROUNDING * abs(baseline):
        unseen = (1 - (1 - LEVEL) ** (1 / groups)) * abs(baseline)
        low, high, detectable = observed - unseen, observed + unseen, unseen
    else:
        reach = student_quantile(LEVEL, groups - 1) * error
        low = min(float(np.quantile(replicates, 1 - LEVEL)), observed - reach)
        high = max(float(np.quantile(replicates, LEVEL)), observed + reach)
        detectable = (normal_quantile(LEVEL) + normal_quantile(POWER)) * error
    verdict = NON_INFERIOR if high <= margin else WORSE if low > margin else OPEN
    return NonInferiority(observed, high, margin, detectable, verdict)
