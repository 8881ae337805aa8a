"""Joint ablation of the heads of a role, against the plain model with these heads masked, a sentence at a time."""

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


def rise(kind: str, checkpoint: Checkpoint, corpus: Corpus, off: list[HeadId]) -> float:
    """The rise of the loss a token when the plain model has these heads masked, one sentence at a time."""
    total, count = 0.0, 0
    for sentence in corpus:
        example = make_example(kind, sentence)
        with torch.no_grad():
            intact = float(example.loss(checkpoint))
            with masked(checkpoint.model, off):
                total += float(example.loss(checkpoint)) - intact
        count += len(example.labels)
    return total / count


def label_heads(checkpoint: Checkpoint, labels: dict[str, str]) -> Study:
    """A study that has labels only."""
    rows = [(h.site.value, h.layer, h.head, labels.get(str(h), "")) for h in all_heads(checkpoint.layout)]
    heads = pd.DataFrame(rows, columns=["site", "layer", "head", "functions"])
    return Study({"heads": heads}, {"signatures": {}, "left_out": []})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5", "native-post"])
def test_roles_are_worth_what_the_plain_model_loses_without_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[analyze.__module__], "batches", reverse_folds)  # padding in the middle
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=5)
    heads = list(all_heads(checkpoint.layout))
    roles = {"next token": [heads[1], heads[-1]], "first or special tokens (sink)": [heads[0], heads[3]]}
    functions = zip(("positional:1", "sink"), roles.values(), strict=True)
    study = label_heads(checkpoint, {str(head): name for name, ids in functions for head in ids})
    options = replace(run_options(), attention="streamed")  # as of long texts
    joint_ablation(study, checkpoint, corpus, options, replicates=11)
    sets = {role: random_sets(ids, checkpoint.layout, seed=1) for role, ids in roles.items()}
    for role, ids in roles.items():
        row = study.role(role)
        assert row["which"] == [str(head) for head in ids] and row["text"] == TEXT and row["sentences"] == 5
        assert row["value"] == pytest.approx(rise(kind, checkpoint, corpus, ids), rel=1e-6)
        rises = [rise(kind, checkpoint, corpus, draw) for draw in sets[role]]
        assert row["sets"] == len(rises) and row["value_low"] <= row["value"] <= row["value_high"]
        assert [row["random_low"], row["random_high"]] == pytest.approx([min(rises), max(rises)], rel=1e-6)
    assert study.record["signatures"]["roles"]["roles-n"] == "5 of 5 text"
    assert study.role("sink")["role"] == "first or special tokens (sink)"
    with pytest.raises(ConfigError, match="unknown role 'next tokens'; did you mean 'next token'"):
        study.role("next tokens")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_induction_is_about_repeated_words_of_the_text(kind: str) -> None:
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=3)
    repeats = repeated_words(checkpoint, corpus, RunOptions())
    assert repeats is not None
    side = "target" if corpus.has_target else "source"
    words = {word for sentence in corpus for word in getattr(sentence, side).split()}
    texts = [getattr(sentence, side).split() for sentence in repeats]
    assert all(text[: len(text) // 2] * 2 == text and set(text) <= words for text in texts)
    assert all(len(set(text)) == len(text) // 2 > 1 for text in texts) and len({*map(tuple, texts)}) > 1
    first = next(head for head in all_heads(checkpoint.layout) if head.site is Site.DECODER_SELF)
    study = label_heads(checkpoint, {str(first): "induction"})
    joint_ablation(study, checkpoint, corpus, run_options(), replicates=3)
    row = study.role("induction")
    assert row["text"] == REPEATED_WORDS and row["value"] == pytest.approx(rise(kind, checkpoint, repeats, [first]))
    assert repeated_words(checkpoint, replace(corpus, has_labels=True), RunOptions()) is None


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_random_sets_are_other_heads_of_the_same_layers(count: int) -> None:
    heads = [HeadId(Site.DECODER_SELF, 0, number) for number in range(count)] + [HeadId(Site.CROSS, 0, 1)]
    sets = random_sets(heads, LAYOUT, seed=3)
    assert sets == random_sets(heads, LAYOUT, seed=3) and len({*map(frozenset, sets)}) == len(sets) > 0
    for draw in sets:
        assert Counter((head.site, head.layer) for head in draw) == {(Site.DECODER_SELF, 0): count, (Site.CROSS, 0): 1}
        assert len({*draw} & {*heads}) == max(0, 2 * count - 7), "others as far as there are enough"
    assert not random_sets([HeadId(Site.CROSS, 0, head) for head in range(3)], LAYOUT, seed=3)


# Functions beside importances: means, Welch's intervals and chances, against loops and enumeration.


HIGHEST = Measure("need", keep="highest")
LOWEST = Measure("need", keep="lowest")


def heads_of(functions: list[str], need: list[float], **more: list[float]) -> pd.DataFrame:
    ids = {"site": "encoder-self", "layer": 0, "head": range(len(need))}
    return pd.DataFrame(ids | {"functions": functions, "need": need} | more)


def row_of(table: pd.DataFrame, name: str) -> dict[str, float]:
    (row,) = table[table["name"] == name].to_dict("records")
    return {str(key): value for key, value in row.items()}


def test_means_and_intervals_are_those_of_tables() -> None:
    """Student's t of 2 and 4 degrees at 97.5 %: 4.302653 and 2.776445."""
    table = function_need_table(heads_of(["sink"] * 3 + [""] * 3, [1, 2, 3, 4, 5, 6]), [HIGHEST])
    row = row_of(table, "sink")
    assert (row["heads"], row["others"], row["mean"], row["others_mean"], row["difference"]) == (3, 3, 2, 5, -3)
    assert row["mean_high"] - 2 == pytest.approx(4.302653 * (1 / 3) ** 0.5, rel=1e-6)
    assert row["difference_low"] == pytest.approx(-3 - 2.776445 * (2 / 3) ** 0.5, rel=1e-6)
    assert (row["first"], row["of_first"], row["p_first"]) == (0, 1, 1)
    other = row_of(table, "no label")
    assert other["difference_high"] == pytest.approx(-row["difference_low"]) and other["first"] == 1


@pytest.mark.parametrize("measure", [HIGHEST, LOWEST])
def test_chances_are_those_of_all_draws(measure: Measure) -> None:
    rng = np.random.default_rng(3)
    need = [*rng.normal(size=12), np.nan]
    functions = ["a:1", "a:2;b", "", "b", "a:1", "", "", "", "a:2", "", "", "c", "b"]
    table = function_need_table(heads_of(functions, need), [measure])
    assert table["name"].tolist() == ["a", "a:1", "a:2", "b", "c", "no label"]
    sign = -1 if measure.keep == "highest" else 1
    order = sorted(range(12), key=lambda head: sign * need[head])
    for name in table["name"]:
        row = row_of(table, name)
        ids = {head for head in range(12) if (name in functions[head] if name != "no label" else not functions[head])}
        hits = len(ids & {*order[:3]})
        draws = [len(ids & {*draw}) >= hits for draw in combinations(range(12), 3)]
        assert (row["heads"], row["others"], row["first"], row["of_first"]) == (len(ids), 12 - len(ids), hits, 3)
        assert row["p_first"] == pytest.approx(np.mean(draws))
        assert row["mean"] == pytest.approx(np.mean([need[head] for head in ids]))
        assert np.isnan(row["mean_low"]) == (len(ids) < 3), "of two heads there is no interval"


def test_what_explains_heads_mostly_is_a_group() -> None:
    shares = {"explained": [0.9, 0.8, 0.2, np.nan], "explained_position": [0.9, 0.1, 0.2, np.nan]}
    lexical = {"explained_lexical": [0.0, 0.7, 0.0, np.nan]}
    table = function_need_table(heads_of([""] * 4, [1, 2, 3, 4], **shares, **lexical), [HIGHEST])
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
    first, last = (CountedTokens(queries=end).queries_of(side).int().tolist() for end in ("first", "last"))
    assert first == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert last == [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
    assert CountedTokens(queries="first").keys_of(side).equal(CountedTokens().keys_of(side))
    assert CountedTokens().queries_of(side).equal(CountedTokens().keys_of(side))


def test_confidence_is_that_of_one_query_a_text() -> None:
    checkpoint, corpus = speakers.checkpoint("bert"), speakers.corpus("bert", count=5)
    model: Any = checkpoint.model
    model.set_attn_implementation("eager")
    for queries, index in (("first", 0), ("last", -1)):
        study = study_of(checkpoint, corpus, "confidence", queries=queries)
        heads = study.heads.set_index(["site", "layer", "head"])["confidence"]
        largest = torch.zeros(checkpoint.layout[Site.ENCODER_SELF, 1], dtype=torch.float64)
        for sentence in corpus:
            text = checkpoint.encode([sentence.source], side="source", limit=512)[0]
            ids = torch.tensor([text.ids])
            weights = model(ids, output_attentions=True).attentions[1][0].detach().double()
            is_counted = ~torch.tensor(text.special)
            largest += weights[:, index, is_counted].amax(dim=-1)
        for head, value in enumerate((largest / 5).tolist()):
            assert abs(heads["encoder-self", 1, head] - value) < 1e-6
