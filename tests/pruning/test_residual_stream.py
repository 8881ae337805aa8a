"""The residual stream that outputs are added to, read off the operations of small models."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from headscope.errors import ConfigError
from headscope.evaluation.before_after import make_quality_task, quality_change
from headscope.evaluation.model_inputs import read_input_texts
from headscope.formats.size import count_flops
from headscope.model.prefix_cache import index_layers
from headscope.pruning.closed_form.output_projections import StreamTap
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from headscope.pruning.removal.whole_layers import layer_influence, measure_whole_layers, skip_layers
from tests.oracles import closed_form as oracle
from tests.oracles import head_outputs, speakers

Block = Callable[[Tensor, Tensor, Tensor], Tensor]
X, MLP = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(2, 3, 7, dtype=torch.float64)
norm = nn.LayerNorm(7, dtype=torch.float64)


def in_place(y: Tensor, x: Tensor, _: Tensor) -> Tensor:
    """The stream is overwritten by the sum, and the sum by what comes after."""
    x = x.clone()
    x += y
    return x.mul_(torch.zeros_like(x))


BLOCKS: dict[str, tuple[Block, Tensor | None]] = {
    "post-norm": (lambda y, x, mlp: norm(y + x), X),
    "pre-norm": (lambda y, x, mlp: (total := x + y) + norm(total), X),
    "parallel": (lambda y, x, mlp: norm(mlp + y + x), MLP + X),
    "in two shapes": (lambda y, x, mlp: norm((x.view(6, 7) + y.view(6, 7)).view(2, 3, 7)), X),
    "scaled": (lambda y, x, mlp: norm(x + y * 0.25), X / 0.25),
    "scaled by a tensor": (lambda y, x, mlp: norm(torch.tensor(0.25) * y + x), X / 0.25),
    "copied": (lambda y, x, mlp: norm(x.float() + y.float().clone()), X.float()),
    "dropout and slices of all": (lambda y, x, mlp: norm(x + nn.functional.dropout(y[:, :], 0.3, training=False)), X),
    "in place": (in_place, X),
    "norm first": (lambda y, x, mlp: x + norm(y), None),
    "part only": (lambda y, x, mlp: norm(x[:, :1] + y[:, :1]), None),
    "scaled by zero": (lambda y, x, mlp: norm(x + y * 0), None),
    "never read": (lambda y, x, mlp: norm(x), None),
    "broadcast": (lambda y, x, mlp: norm(y + x[:1]), None),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_stream_is_what_is_added_before_anything_else_reads(name: str) -> None:
    block, expected = BLOCKS[name]
    projection = nn.Linear(5, 7, dtype=torch.float64)
    norm.to(torch.float32 if name == "copied" else torch.float64)
    tap = StreamTap()
    with torch.no_grad(), tap.observing([projection]):
        for _ in range(2):
            block(projection(torch.randn(2, 3, 5, dtype=torch.float64)), X, MLP)
    first, second = tap.streams()
    for stream in (first, second):
        if expected is None:
            assert stream is None
        else:
            assert stream is not None and torch.equal(stream.view_as(expected), expected)
    assert tap.streams() == []


def test_one_operation_may_read_two_outputs() -> None:
    projection, tap = nn.Linear(5, 7, dtype=torch.float64), StreamTap()
    with torch.no_grad(), tap.observing([projection]):
        first, second = (projection(torch.randn(2, 3, 5, dtype=torch.float64)) for _ in range(2))
        norm.double()(first + second)
    streams = tap.streams()
    for stream, other in zip(streams, (second, first), strict=True):
        assert stream is not None and torch.equal(stream, other)


# The criterion that drops the attention of whole layers, against the streams of transformers' own layers.


def layer_scores(kind: str, heads: dict[int, list[int]]) -> dict[int, float]:
    """1 − mean cosine of x and x + y, sentence by sentence; a bias keeps the mean of what `heads` of a layer write."""
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=7)
    contexts, sums_read = oracle.contexts(kind, checkpoint, corpus), oracle.residual_sums(kind, checkpoint, corpus)
    scores = {}
    for (site, layer), (_, after) in sums_read.items():
        weight = head_outputs.matrix(kind, checkpoint, (site, layer), 3).numpy()
        width = weight.shape[1] // checkpoint.layout[site, layer]
        columns = [number * width + column for number in heads.get(layer, []) for column in range(width)]
        part = contexts[site, layer][:, columns] @ weight[:, columns].T
        if kind != "llama":
            part = part - part.mean(axis=0)
        streams = torch.from_numpy(after - part), torch.from_numpy(after)
        scores[layer] = float(1 - cosine_similarity(*streams, dim=1).mean())
    return scores


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_layers_go_whole_those_first_that_turn_the_stream_least(kind: str) -> None:
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=7)
    scores = criterion_named("layer-drop").scores(ScoringContext(checkpoint, corpus))
    layers = {layer: list(range(count)) for (_, layer), count in checkpoint.layout.items()}
    layer_totals = layer_scores(kind, layers)
    total, order = 0.0, sorted(scores, key=lambda head: scores[head])
    for layer in sorted(layer_totals, key=lambda layer: layer_totals[layer]):
        total += layer_totals[layer]
        of_layer = [scores[head] for head in order if head.layer == layer]
        assert max(of_layer) == pytest.approx(total, abs=1e-9)
        if len(set(of_layer)) == len(of_layer):  # heads that go one by one
            head_scores = [layer_scores(kind, {layer: [head.head]})[layer] for head in order if head.layer == layer]
            assert head_scores == sorted(head_scores)


def test_a_stream_that_cannot_be_told_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Gemma, whose outputs go through a norm before they are added."""
    checkpoint, corpus = speakers.checkpoint("llama"), speakers.corpus("llama", count=3)
    model: Any = checkpoint.model
    for layer in model.model.layers:
        attend = layer.self_attn.forward
        monkeypatch.setattr(
            layer.self_attn, "forward", lambda *a, attend=attend, **k: (attend(*a, **k)[0].tanh(), None)
        )
    with pytest.raises(ConfigError, match=r"layer-drop.*decoder-self\.0 cannot be told; rank by obs"):
        criterion_named("layer-drop").scores(ScoringContext(checkpoint, corpus))


# Whole layers instead of heads, against models whose list of layers is shorter.


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
    task = make_quality_task(checkpoint, corpus)
    feed = read_input_texts(checkpoint, None, None, sentences=3).feeds[0]
    measurement = measure_whole_layers(checkpoint, corpus, 1, [task, task], feed)
    assert measurement is not None and len(measurement.layers) == 1 and measurement.quality == measurement.elsewhere
    influence = layer_influence(checkpoint, corpus, index_layers(checkpoint.model))  # type: ignore[arg-type]
    row = min(influence, key=influence.__getitem__)[1]
    assert measurement.layers == (str(row),)
    shorter = copy.deepcopy(checkpoint.model)
    layers: Any = shorter.get_submodule(LISTS[kind])
    assert measurement.parameters == sum(weights.numel() for weights in layers[row].parameters())
    assert measurement.cache == (kind == "llama") / len(layers)
    ids = torch.tensor([checkpoint.encode([next(iter(corpus)).source], side="source", limit=99)[0].ids])
    skipping = skip_layers(checkpoint.model, index_layers(checkpoint.model), [(0, row)])  # type: ignore[arg-type]
    del layers[row]
    with torch.no_grad():
        assert torch.equal(shorter(ids, use_cache=False)[0], skipping(ids, use_cache=False)[0])
    counts = [count_flops(checkpoint.with_model(model), feed)["all"] for model in (checkpoint.model, shorter)]
    assert measurement.flops == pytest.approx(1 - counts[1] / counts[0])
    change = quality_change(checkpoint, checkpoint.with_model(skipping), task)
    assert measurement.quality == change.after.value != change.before.value


def test_what_cannot_be_compared_is_not() -> None:
    checkpoint, corpus = speakers.checkpoint("llama"), speakers.corpus("llama", count=7)
    task = make_quality_task(checkpoint, corpus)
    parameters = sum(weights.numel() for weights in checkpoint.model.parameters())
    feed = read_input_texts(checkpoint, None, None, sentences=3).feeds[0]
    assert measure_whole_layers(checkpoint, corpus, parameters, [task], feed) is None, "no layer would be left"
    pairs = speakers.checkpoint("marian"), speakers.corpus("marian", count=7)
    bleu_task = make_quality_task(*pairs, metric="bleu")
    assert measure_whole_layers(*pairs, 1, [bleu_task], feed) is None
