"""The criterion that drops the attention of whole layers."""

from __future__ import annotations

import numpy as np
import pytest

from headscope.heads import HeadId
from headscope.pruning.closed_form.compensate import compensate
from headscope.pruning.closed_form.output_projections import OutputProjection, output_projections
from headscope.pruning.options.refit import RefitOptions
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from headscope.pruning.ranking.scoring import moments_of
from tests.oracles import speakers


@pytest.mark.parametrize(("kind", "method"), [("bert", "mean"), ("llama", "none")])
def test_layers_go_whole_those_first_whose_error_is_least(kind: str, method: str) -> None:
    """The error is that of the refit that takes out the whole layer; in it heads go by that of each alone."""
    its, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=7)
    context = ScoringContext(its, corpus)
    scores, moments = criterion_named("layer-drop").scores(context), moments_of(context)

    def error(heads: list[HeadId]) -> float:
        (made,) = compensate(its, moments, heads, RefitOptions(method=method))
        assert isinstance(made.projection, OutputProjection)
        sums = moments.of(made.projection)
        assert sums is not None
        return made.error * sums.output_energy(made.projection.weight)

    layers = [[head for unit in projection.units for head in unit] for projection in output_projections(its)]
    errors = [error(layer) for layer in layers]
    order = sorted(scores, key=lambda head: scores[head])
    expected = [
        head for number in np.argsort(errors) for head in sorted(layers[number], key=lambda head: (scores[head], head))
    ]
    assert order == expected and max(scores.values()) == pytest.approx(sum(errors))
    if kind == "bert":
        for layer in layers:
            alone = [error([head]) for head in sorted(layer, key=lambda head: scores[head])]
            assert alone == sorted(alone)
