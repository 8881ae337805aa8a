"""Label-smoothed cross-entropy by four nested loops (Szegedy et al. 2016, §7, with the label in the uniform part)."""

import math
from collections.abc import Sequence


def smoothed_loss(
    states: Sequence[Sequence[float]],
    weight: Sequence[Sequence[float]],
    bias: Sequence[float],
    labels: Sequence[int],
    e: float,
) -> tuple[float, float]:
    """Σ over positions of Σ_v q_v · (-log p_v) with q = (1 - e) · one-hot + e / V, and Σ -log p_label."""
    loss = nll = 0.0
    for state, label in zip(states, labels, strict=True):
        logits = []
        for row, shift in zip(weight, bias, strict=True):
            logits.append(shift + sum(a * b for a, b in zip(state, row, strict=True)))
        log_z = math.log(sum(math.exp(logit) for logit in logits))
        for number, logit in enumerate(logits):
            share = e / len(logits) + (1 - e if number == label else 0.0)
            loss += share * (log_z - logit)
        nll += log_z - logits[label]
    return loss, nll
