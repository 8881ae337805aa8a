"""Streaming heads: mixed attention against loops inside transformers, learnt gates, files that others read."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from headscope.analyses.streaming import (
    StreamingOptions,
    distillation_loss,
    learning_rate_share,
    streaming_keys,
    streaming_weights,
)
from headscope.data.corpus import Corpus, open_corpus
from headscope.data.template import Haystack, Passkeys
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import circuit, speakers, streaming

TASK: dict[str, Any] = {
    **{"streaming_sink": 1, "streaming_recent": 3, "streaming_steps": 30, "streaming_lr": 0.1},
    **{"streaming_lengths": (20, 30), "passkeys": 1, "passkey_length": 4, "passkey_words": circuit.WORDS[15:20]},
    **{"passkey_needle": "w24", "passkey_question": "w24"},
}


def words() -> Corpus:
    luck = random.Random(1)
    return open_corpus([" ".join(luck.choice(circuit.WORDS[:15]) for _ in range(3)) for _ in range(12)])


def run(its: Checkpoint, corpus: Corpus, **options: Any) -> Study:
    return study_of(its, corpus, "streaming", **TASK | options)


def test_streaming_attention_sees_the_first_and_the_last_keys() -> None:
    visible = streaming_keys(5, 5, sink=1, recent=2)
    assert visible.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 1, 1],
    ]
    assert torch.equal(streaming_keys(2, 5, sink=1, recent=2), visible[3:]), "with a cache"


def test_streaming_weights_are_a_softmax_of_their_own() -> None:
    torch.manual_seed(1)
    scores, visible = torch.randn(2, 3, 7, 7).double(), streaming_keys(7, 7, sink=2, recent=3)
    causal = torch.ones(7, 7).tril().bool()
    full = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    torch.testing.assert_close(streaming_weights(full, visible), expected)
    learnt = torch.randn(3).double()[None, :, None, None].expand(2, 3, 7, 1)  # a sink of the softmax
    with_sink = [
        torch.cat([each, learnt], -1) for each in (scores.masked_fill(~mask, -torch.inf) for mask in (causal, visible))
    ]
    full, expected = (each.softmax(-1)[..., :-1] for each in with_sink)
    torch.testing.assert_close(streaming_weights(full, visible, 1 - full.sum(-1)), expected)


@cache
def llama() -> Checkpoint:
    """Llama whose norms are computed in float64 too, for finite differences: all else is `speakers`'."""
    return speakers.checkpoint("llama")


@pytest.mark.parametrize("first", [4, 11])
def test_loss_is_that_of_loops(first: int) -> None:
    its, luck = llama(), np.random.default_rng(3)
    ids, gates = luck.integers(5, 50, size=13).tolist(), luck.random((2, 2))
    options = StreamingOptions(streaming_sink=2, streaming_recent=3, streaming_penalty=0.07)
    ours = {(Site.DECODER_SELF, layer): torch.tensor(gates[layer]) for layer in range(2)}
    loss = distillation_loss(its, ours, ids, first, options)
    their_gates = {layer: gates[layer].tolist() for layer in range(2)}
    expected = streaming.loss(its.model, their_gates, ids, first, sink=2, recent=3, penalty=0.07)
    assert loss.item() == pytest.approx(expected, rel=1e-5) and expected > 0.05
    whole = distillation_loss(its, {place: torch.ones(2) for place in ours}, ids, first, options)
    assert whole.item() == pytest.approx(0.07), "open gates are the model itself"


def test_learning_rate_rises_and_falls() -> None:
    shares = [learning_rate_share(step, 20) for step in range(20)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1] and shares[4:16] == [1] * 12
    assert (
        shares[16:] == [1, 0.75, 0.5, 0.25] and learning_rate_share(0, 2000) == 0.1 and learning_rate_share(0, 1) == 1
    )


@cache
def learnt() -> Study:
    return run(circuit.checkpoint(), words())


def test_the_induction_head_needs_far_keys_and_the_others_do_not() -> None:
    its = learnt()
    heads = its.heads.set_index(["layer", "head"]).full_attention
    assert heads[circuit.INDUCTION] > 0.7 and (heads.drop(circuit.INDUCTION) < 0.3).all() and not its.labels
    assert (its.heads.full_attention_low == its.heads.full_attention).all()


def test_passkeys_are_hidden_and_asked_for() -> None:
    stack = Haystack.read(words(), circuit.checkpoint(), length=30)
    task = Passkeys(count=2, length=3, words=("x", "y"), needle="the {ordinal} is", question="{ordinal}?")
    text, questions = task.hidden(stack, length=30, generator=random.Random(1))
    lines, asked = text.split("\n"), questions.split("\n")
    told = [line for line in lines if line.startswith("the ")]
    assert len(told) == 2 and [line.split()[1] for line in told] == ["first", "second"] and len(lines) == 12
    assert asked == [f"{name}? {line.split(' is ')[1]}" for name, line in zip(("first", "second"), told, strict=True)]
