"""The whole comparison of a run's rankings: curves, random orders, agreement with ablation, shuffled weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.bootstrap import Array, Bootstrap
from headscope.config.analyze import AnalyzeOptions
from headscope.data.corpus import Corpus
from headscope.engine.base import Analysis, RunOptions
from headscope.engine.faithfulness.comparison import (
    RankingComparison,
    RemovalSteps,
    bleu_drop,
    compare_rankings,
    measure_drop,
    plan_removals,
    with_randomised,
)
from headscope.engine.faithfulness.orders import Scores, columns_without_direction, ranks, scores_of, shuffle_weights
from headscope.engine.plan import analyze
from headscope.errors import ConfigError, flag
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.formats.base import Checkpoint
from headscope.progress import Progress


def try_rankings(
    checkpoint: Checkpoint,
    corpus: Corpus,
    heads: pd.DataFrame,
    analyses: Sequence[type[Analysis]],
    *,
    config: AnalyzeOptions,
    options: RunOptions,
    criteria: Callable[[], Mapping[str, Scores]] = dict,
    progress: Progress,
) -> RankingComparison:
    """Test every ranking that `heads` (a row per head) holds; `analyses` measure the heads anew, on shuffled weights.

    `criteria` gives the scores of further rankings on the model as it is when it is called. Heads are masked as
    `headscope evaluate --mask` does. A KeyboardInterrupt after the heads were removed leaves out what comes later.
    ConfigError where there is nothing to test, and for BLEU of a model or a corpus that has no translations.
    """
    rankings, refusals = scores_of(heads, criteria())
    if config.faithfulness_bleu and not (checkpoint.two_sided and corpus.has_target):
        raise ConfigError(f"{flag.faithfulness_bleu} needs a model that translates, and a {flag.target}")
    steps, orders = config.faithfulness_steps, config.faithfulness_seeds
    plan = plan_removals(rankings, steps=steps, random_orders=orders, seed=config.seed)
    limit, tokens = options.batching.limit, options.batching.tokens
    assert limit is not None, "run_options says it"
    reading = LikelihoodOptions(tokens, limit, config.long, "random", config.seed)
    with progress("removing heads", corpus.count) as step:
        drop = measure_drop(checkpoint, corpus, plan.masks, reading, objective=config.objective, step=step)
    bootstrap = Bootstrap(seed=config.seed, replicates=config.bootstrap)
    shuffled_scores: Mapping[str, Scores] = {}
    try:
        if config.faithfulness_bleu:
            drop.values["bleu"] = _bleu(checkpoint, corpus, plan, tokens=tokens, progress=progress)
        ranking_analyses = [cls for cls in analyses if ranks(cls)]
        with shuffle_weights(checkpoint.model, seed=config.seed):
            title = "analysing shuffled weights"
            shuffled_study = analyze(
                checkpoint, corpus, analyses=ranking_analyses, options=options, progress=progress, title=title
            )
            shuffled_scores, _ = scores_of(shuffled_study.heads, criteria())
        complete = True
    except KeyboardInterrupt:
        complete = False
    comparison = compare_rankings(plan, drop, rankings, bootstrap)
    ablation_value = (
        "what they give on the corrupt prompt" if OBJECTIVES.get(drop.objective).needs_prompts else "nothing"
    )
    remarks = [
        f"faithfulness: {len(plan.singles)} heads (N of CPR and CMD), of which those removed give {ablation_value}"
    ]
    remarks += [f"{name} is no ranking: {reason}" for name, reason in refusals.items()]
    if columns := columns_without_direction(heads):
        remarks.append(f"no agreed direction, so not tested as rankings: {', '.join(columns)}")
    return replace(with_randomised(comparison, rankings, shuffled_scores), remarks=remarks, complete=complete)


def _bleu(checkpoint: Checkpoint, corpus: Corpus, plan: RemovalSteps, *, tokens: int, progress: Progress) -> Array:
    on_curves = sorted({number for numbers in plan.curves.values() for number in numbers})
    masks = [plan.masks[number] for number in on_curves]
    with progress("translating without heads", corpus.count * len(masks)) as step:
        translation_scores = bleu_drop(checkpoint, corpus, masks, tokens=tokens, step=step)
    scores = np.full(len(plan.masks), np.nan)
    scores[on_curves] = translation_scores.values["bleu"]
    return scores
