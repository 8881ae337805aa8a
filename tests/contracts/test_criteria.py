"""What every registered pruning criterion keeps, on models of every kind."""

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from headscope.heads import all_heads
from headscope.model.taps import masked
from headscope.pruning.ranking.criterion import CRITERIA, ScoringContext, criterion_named, rankable_names
from tests.makers.studies import run_options
from tests.oracles import speakers
from tests.oracles.plugin import registered
from tests.oracles.shuffled import in_folds

ADDED = "last_layer"
NAMES = ("ablation", "confidence", "entropy", "gradient", "lrp", "magnitude", "random", "shapley", "taylor")
CLOSED_FORM = ("fisher", "flap", "layer-drop", "obs", "obs-task", "output-norm", "wanda")
every = pytest.mark.parametrize("name", [*NAMES, *CLOSED_FORM, ADDED], indirect=True)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """`last_layer` is a criterion of another package (tests/plugin)."""
    with registered(CRITERIA, ADDED) if request.param == ADDED else nullcontext():
        yield request.param


def test_the_names_that_the_command_line_promises() -> None:
    assert {*NAMES, *CLOSED_FORM} <= set(rankable_names()) and {"random", *CLOSED_FORM} <= set(CRITERIA.names())


@pytest.mark.parametrize("kind", ["bert", "llama"])
@every
def test_a_number_for_every_head_the_same_each_time(name: str, kind: str) -> None:
    its, corpus = speakers.checkpoint(kind), in_folds(speakers.corpus(kind, count=4), 1)
    made = criterion_named(name)
    assert made.name == name and made.summary and type(made).__doc__ and made.keep
    question = ScoringContext(its, corpus if made.reads_text else None, options=run_options(shapley_samples=2))
    scores = made.scores(question)
    assert list(scores) == list(all_heads(its.layout))
    values = np.array(list(scores.values()))
    assert np.isfinite(values).all() and len(set(values.tolist())) > 1
    assert made.scores(question) == scores


@every
def test_scores_depend_on_heads_that_are_gone_where_that_is_said(name: str) -> None:
    its, corpus = speakers.checkpoint("native-pre"), in_folds(speakers.corpus("native-pre", count=4), 1)
    made, gone = criterion_named(name), list(all_heads(its.layout))[:1]
    options = run_options(shapley_samples=2)
    plain = made.scores(ScoringContext(its, corpus, options=options))
    assert np.isfinite(list(plain.values())).all()
    later = made.scores(ScoringContext(its, corpus, options=options, removed=gone))
    rest = [head for head in plain if head not in gone]
    changed = any(plain[head] != later[head] for head in rest)
    assert changed is made.changes
    if changed:
        with masked(its.model, gone):
            assert made.scores(ScoringContext(its, corpus, options=options)) == later
