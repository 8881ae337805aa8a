"""How many sentences passes without heads may be spent on."""

from __future__ import annotations

from dataclasses import replace

from headscope.config import AnalyzeOptions
from headscope.data.corpus import Corpus

PASSES = 30
"""Forward passes of a text that `--importance` spends on heads that are off."""
SMALL, LEAST = 64, 8
"""Sentences that a smaller text has the budget of; and the fewest that say which heads matter."""


def with_budget(options: AnalyzeOptions) -> AnalyzeOptions:
    """Options that say how many passes `ablation` may take: `PASSES` unless it was asked for, or a number given.

    They are as they were where no importance is measured.
    """
    asked = options.importance == "all" or {"ablation", "importance"} & {*options.only, *options.also}
    if options.importance == "none" and not asked and not options.faithfulness:
        return options
    given = options.analysis_options["ablation_passes"]
    passes = given if given is not None else 0 if asked else PASSES
    return replace(options, analysis_options={**options.analysis_options, "ablation_passes": passes})


def affordable(corpus: Corpus, passes: float, budget: int) -> Corpus | str:
    """The part of a text that so many passes of every sentence can be made of, or why it is too small.

    `budget` is in passes of the whole text; 0: no limit. The part is the same for every seed, and drawn from the whole
    length of the text, whose lines may be sorted by class or by length.
    """
    count = int(budget * max(corpus.count, SMALL) / passes) if budget else corpus.count
    if count >= corpus.count:
        return corpus
    if count < LEAST:
        return f"needs {passes:,.0f} passes of a sentence, too many for --ablation-passes {budget}; 0 measures all"
    return corpus.share(count / corpus.count, seed=1)
