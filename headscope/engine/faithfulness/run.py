"""The whole comparison of a run's rankings: curves, random orders, agreement with ablation, shuffled weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.bootstrap import REPLICATES, Bootstrap
from headscope.data.corpus import Corpus
from headscope.engine.faithfulness.comparison import RankingComparison, compare_rankings, plan_removals, with_randomised
from headscope.engine.faithfulness.orders import Scores, randomised, scores_of, undirected
from headscope.engine.faithfulness.performance_drop import bleu_drop, measure_drop
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
    options: FaithfulnessOptions,
    likelihood_options: LikelihoodOptions,
    remeasure: Callable[[], pd.DataFrame],
    progress: Progress,
    criteria: Callable[[], Mapping[str, Scores]] = dict,
) -> RankingComparison:
    """Test every ranking that `heads` (a row per head) holds; `remeasure` measures the heads anew, on shuffled weights.

    `criteria` gives the scores of further rankings on the model as it is when it is called. Heads are masked as
    `headscope evaluate --mask` does. ConfigError where there is nothing to test, and for BLEU of a model or a corpus
    that has no translations.
    """
    rankings, refused = scores_of(heads, criteria())
    if options.bleu and not (checkpoint.two_sided and corpus.has_target):
        raise ConfigError("--faithfulness-bleu needs a model that translates, and a --target")
    plan = plan_removals(rankings, steps=options.steps, random_orders=options.random_orders, seed=options.seed)
    with progress("removing heads", corpus.count) as step:
        drop = measure_drop(checkpoint, corpus, plan.masks, likelihood_options, objective=options.objective, step=step)
    if options.bleu:
        on_curves = sorted({number for numbers in plan.curves.values() for number in numbers})
        masks = [plan.masks[number] for number in on_curves]
        with progress("translating without heads", corpus.count * len(masks)) as step:
            scored = bleu_drop(checkpoint, corpus, masks, tokens=likelihood_options.tokens, step=step)
        drop.values["bleu"] = np.full(len(plan.masks), np.nan)
        drop.values["bleu"][on_curves] = scored.values["bleu"]
    comparison = compare_rankings(plan, drop, rankings, Bootstrap(seed=options.seed, replicates=options.replicates))
    with randomised(checkpoint.model, seed=options.seed):
        shuffled, _ = scores_of(remeasure(), criteria())
    ablated = "what they give on the corrupt prompt" if OBJECTIVES.get(options.objective).needs_prompts else "nothing"
    remarks = [f"faithfulness: {len(plan.singles)} heads (N of CPR and CMD), of which those removed give {ablated}"]
    remarks += [f"{name} is no ranking: {reason}" for name, reason in refused.items()]
    if columns := undirected(heads):
        remarks.append(f"no agreed direction, so not tested as rankings: {', '.join(columns)}")
    return replace(with_randomised(comparison, rankings, shuffled), remarks=remarks)
