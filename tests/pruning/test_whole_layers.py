"""Whole layers instead of heads, against models whose list of layers is shorter."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch

from headscope.evaluation.before_after import quality_change, question
from headscope.evaluation.model_inputs import texts
from headscope.formats.size import flops
from headscope.model.prefix_cache import index_layers
from headscope.pruning.removal.whole_layers import layer_influence, measure_whole_layers, passing_over
from tests.oracles import speakers

LISTS = {"bert": "bert.encoder.layer", "llama": "model.layers"}


@pytest.mark.parametrize("kind", LISTS)
def test_influence_is_of_what_a_layer_reads_and_puts_out(kind: str) -> None:
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=7)
    layer_index: Any = index_layers(checkpoint.model)
    influence, expected = layer_influence(checkpoint, corpus, layer_index), dict[int, list[torch.Tensor]]()
    for sentence in corpus:  # one at a time: no padding
        ids = torch.tensor([checkpoint.encode([sentence.source], side="source", limit=99)[0].ids])
        with torch.no_grad():
            states = checkpoint.model(ids, output_hidden_states=True).hidden_states
        for row, (before, after) in enumerate(pairwise(states)):
            expected.setdefault(row, []).append(1 - torch.cosine_similarity(before[0], after[0], dim=-1))
    for (_, row), value in influence.items():
        if kind == "bert" or row + 1 < len(influence):  # the last state of the other has gone through a norm
            assert value == pytest.approx(float(torch.cat(expected[row]).mean()), rel=1e-9)


@pytest.mark.parametrize("kind", LISTS)
def test_a_layer_that_is_passed_over_is_not_there(kind: str) -> None:
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=7)
    asked = question(checkpoint, corpus)
    feed = texts(checkpoint, None, None, sentences=3).feeds[0]
    found = measure_whole_layers(checkpoint, corpus, 1, [asked, asked], feed)
    assert found is not None and len(found.layers) == 1 and found.quality == found.elsewhere
    influence = layer_influence(checkpoint, corpus, index_layers(checkpoint.model))  # type: ignore[arg-type]
    row = min(influence, key=influence.__getitem__)[1]
    assert found.layers == (str(row),)
    shorter = copy.deepcopy(checkpoint.model)
    layers: Any = shorter.get_submodule(LISTS[kind])
    assert found.parameters == sum(weights.numel() for weights in layers[row].parameters())
    assert found.cache == (kind == "llama") / len(layers)
    ids = torch.tensor([checkpoint.encode([next(iter(corpus)).source], side="source", limit=99)[0].ids])
    passed = passing_over(checkpoint.model, index_layers(checkpoint.model), [(0, row)])  # type: ignore[arg-type]
    del layers[row]
    with torch.no_grad():
        assert torch.equal(shorter(ids, use_cache=False)[0], passed(ids, use_cache=False)[0])
    counts = [flops(checkpoint.with_model(model), feed)["all"] for model in (checkpoint.model, shorter)]
    assert found.flops == pytest.approx(1 - counts[1] / counts[0])
    without = quality_change(checkpoint, checkpoint.with_model(passed), asked)
    assert found.quality == without.after.value != without.before.value


def test_what_cannot_be_compared_is_not() -> None:
    checkpoint, corpus = speakers.checkpoint("llama"), speakers.corpus("llama", count=7)
    asked = question(checkpoint, corpus)
    parameters = sum(weights.numel() for weights in checkpoint.model.parameters())
    feed = texts(checkpoint, None, None, sentences=3).feeds[0]
    assert measure_whole_layers(checkpoint, corpus, parameters, [asked], feed) is None, "no layer would be left"
    pairs = speakers.checkpoint("marian"), speakers.corpus("marian", count=7)
    translated = question(*pairs, metric="bleu")
    assert measure_whole_layers(*pairs, 1, [translated], feed) is None
