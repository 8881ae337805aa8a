"""Refits for the contexts that a pruned model gives, against one call of lstsq with a row for every token."""

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.pruning.closed_form.bench import RefitBench
from headscope.pruning.closed_form.compensate import CalibrationText, RefittedCopy, compensate
from headscope.pruning.closed_form.moments import collect_moments
from headscope.pruning.closed_form.sequential import sequential_refits
from headscope.pruning.options.shared import Refit
from tests.contracts.architectures import CATALOGUE
from tests.oracles import closed_form as oracle
from tests.oracles import speakers

pytestmark = pytest.mark.slow

REMOVED = {
    "bert": ("encoder-self.0.1", "encoder-self.1.0", "encoder-self.1.2"),
    "llama": ("decoder-self.0.0", "decoder-self.0.1", "decoder-self.0.2"),
    "marian": ("encoder-self.0.2", "decoder-self.0.1", "cross.1.4"),
    "native-post": ("encoder-self.0.1", "cross.0.0"),
}


@cache
def removed(kind: str) -> tuple[HeadId, ...]:
    return tuple(map(HeadId.parse, REMOVED[kind]))


def contexts(checkpoint: Checkpoint, kind: str) -> dict[tuple[Any, int], Any]:
    """The inputs of every output projection [n m], sentence by sentence."""
    return oracle.contexts(kind, checkpoint, texts(kind))


def texts(kind: str) -> Any:
    return speakers.corpus(kind, count=17)


@pytest.mark.parametrize(
    ("kind", "residual"), [("bert", False), ("bert", True), ("llama", True), ("marian", True), ("native-post", False)]
)
def test_each_module_is_the_least_squares_solution_for_its_inputs(kind: str, residual: bool) -> None:
    checkpoint = speakers.checkpoint(kind)
    refits = sequential_refits(checkpoint, texts(kind), removed(kind), Refit(damping=1e-3), residual=residual)
    intact, stream = contexts(checkpoint, kind), oracle.streams(kind, checkpoint, texts(kind).read())
    for number, refit in enumerate(refits):
        pruned = checkpoint.with_model(RefittedCopy.of(checkpoint, refits[:number]).model)
        (site_layer,) = refit.projection.site_layers
        inputs, weight = contexts(pruned, kind)[site_layer], refit.projection.weight.numpy()
        heads = [head for head in removed(kind) if (head.site, head.layer) == site_layer]
        columns = refit.projection.columns(heads).tolist()
        targets = intact[site_layer] @ weight.T
        if residual:
            targets += stream[site_layer] - oracle.streams(kind, pruned, texts(kind).read())[site_layer]
        expected, shift = oracle.refit_to(
            inputs, targets, weight, columns, damping=refit.refit.damping, affine=refit.projection.has_bias
        )
        assert np.abs(refit.refit.weight.numpy() - expected).max() < 1e-8
        assert np.abs(refit.refit.shift.numpy() - shift).max() < 1e-8
        errors = targets - inputs @ expected.T - shift
        energy = (intact[site_layer] @ weight.T) ** 2
        assert refit.error == pytest.approx(float(errors.__pow__(2).sum() / energy.sum()), rel=1e-7)
        assert bool(columns) is (refit.error_without > 0)
        assert refit.residual is residual


BLOCKS = {
    "bert": (r"layer\.\d\.output\.dense$", r"layer\.\d\.output\.LayerNorm$"),
    "native-post": (r"ffn\.outer$", r"ffn_norm$"),
}
"""The last linear layers of feed-forward blocks, and the norms that read the sums with their outputs."""


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("in_turn", [True, False], ids=["attention too", "after attention"])
def test_outputs_of_feed_forward_blocks_are_refitted(kind: str, in_turn: bool) -> None:
    checkpoint = speakers.checkpoint(kind)
    options = Refit(damping=1e-3, feed_forward=True, sequential=in_turn)
    refits = RefitBench(checkpoint, CalibrationText(texts(kind), texts(kind)), options).refits(removed(kind), options)
    intact = record_blocks(checkpoint, kind)
    numbers = [number for number, refit in enumerate(refits) if refit.projection.owner in intact]
    assert [refits[number].projection.owner for number in numbers] == list(intact)
    assert set(numbers) < set(range(len(refits))) and refits[0].projection.owner not in intact
    assert in_turn or numbers == [*range(len(refits) - len(intact), len(refits))]
    for number in numbers:
        refit, owner = refits[number], refits[number].projection.owner
        before = checkpoint.with_model(RefittedCopy.of(checkpoint, refits[:number]).model)
        inputs, outputs, sums = record_blocks(before, kind)[owner]
        bias = checkpoint.model.get_submodule(owner).get_parameter("bias").detach().numpy()
        targets = intact[owner][2] - (sums - outputs) - bias
        weight = refit.projection.weight.numpy()
        expected, shift = oracle.refit_to(inputs, targets, weight, [], damping=refit.refit.damping, affine=True)
        if not in_turn:  # blocks alone go half the way
            expected, shift = (expected + weight) / 2, shift / 2
        assert np.abs(refit.refit.weight.numpy() - expected).max() < 1e-8
        assert np.abs(refit.refit.shift.numpy() - shift).max() < 1e-8
        assert refit.refit.damping > 0.4 * np.cov(inputs.T).trace() / len(weight.T) and refit.residual
        assert 0 < refit.error < refit.error_without


def record_blocks(checkpoint: Checkpoint, kind: str) -> dict[str, list[Any]]:
    """Inputs, outputs and the next norm's inputs [n ·] of every block, sentence by sentence without padding."""
    arrays: dict[str, list[list[Any]]] = {}
    last: list[str] = []

    def linear(name: str, inputs: Any, output: Any) -> None:
        last[:] = [name]
        for rows, values in zip(arrays.setdefault(name, [[], [], []]), (inputs[0], output), strict=False):
            rows.append(values[0].detach().numpy())

    parts = dict(checkpoint.model.named_modules())
    handles = []
    for name, part in parts.items():
        if re.search(BLOCKS[kind][0], name):
            handles.append(part.register_forward_hook(lambda _, x, y, name=name: linear(name, x, y)))
        elif re.search(BLOCKS[kind][1], name):
            handles.append(part.register_forward_pre_hook(lambda _, x: arrays[last[0]][2].append(x[0][0].numpy())))
    with torch.no_grad():
        for sentence in texts(kind).read():
            speakers.make_example(kind, sentence, hide=False).logits(checkpoint)
    for handle in handles:
        handle.remove()
    return {name: [np.concatenate(rows) for rows in columns] for name, columns in arrays.items()}


def test_a_stream_that_cannot_be_made_up_for_is_left_out_and_said_so() -> None:
    """Gemma 2 norms the output of attention before it is added to the residual stream."""
    checkpoint = speakers.wrap_model(CATALOGUE["gemma2"].model, speakers.SPEAKERS["llama"])
    heads = [HeadId.parse(f"decoder-self.0.{head}") for head in (0, 1, 2)]
    text = CalibrationText(texts("llama"), texts("llama").first(8))
    options = Refit(method="least-squares", sequential=True)
    result = RefitBench(checkpoint, text, options).compensation(heads)
    assert [refit.residual for refit in result.refits] == [False, False]
    assert "2 of 2 attention modules are refitted to their own outputs only" in result.remarks()[0]
    assert result.options.damping == 0.1, "the text is short"
    at_outputs = sequential_refits(checkpoint, texts("llama"), heads, result.options, residual=False)
    assert torch.equal(at_outputs[1].refit.weight, result.refits[1].refit.weight)


@pytest.mark.parametrize("kind", ["llama", "marian"])
def test_the_first_module_is_refitted_as_from_the_intact_model(kind: str) -> None:
    checkpoint = speakers.checkpoint(kind)
    (first, *_) = sequential_refits(checkpoint, texts(kind), removed(kind))
    at_once = {
        refit.projection.site_layers: refit
        for refit in compensate(checkpoint, collect_moments(checkpoint, texts(kind)), removed(kind))
    }[first.projection.site_layers]
    assert (first.refit.weight - at_once.refit.weight).abs().max() < 1e-8
    assert first.error == pytest.approx(at_once.error, rel=1e-6)
    assert first.error_without == pytest.approx(at_once.error_without, rel=1e-9)
