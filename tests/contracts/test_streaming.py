"""Streamed attention equals dense attention weights: every analysis, every architecture, padding included."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from headscope.data.batching import batches
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch, Side
from headscope.engine import plan
from headscope.engine.base import ANALYSES, Analysis, Attention, HeadBatch
from headscope.engine.heads.head_batch import ObservedBatch
from headscope.errors import HeadscopeError
from headscope.heads import SiteLayer
from headscope.model import attention
from headscope.model import streaming as stream
from headscope.model.attention import AttentionCall, ScoreOptions, attention_scores, attention_weights, repeat_groups
from headscope.model.discovery import AttentionSite
from headscope.model.streaming import streaming
from headscope.model.taps import observing
from headscope.results.study import Study
from tests.contracts.architectures import ARCHITECTURES, BY_NAME, Architecture, build, inputs_of, logits, text_only
from tests.makers import wrappers
from tests.makers.studies import study_of
from tests.oracles import tiny
from tests.oracles.shuffled import join_batches

RANKS = torch.tensor([(17 * number) % 53 * 13 for number in range(53)])
OPTIONS: dict[str, Any] = {"ranks": RANKS, "frequencies": "made", "parse": "made"}
OPTIONS |= {"shapley_samples": 1, "ig_steps": 2, "explained_steps": 1}
FAMILIES = ("bert", "llama", "gpt_oss", "gemma2", "t5")
"""A model a case of streaming: both directions, groups, sinks, caps with windows, biases with cross attention."""
WITH_EXPLANATIONS = ("bert", "gpt_oss")
"""Architectures on which analyses with passes of their own run too, which take most of the time."""
ATOL = 1e-6
"""Largest difference in float64: norms of most decoders compute in float32 whatever the type of the model."""
LENGTHS, TARGETS = (7, 3, 5), (5, 2, 3)  # the middle row is the shortest
EXACT = 1e-5
"""Largest difference in half precision to a float64 matrix of the same queries and keys."""
HALF_TOLERANCE = {"bfloat16": 0.03, "float16": 0.004}
"""Largest difference of a first layer to the model's own matrix, which is rounded to the model's type."""
BACKWARD = 0.02
"""The same for a backward pass, which rounds to that type, as a share of the largest value."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three queries, so that tiny texts have many."""
    _blocks(monkeypatch, queries=3, masked=2)


@pytest.fixture
def one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whole studies: blocks of seven queries, one batch of text, few random tokens."""
    _blocks(monkeypatch, queries=7, masked=5)
    for name, number in (("RANDOM_SEQUENCES", 3), ("RANDOM_BLOCK", 5), ("FOLDS", 3), ("batches", _one_batch)):
        monkeypatch.setattr(plan, name, number)


def _one_batch(*arguments: Any, **options: Any) -> Iterator[Batch]:
    single = sorted(batches(*arguments, **options | {"tokens": 1}), key=lambda batch: int(batch.indices))
    batch = join_batches(single, fold=0)
    lengths = batch.source.real.sum(dim=1).tolist()
    assert lengths[1] < min(lengths[0], lengths[2]), "padding in the middle"
    yield batch


def _blocks(monkeypatch: pytest.MonkeyPatch, *, queries: int, masked: int) -> None:
    monkeypatch.setattr(stream, "MIN_QUERIES", queries)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1)
    monkeypatch.setattr(stream, "MAX_MASKED_QUERIES", masked)


def test_every_analysis_says_what_it_reads() -> None:
    assert all(cls.reads in ("contexts", "rows", "matrix") for _, cls in ANALYSES)
    assert Analysis.reads == "matrix", "what an analysis that says nothing may do"


def both_studies(
    architecture: Architecture, *, dtype: str, explain: bool, exclude_sinks: bool = False
) -> tuple[Study, Study]:
    """All analyses that stream, on three sentences in one batch: streamed, and dense."""
    two_sided = architecture.task == "seq2seq"
    end = [] if architecture.task == "causal" else [tiny.END]
    checkpoint = wrappers.hugging_face(
        build(architecture, dtype=dtype), tiny.tokenizer([] if two_sided else [tiny.START], end)
    )
    shortest, *_, long, longest = sorted(
        tiny.corpus(7, count=6, target=two_sided), key=lambda sentence: len(sentence.source)
    )
    sentences = [sentence._replace(number=number) for number, sentence in enumerate((long, shortest, longest))]
    corpus = Corpus("tiny", 3, "0" * 40, lambda: iter(sentences), has_target=two_sided, has_parses=True)
    analyses = [
        cls
        for _, cls in ANALYSES
        if cls.passes and cls.reads != "matrix" and (explain or cls.explain is Analysis.explain)
    ]

    def study(attention: Attention) -> Study:
        options = OPTIONS | {"attention": attention, "exclude_sinks": exclude_sinks}
        return study_of(checkpoint, corpus, *analyses, replicates=3, **options)

    streamed, dense = study("streamed"), study("dense")
    assert streamed.sentences == dense.sentences == 3
    assert "attention: streamed for 3 sentences" in streamed.remarks
    assert not any(remark.startswith("attention: streamed") for remark in dense.remarks)
    return streamed, dense


@pytest.mark.parametrize(
    ("name", "exclude_sinks"),
    [("bert", False), ("gpt_oss", False), ("gemma2", True), ("modernbert", False), ("t5", True)],
)
@pytest.mark.usefixtures("one_batch")
def test_analyses_give_the_same_streamed_and_dense(name: str, exclude_sinks: bool) -> None:
    explain = name in WITH_EXPLANATIONS and not exclude_sinks
    streamed, dense = both_studies(BY_NAME[name], dtype="float64", explain=explain, exclude_sinks=exclude_sinks)
    assert ("beyond_sinks" in dense.heads) == exclude_sinks
    assert streamed.labels == dense.labels and streamed.unsupported == dense.unsupported
    assert streamed.tables.keys() == dense.tables.keys() and streamed.arrays.keys() == dense.arrays.keys()
    pd.testing.assert_frame_equal(streamed.heads, dense.heads, check_exact=False, atol=ATOL, rtol=0)
    for name, table in dense.tables.items():
        pd.testing.assert_frame_equal(streamed.tables[name], table, check_exact=False, atol=ATOL, rtol=0, obj=name)
    for name, array in dense.arrays.items():
        np.testing.assert_allclose(streamed.arrays[name], array, atol=ATOL, rtol=0, err_msg=name)


def test_what_needs_the_matrix_is_left_out_by_name() -> None:
    matrix = [cls for _, cls in ANALYSES if cls.passes and cls.reads == "matrix"]
    assert [cls.name for cls in matrix] == ["lrp"]
    checkpoint, corpus = tiny.checkpoint("bert", 7), tiny.corpus(7, count=3)
    result = study_of(checkpoint, corpus, *matrix, "confidence", attention="streamed", **OPTIONS)
    assert [left_out.analysis for left_out in result.left_out if "needs the matrix of weights" in left_out.why] == [
        "lrp"
    ]


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("t5", "float16")])
@pytest.mark.usefixtures("one_batch")
def test_analyses_in_half_precision(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against matrices of the same queries and keys in float64, so that the model's own rounding does not count."""
    monkeypatch.setattr(attention, "dense_context", exact_weights)
    streamed, dense = both_studies(BY_NAME[name], dtype=dtype, explain=False)
    assert streamed.labels == dense.labels
    for column in map(str, dense.heads):
        actual, expected = streamed.heads[column], dense.heads[column]
        if column.startswith(("gradient", "taylor")):
            assert (actual - expected).abs().max() <= BACKWARD * expected.abs().max(), column
        elif column.startswith(("explained", "description")):  # fits to three sentences, which no rounding leaves alone
            assert actual.isna().equals(expected.isna())
        elif pd.api.types.is_float_dtype(expected):
            np.testing.assert_allclose(actual, expected, atol=EXACT, rtol=0, err_msg=column)
        else:
            assert actual.equals(expected), column


def exact_weights(
    module: object, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions, dropout: float
) -> tuple[Tensor, Tensor]:
    """The contexts of the streamed path, with weights made in float64."""
    bias, sinks = (None if part is None else part.double() for part in (options.position_bias, options.sinks))
    exact = replace(options, position_bias=bias)
    scores = attention_scores(query.double(), repeat_groups(key.double(), query.shape[1]), exact)
    return stream.streamed_context(query, key, value, options), attention_weights(scores, sinks).float()


def test_long_sentences_are_streamed_and_short_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, corpus = tiny.checkpoint("mistral", 7), tiny.corpus(7, count=9)
    monkeypatch.setattr("headscope.engine.runner.LONG", 11)
    auto = study_of(checkpoint, corpus, "confidence", Matrix, tokens=1, **OPTIONS)
    lengths = [len(ids) for ids in checkpoint.tokenizer([sentence.source for sentence in corpus])["input_ids"]]
    long = sum(length > 11 for length in lengths)
    assert 0 < long < auto.sentences and any(
        remark.startswith(f"attention: streamed for {long} sentence") for remark in auto.remarks
    )
    dense = study_of(checkpoint, corpus, "confidence", Matrix, tokens=1, attention="dense", **OPTIONS)
    np.testing.assert_allclose(auto.heads["confidence"], dense.heads["confidence"], atol=1e-12)
    assert any(f"has none of {long} sentences" in remark for remark in auto.remarks)
    assert not np.allclose(auto.heads["matrix"], dense.heads["matrix"])


class Matrix(Analysis):
    name, summary = "matrix", "reads the matrix"

    def observe(self, heads: HeadBatch) -> Any:
        return {"matrix": heads.over_queries(heads.weights.amax(dim=-1))}


def test_an_analysis_that_declares_too_little_is_refused() -> None:
    class Greedy(Matrix):
        reads = "contexts"

    checkpoint, corpus = tiny.checkpoint("bert", 7), tiny.corpus(7, count=3)
    with pytest.raises(HeadscopeError, match="reads = "):
        study_of(checkpoint, corpus, Greedy, attention="streamed", **OPTIONS)


def observe_heads(
    architecture: Architecture, inputs: dict[str, Tensor], *, dtype: str = "float32", streamed: bool
) -> dict[SiteLayer, HeadBatch]:
    """The heads of every call in a pass over the inputs."""
    sides = [
        Side(inputs[f"{side}input_ids"], real, real & (inputs[f"{side}input_ids"] % 7 == 0))
        for side in ("", "decoder_")
        if f"{side}input_ids" in inputs
        for real in [inputs[f"{side}attention_mask"].bool()]
    ]
    batch = Batch(torch.arange(len(sides[0].ids)), 0, sides[0], sides[1] if len(sides) > 1 else None)
    observer, heads = ObservedBatch(batch), {}

    def see(attention_site: AttentionSite, call: AttentionCall) -> None:
        assert (call.made_weights is None) is streamed
        heads[attention_site.site, attention_site.layer] = observer.heads(attention_site, call)

    model = build(architecture, dtype=dtype)
    with observing(model, see), streaming() if streamed else nullcontext():
        logits(model, inputs, use_cache=False)
    return heads


def answers(heads: HeadBatch) -> Iterator[tuple[str, Tensor]]:
    """The values of rows by name, [b h t …], of counted queries only."""
    noise = torch.Generator().manual_seed(11)
    columns = torch.rand(*heads.keys.shape, 2, generator=noise)
    earlier = torch.rand(len(heads.keys), heads.queries.shape[1], heads.keys.shape[1], generator=noise) < 0.4
    parts: dict[str, list[Tensor]] = {"context": [heads.context.transpose(1, 2)]}
    for block in heads.in_blocks():

        def of_block(keys: slice, queries: slice = block.span) -> Tensor:
            return earlier[:, queries, keys]

        on_pairs, any_key = block.weight_on_pairs("random", of_block)
        on_own, _ = block.weight_on_pairs(None, of_block, every_key=True)
        values = {
            "max_weight": block.maximum.weight,
            "entropy": block.entropy,
            "weight_on": block.weight_on(columns),
            "weights": block.weights,
            "visible_on": block.visible_on(columns)[:, None],
            "on_pairs": on_pairs,
            "on_own": on_own,
            "argmax_position": block.maximum.position,
            "offsets": block.maximum.position - block.positions,
            "any_key": any_key[:, None],
        }
        for name, value in values.items():
            parts.setdefault(name, []).append(value.transpose(1, 2))
    for name, blocks in parts.items():
        yield name, torch.cat(blocks, dim=1)[heads.queries].double()


def assert_same_answers(actual: HeadBatch, expected: HeadBatch, *, atol: float, is_rounded: bool = False) -> None:
    for (name, streamed), (_, dense) in zip(answers(actual), answers(expected), strict=True):
        if name == "context":
            scale = max(1.0, dense.abs().max().item())
            assert (streamed - dense).abs().max() <= scale * atol, name
        elif not (is_rounded and name in ("argmax_position", "offsets")):  # rounded weights tie where others do not
            assert (streamed - dense).abs().max() <= atol, name


@text_only
@pytest.mark.usefixtures("small_blocks")
def test_rows_of_every_architecture(architecture: Architecture) -> None:
    for left in (False, True):
        if left and architecture.left == "no":
            continue
        inputs = inputs_of(architecture, lengths=LENGTHS, targets=TARGETS, left=left)
        streamed, dense = (observe_heads(architecture, inputs, streamed=flag) for flag in (True, False))
        assert streamed.keys() == dense.keys() == architecture.layout.keys()
        for site_layer, heads in streamed.items():
            assert_same_answers(heads, dense[site_layer], atol=1e-5)


@pytest.mark.parametrize(("name", "dtype"), list(zip(FAMILIES, cycle(HALF_TOLERANCE), strict=False)))
def test_rows_in_half_precision(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = BY_NAME[name]
    inputs = inputs_of(architecture, lengths=LENGTHS, targets=TARGETS)
    first = min(architecture.layout, key=lambda key: key[1])  # later layers see other states, which differ by more
    streamed, dense = (observe_heads(architecture, inputs, dtype=dtype, streamed=flag) for flag in (True, False))
    assert_same_answers(streamed[first], dense[first], atol=HALF_TOLERANCE[dtype], is_rounded=True)
    monkeypatch.setattr(attention, "dense_context", exact_weights)
    for site_layer, heads in observe_heads(architecture, inputs, dtype=dtype, streamed=False).items():
        assert_same_answers(streamed[site_layer], heads, atol=EXACT)


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
    with pytest.raises(HeadscopeError, match=r"7 × 7.*--attention dense"):
        calls[0].weights.sum()
