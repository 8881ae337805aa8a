"""Heads of a role off together, against the plain model with these heads off, one sentence at a time."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from headscope.config.declarations import Measure
from headscope.data.corpus import Corpus
from headscope.data.encoded import CountedTokens, Side
from headscope.engine.base import RunOptions
from headscope.engine.evidence.need import function_need_table
from headscope.engine.joint import REPEATED_WORDS, TEXT, joint_ablation, random_sets, repeated_words
from headscope.engine.plan import analyze
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Layout, Site, all_heads
from headscope.model.taps import masked
from headscope.results.study import Study
from tests.makers.studies import run_options, study_of
from tests.oracles import speakers
from tests.oracles.shuffled import reverse_folds
from tests.oracles.speakers import make_example

LAYOUT: Layout = {(Site.DECODER_SELF, 0): 7, (Site.DECODER_SELF, 1): 5, (Site.CROSS, 0): 3}


def rise(kind: str, its: Checkpoint, corpus: Corpus, off: list[HeadId]) -> float:
    """By how much the loss a token rises without heads, sentence by sentence, of the plain model with its heads off."""
    total, count = 0.0, 0
    for sentence in corpus:
        one = make_example(kind, sentence)
        with torch.no_grad():
            intact = float(one.loss(its))
            with masked(its.model, off):
                total += float(one.loss(its)) - intact
        count += len(one.labels)
    return total / count


def labelled(its: Checkpoint, labels: dict[str, str]) -> Study:
    """A study of which only labels are there."""
    rows = [(head.site.value, head.layer, head.head, labels.get(str(head), "")) for head in all_heads(its.layout)]
    heads = pd.DataFrame(rows, columns=["site", "layer", "head", "functions"])
    return Study({"heads": heads}, {"signatures": {}, "left_out": []})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5", "native-post"])
def test_roles_are_worth_what_the_plain_model_loses_without_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[analyze.__module__], "batches", reverse_folds)  # padding in the middle
    its, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=5)
    heads = list(all_heads(its.layout))
    off = {"next token": [heads[1], heads[-1]], "first or special tokens (sink)": [heads[0], heads[3]]}
    labels = ("positional:1", "sink")
    study = labelled(its, {str(head): label for label, own in zip(labels, off.values(), strict=True) for head in own})
    streamed = replace(run_options(), attention="streamed")  # as of long texts
    joint_ablation(study, its, corpus, streamed, replicates=11)
    sets = {role: random_sets(own, its.layout, seed=1) for role, own in off.items()}
    for role, own in off.items():
        row = study.role(role)
        assert row["which"] == [str(head) for head in own] and row["text"] == TEXT and row["sentences"] == 5
        assert row["value"] == pytest.approx(rise(kind, its, corpus, own), rel=1e-6)
        others = [rise(kind, its, corpus, one) for one in sets[role]]
        assert row["sets"] == len(others) and row["value_low"] <= row["value"] <= row["value_high"]
        assert [row["random_low"], row["random_high"]] == pytest.approx([min(others), max(others)], rel=1e-6)
    assert study.record["signatures"]["roles"]["roles-n"] == "5 of 5 text"
    assert study.role("sink")["role"] == "first or special tokens (sink)"
    with pytest.raises(ConfigError, match="unknown role 'next tokens'; did you mean 'next token'"):
        study.role("next tokens")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_induction_is_about_repeated_words_of_the_text(kind: str) -> None:
    its, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=3)
    found = repeated_words(its, corpus, RunOptions())
    assert found is not None
    side = "target" if corpus.has_target else "source"
    own = {word for sentence in corpus for word in getattr(sentence, side).split()}
    texts = [getattr(sentence, side).split() for sentence in found]
    assert all(text[: len(text) // 2] * 2 == text and set(text) <= own for text in texts)
    assert all(len(set(text)) == len(text) // 2 > 1 for text in texts) and len({*map(tuple, texts)}) > 1
    first = next(head for head in all_heads(its.layout) if head.site is Site.DECODER_SELF)
    study = labelled(its, {str(first): "induction"})
    joint_ablation(study, its, corpus, run_options(), replicates=3)
    row = study.role("induction")
    assert row["text"] == REPEATED_WORDS and row["value"] == pytest.approx(rise(kind, its, found, [first]), rel=1e-6)
    assert repeated_words(its, replace(corpus, has_labels=True), RunOptions()) is None


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_random_sets_are_other_heads_of_the_same_layers(count: int) -> None:
    heads = [HeadId(Site.DECODER_SELF, 0, number) for number in range(count)] + [HeadId(Site.CROSS, 0, 1)]
    sets = random_sets(heads, LAYOUT, seed=3)
    assert sets == random_sets(heads, LAYOUT, seed=3) and len({*map(frozenset, sets)}) == len(sets) > 0
    for drawn in sets:
        assert Counter((head.site, head.layer) for head in drawn) == {(Site.DECODER_SELF, 0): count, (Site.CROSS, 0): 1}
        assert len({*drawn} & {*heads}) == max(0, 2 * count - 7), "others as far as there are enough"
    assert not random_sets([HeadId(Site.CROSS, 0, head) for head in range(3)], LAYOUT, seed=3)


# Functions beside importances: means, Welch's intervals and chances, against loops and enumeration.


NEEDED = Measure("need", keep="highest")
LEAST = Measure("need", keep="lowest")


def heads_of(functions: list[str], need: list[float], **more: list[float]) -> pd.DataFrame:
    places = {"site": "encoder-self", "layer": 0, "head": range(len(need))}
    return pd.DataFrame(places | {"functions": functions, "need": need} | more)


def row_of(table: pd.DataFrame, name: str) -> dict[str, float]:
    (row,) = table[table["name"] == name].to_dict("records")
    return {str(key): value for key, value in row.items()}


def test_means_and_intervals_are_those_of_tables() -> None:
    """Student's t of 2 and 4 degrees at 97.5 %: 4.302653 and 2.776445."""
    table = function_need_table(heads_of(["sink"] * 3 + [""] * 3, [1, 2, 3, 4, 5, 6]), [NEEDED])
    row = row_of(table, "sink")
    assert (row["heads"], row["others"], row["mean"], row["others_mean"], row["difference"]) == (3, 3, 2, 5, -3)
    assert row["mean_high"] - 2 == pytest.approx(4.302653 * (1 / 3) ** 0.5, rel=1e-6)
    assert row["difference_low"] == pytest.approx(-3 - 2.776445 * (2 / 3) ** 0.5, rel=1e-6)
    assert (row["first"], row["of_first"], row["p_first"]) == (0, 1, 1)
    other = row_of(table, "no label")
    assert other["difference_high"] == pytest.approx(-row["difference_low"]) and other["first"] == 1


@pytest.mark.parametrize("measure", [NEEDED, LEAST])
def test_chances_are_those_of_all_draws(measure: Measure) -> None:
    random = np.random.default_rng(3)
    need = [*random.normal(size=12), np.nan]
    functions = ["a:1", "a:2;b", "", "b", "a:1", "", "", "", "a:2", "", "", "c", "b"]
    table = function_need_table(heads_of(functions, need), [measure])
    assert table["name"].tolist() == ["a", "a:1", "a:2", "b", "c", "no label"]
    sign = -1 if measure.keep == "highest" else 1
    order = sorted(range(12), key=lambda head: sign * need[head])
    for name in table["name"]:
        row = row_of(table, name)
        own = {head for head in range(12) if (name in functions[head] if name != "no label" else not functions[head])}
        hits = len(own & {*order[:3]})
        draws = [len(own & {*drawn}) >= hits for drawn in combinations(range(12), 3)]
        assert (row["heads"], row["others"], row["first"], row["of_first"]) == (len(own), 12 - len(own), hits, 3)
        assert row["p_first"] == pytest.approx(np.mean(draws))
        assert row["mean"] == pytest.approx(np.mean([need[head] for head in own]))
        assert np.isnan(row["mean_low"]) == (len(own) < 3), "of two heads there is no interval"


def test_what_explains_heads_mostly_is_a_group() -> None:
    shares = {"explained": [0.9, 0.8, 0.2, np.nan], "explained_position": [0.9, 0.1, 0.2, np.nan]}
    lexical = {"explained_lexical": [0.0, 0.7, 0.0, np.nan]}
    table = function_need_table(heads_of([""] * 4, [1, 2, 3, 4], **shares, **lexical), [NEEDED])
    assert table[["kind", "name", "heads", "others"]].values.tolist() == [
        ["mostly", "only the sentence", 1, 3],
        ["mostly", "pairs of words", 1, 3],
        ["mostly", "position and sinks", 1, 3],
    ]


# --queries first|last: what heads do at the position that a model is read at, and nothing else.


def test_first_and_last_are_positions_of_each_text() -> None:
    real = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]]).bool()  # padding on either side
    side = Side(
        torch.zeros(3, 4, dtype=torch.long), real, torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]]).bool()
    )
    first, last = (CountedTokens(queries=each).queries_of(side).int().tolist() for each in ("first", "last"))
    assert first == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert last == [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
    assert CountedTokens(queries="first").keys_of(side).equal(CountedTokens().keys_of(side))
    assert CountedTokens().queries_of(side).equal(CountedTokens().keys_of(side))


def test_confidence_is_that_of_one_query_a_text() -> None:
    its, corpus = speakers.checkpoint("bert"), speakers.corpus("bert", count=5)
    model: Any = its.model
    model.set_attn_implementation("eager")
    for queries, place in (("first", 0), ("last", -1)):
        study = study_of(its, corpus, "confidence", queries=queries)
        heads = study.heads.set_index(["site", "layer", "head"])["confidence"]
        largest = torch.zeros(its.layout[Site.ENCODER_SELF, 1], dtype=torch.float64)
        for sentence in corpus:
            encoded = its.encode([sentence.source], side="source", limit=512)[0]
            ids = torch.tensor([encoded.ids])
            weights = model(ids, output_attentions=True).attentions[1][0].detach().double()
            counted = ~torch.tensor(encoded.special)
            largest += weights[:, place, counted].amax(dim=-1)
        for head, value in enumerate((largest / 5).tolist()):
            assert abs(heads["encoder-self", 1, head] - value) < 1e-6
