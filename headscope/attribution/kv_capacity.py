"""How many keys and values each head may keep: budgets in proportion to scores (HeadKV, Fu et al. 2024)."""

from __future__ import annotations

import numpy as np

from headscope.bootstrap import Array
from headscope.errors import ConfigError


def head_capacities(scores: Array, *, budget: int, window: int = 32, beta: float = 1.005) -> Array:
    """Keys of each head [n] beside the newest `window`, for n heads with a budget of so many keys on average.

    With c = budget − window, every head keeps c − ⌊c/β⌋, and n·⌊c/β⌋ are shared out by score: the rule of the
    authors' program. It rounds each head by itself; here the largest remainders are rounded up, so that capacities
    sum to n·c. Heads share alike where all scores are zero. ConfigError for a budget that the window uses up, and for
    β below 1.
    """
    if budget <= window:
        raise ConfigError(f"a budget of {budget} keys leaves nothing beside the {window} newest; give more")
    if beta < 1:
        raise ConfigError(f"β is {beta:g}; it must be at least 1")
    positive = np.clip(np.nan_to_num(scores), 0, None)
    shares = positive / positive.sum() if positive.sum() > 0 else np.full(len(scores), 1 / len(scores))
    free = budget - window
    shared = int(free // beta)
    exact = shares * shared * len(scores) + free - shared
    whole: Array = np.floor(exact)
    missing = round(free * len(scores) - whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:missing]] += 1
    return whole
