"""Retrieval heads: needles in haystacks, what is said of them, and budgets shared out by the scores."""

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from headscope.analyses.retrieval import Prompt, Trial, WrittenToken, continue_greedily, find_needle, head_capacities
from headscope.data.corpus import Corpus, open_corpus
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site
from headscope.results.study import Study
from tests.contracts.architectures import CATALOGUE
from tests.makers.studies import study_of
from tests.oracles import circuit, retrieval, speakers

PLACE = (Site.DECODER_SELF, 0)
NEEDLE: dict[str, Any] = {
    "needle": "w20 w21 w22 w23 w24",
    "needle_answer": "w21 w22 w23 w24",
    "needle_question": "w20",
    "needle_depths": 7,
    "needle_steps": 6,
    "haystack_lengths": (30, 40),
}


def words(count: int = 15, *, of: int = 15) -> Corpus:
    """Sentences of three words, none of them the needle's."""
    luck = random.Random(1)
    return open_corpus([" ".join(luck.choice(circuit.WORDS[:of]) for _ in range(3)) for _ in range(count)])


def run(its: Checkpoint, corpus: Corpus, **options: Any) -> Study:
    return study_of(its, corpus, "retrieval", replicates=50, **NEEDLE | options)


@cache
def found() -> Study:
    return run(circuit.checkpoint(), words(), kv_budget=128)


def test_the_needle_is_found_by_the_induction_head() -> None:
    its, induction = found(), HeadId(Site.DECODER_SELF, *circuit.INDUCTION)
    assert its.labels == {induction: ["retrieval"]} and not its.unsupported
    heads = its.heads.set_index(["layer", "head"])
    assert heads.retrieval[circuit.INDUCTION] == 1 and (heads.retrieval.drop(circuit.INDUCTION) == 0).all()
    trials = its.tables["retrieval"]
    assert len(trials) == 14 and trials.written.str.startswith("w21 w22 w23 w24").all()
    assert trials.depth.is_monotonic_increasing is False and trials.length.nunique() == 2
    assert (trials.groupby("length").start.diff().dropna() > 0).all(), "deeper needles begin later"


def test_what_is_copied_twice_counts_once_but_in_the_authors_program() -> None:
    """At depth 1 the needle stands before the question, and its last word is followed by the first one again."""
    its = found()
    last = its.tables["retrieval"].written.iloc[-1].split()
    assert last == ["w21", "w22", "w23", "w24", "w20", "w21"]
    program = its.heads.set_index(["layer", "head"]).retrieval_program[circuit.INDUCTION]
    scores = json.loads(its.files["retrieval/head_score.json"])
    assert set(scores) == {"0-0", "0-1", "1-0", "1-1"} and scores["1-0"][-1] == 1.25
    assert np.mean(scores["1-0"]) == pytest.approx(program) and its.files["retrieval/head_score.json"].count("\n") == 1


def test_budgets_sum_to_what_is_given() -> None:
    table = found().tables["retrieval_capacity"]
    assert int(table["keys"].sum()) == 4 * (128 - 32)
    assert table["keys"].idxmax() == 2 and (table["keys"] >= 1).all()


@pytest.mark.parametrize("seed", range(5))
def test_budgets_are_those_of_the_rule_rounded_and_sum_up(seed: int) -> None:
    luck = np.random.default_rng(seed)
    scores, budget, beta = luck.random(37), int(luck.integers(40, 400)), float(luck.uniform(1, 3))
    capacities, free = head_capacities(scores, budget=budget, beta=beta), budget - 32
    exact = scores / scores.sum() * (free // beta) * 37 + free - free // beta
    assert capacities.sum() == 37 * free and np.abs(capacities - exact).max() < 1
    assert head_capacities(np.zeros(5), budget=33).tolist() == [1] * 5


def trial(steps: list[tuple[int, int]], *, needle: list[int], start: int) -> Trial:
    """A trial of one head from (most attended position, token) of its steps."""
    prompt = Prompt([1] * start + needle + [2, 3], start, start + len(needle))
    made = []
    for number, (position, token) in enumerate(steps):
        weights = torch.zeros(1, len(prompt.ids) + number)
        weights[0, position] = 1
        made.append(WrittenToken(token, {PLACE: weights}, {PLACE: 0}))
    return Trial.of(prompt, made, depth=0.5)


def test_published_example() -> None:
    steps = [(10, 7), (11, 8), (3, 9), (12, 9)]
    one = trial(steps, needle=[7, 8, 9, 9], start=10)
    assert one.program_score(PLACE).item() == 3 / 4 and one.recall == 1
    more = trial([*steps, (12, 9)], needle=[7, 8, 9, 9], start=10)
    assert more.program_score(PLACE).item() == 1 and more.copies[PLACE].any(dim=0).sum() == 3


@cache
def decoder(kind: str) -> Checkpoint:
    if kind != "mistral":
        return circuit.checkpoint() if kind == "native" else speakers.checkpoint(kind)
    return speakers.wrapped(CATALOGUE["mistral"].model, speakers.SPEAKERS["llama"])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "native"])
def test_steps_are_those_of_whole_passes(kind: str) -> None:
    """With a cache, also one of a sliding window, and the prompt read without being observed."""
    its, luck = decoder(kind), np.random.default_rng(5)
    for length in (1, 2, 13):
        prompt = luck.integers(5, 29, size=length).tolist()
        expected = retrieval.continuation(its, prompt, 7)
        steps = list(continue_greedily(its, prompt, steps=7, stop=frozenset()))
        assert [step.token for step in steps] == [token for token, _ in expected]
        for step, (_, looked) in zip(steps, expected, strict=True):
            for (layer, head), position in looked.items():
                place = (Site.DECODER_SELF, layer)
                assert int(step.weights[place][head].argmax()) + step.first[place] == position
        found = Trial.of(Prompt(prompt, 0, length), steps, depth=0.0)
        scores = retrieval.scores(prompt, 0, length, expected)
        for (layer, head), score in scores["program"].items():
            assert found.program_score((Site.DECODER_SELF, layer))[head].item() == pytest.approx(score)
        for (layer, head), score in scores["paper"].items():
            copied = found.copies[Site.DECODER_SELF, layer][:, head].any(dim=0)
            assert copied.double().mean().item() == pytest.approx(score)


def test_needles_are_found_where_nine_tenths_of_them_stand() -> None:
    assert find_needle([1, 2, 9, 4, 3, 5], [3, 4, 9]) == 2, "order is ignored"
    assert find_needle([1, 2, 3], [3, 4]) is None
    ten = list(range(10))
    assert find_needle([*ten[:9], 99], ten) is None and find_needle([*ten, 99], [*ten, 0]) == 0
