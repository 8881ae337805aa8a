"""The whole trial of a study's rankings: curves, random orders, agreement with ablation, shuffled weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from headscope.bootstrap import REPLICATES, Array, Bootstrap
from headscope.data.corpus import Corpus
from headscope.engine.faithfulness.harm import bleu_drop, measure_drop
from headscope.engine.faithfulness.orders import randomised, scores_of
from headscope.engine.faithfulness.trial import RankingComparison, compare_rankings, plan_removals, with_randomised
from headscope.errors import ConfigError
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.formats.base import Checkpoint
from headscope.progress import Progress


@dataclass(frozen=True, kw_only=True)
class FaithfulnessOptions:
    """How rankings are tested: points a curve has, random orders beside them, whether translations are scored too."""

    steps: int = 10
    random_orders: int = 5
    bleu: bool = False
    objective: str = "loss"
    seed: int = 1
    replicates: int = REPLICATES


def try_rankings(
    checkpoint: Checkpoint,
    corpus: Corpus,
    heads: pd.DataFrame,
    *,
    trial: FaithfulnessOptions,
    reading: LikelihoodOptions,
    again: Callable[[], pd.DataFrame],
    progress: Progress,
) -> RankingComparison:
    """Test every ranking that `heads` (a row per head) holds; `again` measures the heads anew, on shuffled weights.

    Heads are masked as `headscope evaluate --mask` does. ConfigError where there is nothing to test, and for
    BLEU of a model or a corpus that has no translations.
    """
    rankings, refused = scores_of(heads)
    if trial.bleu and not (checkpoint.two_sided and corpus.has_target):
        raise ConfigError("--faithfulness-bleu needs a model that translates, and a --target")
    its = plan_removals(rankings, steps=trial.steps, random_orders=trial.random_orders, seed=trial.seed)
    with progress("removing heads", corpus.count) as step:
        found = measure_drop(checkpoint, corpus, its.masks, reading, objective=trial.objective, step=step)
    if trial.bleu:
        curves = sorted({place for places in its.curves.values() for place in places})
        with progress("translating without heads", corpus.count * len(curves)) as step:
            scored = bleu_drop(checkpoint, corpus, [its.masks[n] for n in curves], tokens=reading.tokens, step=step)
        found.plain["bleu"] = _spread(scored.plain["bleu"], curves, len(its.masks))
    verdict = compare_rankings(its, found, rankings, Bootstrap(seed=trial.seed, replicates=trial.replicates))
    with randomised(checkpoint.model, seed=trial.seed):
        shuffled, _ = scores_of(again())
    whole = with_randomised(verdict, rankings, shuffled)
    return replace(whole, remarks=[f"{name} is no ranking: {why}" for name, why in refused.items()])


def _spread(values: Array, places: list[int], count: int) -> Array:
    found = np.full(count, np.nan)
    found[places] = values
    return found
