"""Heads of a role off together, against the plain model with these heads off, one sentence at a time."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest
import torch

from headscope.data.corpus import Corpus
from headscope.engine.base import RunOptions
from headscope.engine.joint import REPEATED, TEXT, joint_ablation, random_sets, repeated_words
from headscope.engine.plan import analyze
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Layout, Site, all_heads
from headscope.model.taps import masked
from headscope.results.study import Study
from tests.oracles import speakers
from tests.oracles.run_options import run_options
from tests.oracles.shuffled import other_way_round
from tests.oracles.speakers import asked

LAYOUT: Layout = {(Site.DECODER_SELF, 0): 7, (Site.DECODER_SELF, 1): 5, (Site.CROSS, 0): 3}


def rise(kind: str, its: Checkpoint, corpus: Corpus, off: list[HeadId]) -> float:
    """By how much the loss a token rises without heads, sentence by sentence, of the plain model with its heads off."""
    total, count = 0.0, 0
    for sentence in corpus:
        one = asked(kind, sentence)
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
    monkeypatch.setattr(sys.modules[analyze.__module__], "batches", other_way_round)  # padding in the middle
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
    assert row["text"] == REPEATED and row["value"] == pytest.approx(rise(kind, its, found, [first]), rel=1e-6)
    assert repeated_words(its, replace(corpus, has_labels=True), RunOptions()) is None


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_random_sets_are_other_heads_of_the_same_layers(count: int) -> None:
    heads = [HeadId(Site.DECODER_SELF, 0, number) for number in range(count)] + [HeadId(Site.CROSS, 0, 1)]
    sets = random_sets(heads, LAYOUT, seed=3)
    assert sets == random_sets(heads, LAYOUT, seed=3) and len({*map(frozenset, sets)}) == len(sets) > 0
    for drawn in sets:
        assert Counter((head.site, head.layer) for head in drawn) == {
            (Site.DECODER_SELF, 0): count,
            (Site.CROSS, 0): 1,
        }
        assert len({*drawn} & {*heads}) == max(0, 2 * count - 7), "others as far as there are enough"
    assert not random_sets([HeadId(Site.CROSS, 0, head) for head in range(3)], LAYOUT, seed=3)
