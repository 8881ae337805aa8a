"""Which scores of heads follow from the seed: what does not say so gives the same for two seeds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headscope.attribution.objectives.base import OBJECTIVES, choose_objective
from headscope.data.corpus import Corpus, Sentence
from headscope.engine.base import ANALYSES
from headscope.engine.plan import analyze
from headscope.errors import HeadscopeError
from headscope.formats.base import Checkpoint
from headscope.pruning.ranking import criterion as criterion_module
from headscope.pruning.ranking.criterion import (
    CRITERIA,
    MeasuredColumn,
    ScoringContext,
    criterion_named,
    rankable_names,
)
from tests.oracles import checkpoints, tiny
from tests.oracles.run_options import run_options

pytestmark = pytest.mark.slow

SLOW = {"causal_head_gating", "streaming", "retrieval", "copy_suppression"}  # minutes here; tested by what they say


FEW = run_options(shapley_samples=1, ig_steps=2, explained_steps=1, explained_rows=31)


def texts(kind: str, words: str | list[str]) -> Corpus:
    draws = random.Random(1)
    two = kind == "small"
    sentences = [
        Sentence(n, " ".join(draws.choices(words, k=5)), " ".join(draws.choices(words[:7], k=4)) if two else None, None)
        for n in range(2)
    ]
    return Corpus("x", 2, "", lambda: iter(sentences), has_target=two)


@pytest.mark.parametrize("kind", ["small", "bert"])
def test_scores_that_are_not_drawn_are_equal_for_two_seeds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one analysis are of one run with each seed."""
    runs: dict[Any, Any] = {}

    def once(*args: Any, analyses: Any, options: Any, **more: Any) -> Any:
        key = (*(cls.name for cls in analyses), options.seed)
        if key not in runs:
            runs[key] = analyze(*args, analyses=analyses, options=options, **more)
        return runs[key]

    monkeypatch.setattr(criterion_module, "analyze", once)
    its: Checkpoint = checkpoints.small() if kind == "small" else checkpoints.hugging(kind)
    corpus = texts(kind, "abcdefghijk" if kind == "small" else tiny.WORDS)
    objective = OBJECTIVES.get(choose_objective("", its, has_target=corpus.has_target))()
    drawn, measured = set(), 0
    for name in rankable_names():
        criterion = criterion_named(name)
        if isinstance(criterion, MeasuredColumn) and criterion.analysis in SLOW:
            continue
        try:
            first, second = (
                criterion.scores(ScoringContext(its, corpus, options=replace(FEW, seed=seed))) for seed in (1, 2)
            )
        except HeadscopeError:  # it is for other models
            continue
        measured += 1
        heads = sorted(first)
        if not np.array_equal([first[h] for h in heads], [second[h] for h in heads], equal_nan=True):
            drawn.add(name)
            assert criterion.draws(its, objective), name
    assert measured > 20 and "random" in drawn
    assert {"small": "shapley", "bert": "gradient"}[kind] in drawn


def test_criteria_of_analyses_ask_them() -> None:
    model = checkpoints.hugging("gpt2")
    for name in rankable_names():
        criterion: Any = criterion_named(name)
        if name not in CRITERIA.names() and ANALYSES.get(criterion.analysis).sampled:
            assert criterion.draws(model, None), name
    assert all(its.sampled for _, its in ANALYSES if "random" in its.passes)
    for name in ("facilitation", "interference", "full_attention", "copy_suppression", "random"):
        assert criterion_named(name).draws(model, None)
    assert not criterion_named("magnitude").draws(model, OBJECTIVES.get("loss")())
