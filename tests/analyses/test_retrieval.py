"""Heads for long texts: needles in haystacks and the budgets that follow; which heads need far keys."""

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from headscope.analyses.retrieval import Prompt, Trial, WrittenToken, continue_greedily, find_needle, head_capacities
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
from headscope.heads import HeadId, Site
from headscope.results.study import Study
from tests.contracts.architectures import CATALOGUE
from tests.makers.studies import study_of
from tests.oracles import circuit, retrieval, speakers, streaming

SITE_LAYER = (Site.DECODER_SELF, 0)
NEEDLE: dict[str, Any] = {
    **{"needle": "w20 w21 w22 w23 w24", "needle_answer": "w21 w22 w23 w24", "needle_question": "w20"},
    **{"needle_depths": 7, "needle_steps": 6, "haystack_lengths": (30, 40)},
}


def words(count: int = 15, *, vocabulary: int = 15) -> Corpus:
    """Sentences of three words, none of them the needle's."""
    rng = random.Random(1)
    return open_corpus([" ".join(rng.choice(circuit.WORDS[:vocabulary]) for _ in range(3)) for _ in range(count)])


def run(checkpoint: Checkpoint, corpus: Corpus, **options: Any) -> Study:
    return study_of(checkpoint, corpus, "retrieval", replicates=50, **NEEDLE | options)


@cache
def needle_study() -> Study:
    return run(circuit.checkpoint(), words(), kv_budget=128)


def test_the_needle_is_found_by_the_induction_head() -> None:
    study, induction = needle_study(), HeadId(Site.DECODER_SELF, *circuit.INDUCTION)
    assert study.labels == {induction: ["retrieval"]} and not study.unsupported
    heads = study.heads.set_index(["layer", "head"])
    assert heads.retrieval[circuit.INDUCTION] == 1 and (heads.retrieval.drop(circuit.INDUCTION) == 0).all()
    trials = study.tables["retrieval"]
    assert len(trials) == 14 and trials.written.str.startswith("w21 w22 w23 w24").all()
    assert trials.depth.is_monotonic_increasing is False and trials.length.nunique() == 2
    assert (trials.groupby("length").start.diff().dropna() > 0).all(), "deeper needles begin later"


def test_what_is_copied_twice_counts_once_but_in_the_authors_program() -> None:
    """At depth 1 the needle stands before the question, and its last word is followed by the first one again."""
    study = needle_study()
    last = study.tables["retrieval"].written.iloc[-1].split()
    assert last == ["w21", "w22", "w23", "w24", "w20", "w21"]
    program = study.heads.set_index(["layer", "head"]).retrieval_program[circuit.INDUCTION]
    scores = json.loads(text := study.files["retrieval/head_score.json"])
    assert set(scores) == {"0-0", "0-1", "1-0", "1-1"} and scores["1-0"][-1] == 1.25
    assert np.mean(scores["1-0"]) == pytest.approx(program) and text.count("\n") == 1


def test_budgets_sum_to_what_is_given() -> None:
    table = needle_study().tables["retrieval_capacity"]
    assert int(table["keys"].sum()) == 4 * (128 - 32)
    assert table["keys"].idxmax() == 2 and (table["keys"] >= 1).all()


@pytest.mark.parametrize("seed", range(5))
def test_budgets_are_those_of_the_rule_rounded_and_sum_up(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, budget, beta = rng.random(37), int(rng.integers(40, 400)), float(rng.uniform(1, 3))
    capacities, free = head_capacities(scores, budget=budget, beta=beta), budget - 32
    exact = scores / scores.sum() * (free // beta) * 37 + free - free // beta
    assert capacities.sum() == 37 * free and np.abs(capacities - exact).max() < 1
    assert head_capacities(np.zeros(5), budget=33).tolist() == [1] * 5


def trial(steps: list[tuple[int, int]], *, needle: list[int], start: int) -> Trial:
    """A trial of one head from (most attended position, token) of its steps."""
    prompt = Prompt([1] * start + needle + [2, 3], start, start + len(needle))
    tokens = []
    for number, (position, token) in enumerate(steps):
        weights = torch.zeros(1, len(prompt.ids) + number)
        weights[0, position] = 1
        tokens.append(WrittenToken(token, {SITE_LAYER: weights}, {SITE_LAYER: 0}))
    return Trial.of(prompt, tokens, depth=0.5)


def test_published_example() -> None:
    steps = [(10, 7), (11, 8), (3, 9), (12, 9)]
    first = trial(steps, needle=[7, 8, 9, 9], start=10)
    assert first.program_score(SITE_LAYER).item() == 3 / 4 and first.recall == 1
    second = trial([*steps, (12, 9)], needle=[7, 8, 9, 9], start=10)
    assert second.program_score(SITE_LAYER).item() == 1 and second.copies[SITE_LAYER].any(dim=0).sum() == 3


@cache
def decoder(kind: str) -> Checkpoint:
    if kind != "mistral":
        return circuit.checkpoint() if kind == "native" else speakers.checkpoint(kind)
    return speakers.wrap_model(CATALOGUE["mistral"].model, speakers.SPEAKERS["llama"])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "native"])
def test_steps_are_those_of_whole_passes(kind: str) -> None:
    """With a cache, also one of a sliding window, and the prompt read without being observed."""
    checkpoint, rng = decoder(kind), np.random.default_rng(5)
    for length in (1, 2, 13):
        prompt = rng.integers(5, 29, size=length).tolist()
        expected = retrieval.continuation(checkpoint, prompt, 7)
        steps = list(continue_greedily(checkpoint, prompt, steps=7, stop=frozenset()))
        assert [step.token for step in steps] == [token for token, _ in expected]
        for step, (_, positions) in zip(steps, expected, strict=True):
            for (layer, head), position in positions.items():
                site_layer = (Site.DECODER_SELF, layer)
                assert int(step.weights[site_layer][head].argmax()) + step.first[site_layer] == position
        trial = Trial.of(Prompt(prompt, 0, length), steps, depth=0.0)
        scores = retrieval.scores(prompt, 0, length, expected)
        for (layer, head), score in scores["program"].items():
            assert trial.program_score((Site.DECODER_SELF, layer))[head].item() == pytest.approx(score)
        for (layer, head), score in scores["paper"].items():
            copies = trial.copies[Site.DECODER_SELF, layer][:, head].any(dim=0)
            assert copies.double().mean().item() == pytest.approx(score)


def test_needles_are_found_where_nine_tenths_of_them_stand() -> None:
    assert find_needle([1, 2, 9, 4, 3, 5], [3, 4, 9]) == 2, "order is ignored"
    assert find_needle([1, 2, 3], [3, 4]) is None
    ten = list(range(10))
    assert find_needle([*ten[:9], 99], ten) is None and find_needle([*ten, 99], [*ten, 0]) == 0


# Streaming heads: mixed attention against loops inside transformers, learnt gates, passkeys.


TASK: dict[str, Any] = {
    **{"streaming_sink": 1, "streaming_recent": 3, "streaming_steps": 30, "streaming_lr": 0.1},
    **{"streaming_lengths": (20, 30), "passkeys": 1, "passkey_length": 4, "passkey_words": circuit.WORDS[15:20]},
    **{"passkey_needle": "w24", "passkey_question": "w24"},
}


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
    sink_logits = torch.randn(3).double()[None, :, None, None].expand(2, 3, 7, 1)  # a sink of the softmax
    with_sink = [torch.cat([scores.masked_fill(~mask, -torch.inf), sink_logits], -1) for mask in (causal, visible)]
    full, expected = (logits.softmax(-1)[..., :-1] for logits in with_sink)
    torch.testing.assert_close(streaming_weights(full, visible, 1 - full.sum(-1)), expected)


@pytest.mark.parametrize("first", [4, 11])
def test_loss_is_that_of_loops(first: int) -> None:
    checkpoint, rng = speakers.checkpoint("llama"), np.random.default_rng(3)
    ids, gates = rng.integers(5, 50, size=13).tolist(), rng.random((2, 2))
    options = StreamingOptions(streaming_sink=2, streaming_recent=3, streaming_penalty=0.07)
    ours = {(Site.DECODER_SELF, layer): torch.tensor(gates[layer]) for layer in range(2)}
    loss = distillation_loss(checkpoint, ours, ids, first, options)
    their_gates = {layer: gates[layer].tolist() for layer in range(2)}
    expected = streaming.loss(checkpoint.model, their_gates, ids, first, sink=2, recent=3, penalty=0.07)
    assert loss.item() == pytest.approx(expected, rel=1e-5) and expected > 0.05
    open_loss = distillation_loss(checkpoint, {site_layer: torch.ones(2) for site_layer in ours}, ids, first, options)
    assert open_loss.item() == pytest.approx(0.07), "open gates are the model itself"


def test_learning_rate_rises_and_falls() -> None:
    shares = [learning_rate_share(step, 20) for step in range(20)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1] and shares[4:16] == [1] * 12
    assert shares[16:] == [1, 0.75, 0.5, 0.25]
    assert learning_rate_share(0, 2000) == 0.1 and learning_rate_share(0, 1) == 1


def test_the_induction_head_needs_far_keys_and_the_others_do_not() -> None:
    study = study_of(circuit.checkpoint(), words(12), "streaming", **TASK)
    heads = study.heads.set_index(["layer", "head"]).full_attention
    assert heads[circuit.INDUCTION] > 0.7 and (heads.drop(circuit.INDUCTION) < 0.3).all() and not study.labels
    assert (study.heads.full_attention_low == study.heads.full_attention).all()


def test_passkeys_are_hidden_and_asked_for() -> None:
    stack = Haystack.read(words(12), circuit.checkpoint(), length=30)
    task = Passkeys(count=2, length=3, words=("x", "y"), needle="the {ordinal} is", question="{ordinal}?")
    text, questions = task.hidden(stack, length=30, generator=random.Random(1))
    lines, answers = text.split("\n"), questions.split("\n")
    keys = [line for line in lines if line.startswith("the ")]
    assert len(keys) == 2 and [line.split()[1] for line in keys] == ["first", "second"] and len(lines) == 12
    assert answers == [f"{name}? {line.split(' is ')[1]}" for name, line in zip(("first", "second"), keys, strict=True)]
