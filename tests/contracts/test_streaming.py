"""Streamed attention gives what matrices of weights give: every analysis, every architecture, padding included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from headscope.data.batching import BatchingOptions
from headscope.data.encoded import Batch, Side
from headscope.engine.base import ANALYSES, READS, Analysis, Attention, HeadBatch
from headscope.engine.heads import streamed_rows
from headscope.engine.heads.observed import ObservedBatch
from headscope.engine.plan import analyze
from headscope.engine.result import AnalysisResult
from headscope.errors import HeadscopeError
from headscope.heads import Site
from headscope.model.attention import AttentionCall
from headscope.model.capture import observing
from headscope.model.discovery import AttentionSite
from headscope.model.streaming import context, lazy_mask, statistics, visibility
from headscope.model.streaming.context import streaming
from tests.contracts.architectures import ARCHITECTURES, Architecture, build, inputs_of, logits
from tests.oracles import tiny
from tests.oracles.run_options import run_options

KINDS = ("bert", "mistral", "gemma", "t5")
RANKS = torch.tensor([(17 * number) % 53 * 13 for number in range(53)])
OPTIONS = run_options(ranks=RANKS, frequencies="made", parse="made", shapley_samples=1, ig_steps=2)
LENGTHS, TARGETS = (7, 3, 5), (5, 2, 3)  # the middle row is the shortest
HALF = 0.1
"""Largest difference of entropies (nats) and weights: only dense weights are rounded to the model's type."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three queries and five keys, so that tiny texts have many."""
    for module in (streamed_rows, statistics, context):
        monkeypatch.setattr(module, "LEAST", 3)
        monkeypatch.setattr(module, "CELLS", 1)
    for module in (lazy_mask, visibility):
        monkeypatch.setattr(module, "BLOCK", 1)
    monkeypatch.setattr(statistics, "COLUMNS", 5)
    monkeypatch.setattr(context, "QUERIES", 2)


def test_every_analysis_says_what_it_reads() -> None:
    assert all(cls.reads in READS for _, cls in ANALYSES)
    assert Analysis.reads == "matrix", "what an analysis that says nothing may do"


# Analyses.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_blocks")
def test_analyses_give_the_same_streamed_and_dense(kind: str) -> None:
    checkpoint, corpus = tiny.checkpoint(kind, 7), tiny.corpus(7, count=9, target=tiny.KINDS[kind].two_sided)
    passing = {name: cls for name, cls in ANALYSES if cls.passes}  # the others see no batch of text
    tried = {name: cls for name, cls in passing.items() if kind == "bert" or cls.explain is Analysis.explain}

    def study(attention: Attention, *, without: frozenset[str] = frozenset()) -> AnalysisResult:
        return analyze(
            checkpoint,
            corpus,
            analyses=[cls for name, cls in tried.items() if name not in without],
            options=replace(OPTIONS, attention=attention),
            batching=BatchingOptions(tokens=61),
            replicates=11,
        )

    streamed = study("streamed")
    matrix = frozenset(name for name, cls in tried.items() if cls.reads == "matrix")
    omitted = {left_out.analysis for left_out in streamed.left_out if "needs the matrix of weights" in left_out.why}
    assert omitted == matrix != frozenset() and streamed.streamed == streamed.sentences == 9
    dense = study("dense", without=matrix)
    assert dense.streamed == 0
    same_study(streamed, dense)


def same_study(found: AnalysisResult, expected: AnalysisResult) -> None:
    """All numbers, labels and texts."""
    assert found.labels == expected.labels and found.unsupported == expected.unsupported
    assert found.tables.keys() == expected.tables.keys() and found.arrays.keys() == expected.arrays.keys()
    pd.testing.assert_frame_equal(found.heads, expected.heads, check_exact=False, atol=1e-9, rtol=0)
    for name, table in expected.tables.items():
        pd.testing.assert_frame_equal(found.tables[name], table, check_exact=False, atol=1e-9, rtol=0, obj=name)
    for name, array in expected.arrays.items():
        np.testing.assert_allclose(found.arrays[name], array, atol=1e-9, rtol=0, err_msg=name)


def test_long_sentences_are_streamed_and_short_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, corpus = tiny.checkpoint("mistral", 7), tiny.corpus(7, count=9)
    monkeypatch.setattr("headscope.engine.runner.LONG", 11)
    chosen = [ANALYSES.get(name) for name in ("confidence", "confidence.pairwise")]
    batching = BatchingOptions(tokens=1)
    auto = analyze(checkpoint, corpus, analyses=chosen, options=OPTIONS, batching=batching, replicates=11)
    lengths = [len(ids) for ids in checkpoint.tokenizer([sentence.source for sentence in corpus])["input_ids"]]
    long = sum(length > 11 for length in lengths)
    assert 0 < auto.streamed == long < auto.sentences
    dense = analyze(
        checkpoint,
        corpus,
        analyses=chosen,
        options=replace(OPTIONS, attention="dense"),
        batching=batching,
        replicates=11,
    )
    np.testing.assert_allclose(auto.heads["confidence"], dense.heads["confidence"], atol=1e-12)
    assert any(f"has none of {long} sentences" in remark for remark in auto.remarks)
    assert not np.allclose(auto.heads["confidence_pairwise"], dense.heads["confidence_pairwise"])


def test_an_analysis_that_declares_too_little_is_refused() -> None:
    class Greedy(Analysis):
        name, summary, reads = "greedy", "reads the matrix", "statistics"

        def observe(self, heads: HeadBatch) -> Any:
            return {"greedy": heads.over_queries(heads.weights.amax(dim=-1))}

    checkpoint, corpus = tiny.checkpoint("bert", 7), tiny.corpus(7, count=3)
    options = replace(OPTIONS, attention="streamed")
    with pytest.raises(HeadscopeError, match=r"weights of \d+ × \d+ positions, which are streamed; .* reads = "):
        analyze(checkpoint, corpus, analyses=[Greedy], options=options, replicates=11)


# Architectures.


def observed(
    architecture: Architecture, inputs: dict[str, Tensor], *, dtype: str = "float32", streamed: bool
) -> dict[tuple[Site, int], HeadBatch]:
    """The heads of every call in a pass over the inputs."""
    sides = [
        Side(inputs[f"{side}input_ids"], real, real & (inputs[f"{side}input_ids"] % 7 == 0))
        for side in ("", "decoder_")
        if f"{side}input_ids" in inputs
        for real in [inputs[f"{side}attention_mask"].bool()]
    ]
    batch = Batch(torch.arange(len(sides[0].ids)), 0, sides[0], sides[1] if len(sides) > 1 else None)
    seen, heads = ObservedBatch(batch, keep_special=False), {}

    def see(attention_site: AttentionSite, call: AttentionCall) -> None:
        assert (call.made_weights is None) is streamed
        heads[attention_site.site, attention_site.layer] = seen.heads(attention_site, call)

    model = build(architecture, dtype=dtype)
    with observing(model, see), streaming() if streamed else nullcontext():
        logits(model, inputs, use_cache=False)
    return heads


def answers(heads: HeadBatch) -> Iterator[tuple[str, Tensor]]:
    """What rows answer, of counted queries only: by name, [b h t …]."""
    noise = torch.Generator().manual_seed(11)
    columns = torch.rand(*heads.keys.shape, 2, generator=noise)
    earlier = torch.rand(len(heads.keys), heads.queries.shape[1], heads.keys.shape[1], generator=noise) < 0.4
    on_pairs, any_key = heads.weight_on_pairs("random", lambda queries: earlier[:, queries])
    values = {
        "context": heads.context,
        "max_weight": heads.max_weight,
        "entropy": heads.entropy,
        "weight_on": heads.weight_on(columns),
        "visible_on": heads.visible_on(columns)[:, None],
        "on_pairs": on_pairs,
        "argmax_position": heads.argmax_position.float(),
        "any_key": any_key[:, None].float(),
    }
    for name, value in values.items():
        yield name, value.transpose(1, 2)[heads.queries].double()


def assert_same_answers(found: HeadBatch, expected: HeadBatch, *, within: float) -> None:
    half = within > 1e-3
    for (name, streamed), (_, dense) in zip(answers(found), answers(expected), strict=True):
        if name == "context":
            scale = max(1.0, dense.abs().max().item())
            assert (streamed - dense).abs().max() <= scale * within, name
        elif not (half and name == "argmax_position"):  # rounded weights tie where others do not
            assert (streamed - dense).abs().max() <= within, name


texts = pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a.task != "picture"], ids=lambda architecture: architecture.name
)


@texts
@pytest.mark.usefixtures("small_blocks")
def test_rows_of_every_architecture(architecture: Architecture) -> None:
    for left in (False, True):
        if left and architecture.left == "no":
            continue
        inputs = inputs_of(architecture, lengths=LENGTHS, targets=TARGETS, left=left)
        streamed, dense = (observed(architecture, inputs, streamed=each) for each in (True, False))
        assert streamed.keys() == dense.keys() == architecture.layout.keys()
        for place, heads in streamed.items():
            assert_same_answers(heads, dense[place], within=1e-5)


@texts
def test_rows_in_half_precision(architecture: Architecture) -> None:
    inputs = inputs_of(architecture, lengths=LENGTHS, targets=TARGETS)
    first = min(architecture.layout, key=lambda place: place[1])  # later layers see other states, which differ by more
    streamed, dense = (observed(architecture, inputs, dtype="bfloat16", streamed=each) for each in (True, False))
    assert_same_answers(streamed[first], dense[first], within=HALF)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
@pytest.mark.usefixtures("small_blocks")
def test_gradients_pass_through_streamed_contexts(name: str) -> None:
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    inputs = inputs_of(architecture, lengths=LENGTHS, targets=TARGETS)
    gradients = []
    for mode in (streaming, nullcontext):
        model = build(architecture, dtype="float64")
        with observing(model, lambda *_: None), mode():
            model(**inputs, use_cache=False).logits[0].square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for parameter, expected in gradients[1].items():
        assert (gradients[0][parameter] - expected).abs().max() <= 1e-9 * max(1.0, expected.abs().max().item())


def test_calls_without_weights_say_so() -> None:
    architecture = ARCHITECTURES[0]
    model = build(architecture)
    calls: list[AttentionCall] = []
    with observing(model, lambda _, call: calls.append(call)), streaming():
        logits(model, inputs_of(architecture))
    with pytest.raises(HeadscopeError, match=r"7 × 7 positions .* --attention dense"):
        calls[0].weights.sum()
