"""Models with refitted output projections, against masked ones and against the intact model."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, all_heads
from headscope.pruning.closed_form.compensate import RefittedCopy, compensate
from headscope.pruning.closed_form.moments import Moments, collect_moments
from headscope.pruning.closed_form.output_projections import OutputProjection
from headscope.pruning.options.shared import Refit
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from tests.oracles import speakers

KINDS = ("bert", "gpt2", "llama", "t5", "marian", "native-pre", "native-post")


@cache
def calibrated(kind: str) -> tuple[Checkpoint, Moments, tuple[HeadId, ...]]:
    """A model, its moments, and the half of its heads that `obs` takes out."""
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=31)
    scores = criterion_named("obs").scores(ScoringContext(checkpoint, corpus))
    order = sorted(scores, key=lambda head: scores[head])
    size = 3 if kind == "llama" else 1
    return checkpoint, collect_moments(checkpoint, corpus), tuple(order[: len(order) // 2 // size * size])


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_gains_and_only_modules_that_lose_heads_change(kind: str) -> None:
    checkpoint, moments, heads = calibrated(kind)
    refits = compensate(checkpoint, moments, heads)
    places = {place for each in refits for place in each.projection.places}
    assert places == {(head.site, head.layer) for head in heads}
    for each in refits:
        gone = each.projection.columns([head for head in heads if (head.site, head.layer) in each.projection.places])
        if len(gone) < each.projection.weight.shape[1]:  # where all heads go nothing is left to refit
            assert 0 <= each.error < each.error_without
        assert not each.refit.weight[:, gone].any() and each.refit.damping > 0
        assert each.projection.has_bias or not each.refit.shift.any()
    if not any(each.projection.mixing for each in refits):  # folding is another model
        altered = RefittedCopy.of(checkpoint, refits).model
        changed = _changed(checkpoint.model, altered)
        owners = [each.projection.owner for each in refits]
        kinds = ("weight", "bias") if refits[0].projection.has_bias else ("weight",)
        assert changed == {f"{owner}.{name}" for owner in owners for name in kinds}
        shared = {id(weights) for weights in checkpoint.model.parameters()}
        assert changed == {name for name, weights in altered.named_parameters() if id(weights) not in shared}


def _changed(before: nn.Module, after: nn.Module) -> set[str]:
    others = dict(after.named_parameters())
    return {name for name, value in before.named_parameters() if not torch.equal(value, others[name])}


@pytest.mark.parametrize("kind", ["bert", "marian", "native-post"])
@pytest.mark.parametrize("method", ["mean", "least-squares"])
def test_a_refit_in_part_lies_on_the_way_to_it(kind: str, method: Any) -> None:
    checkpoint, moments, heads = calibrated(kind)
    nothing, part, whole = (
        compensate(checkpoint, moments, heads, options)
        for options in (Refit(method="none"), Refit(method=method, strength=0.3), Refit(method=method))
    )
    for before, between, after in zip(nothing, part, whole, strict=True):
        for name in ("weight", "shift"):
            first, found, last = (getattr(each.refit, name) for each in (before, between, after))
            assert torch.allclose(found, 0.7 * first + 0.3 * last, rtol=1e-12, atol=1e-12)
        assert after.error < between.error < between.error_without == before.error


@pytest.mark.parametrize("kind", ["bert", "native-post"])
def test_a_module_without_heads_gives_its_mean(kind: str) -> None:
    checkpoint, moments, _ = calibrated(kind)
    heads = [head for head in all_heads(checkpoint.layout) if head.layer == 0]
    refits = compensate(checkpoint, moments, heads)
    for each in refits:
        assert isinstance(each.projection, OutputProjection)
        measured = moments.of(each.projection)
        assert measured is not None and not each.refit.weight.any()
        assert torch.allclose(each.refit.shift, each.projection.weight @ measured.mean)
