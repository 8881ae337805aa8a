"""A model with a handwritten circuit: every analysis labels exactly the heads of the circuit."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.data.corpus import Corpus, open_corpus
from headscope.heads import HeadId, Site
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import circuit

PREVIOUS, INDUCTION = (HeadId(Site.DECODER_SELF, *head) for head in (circuit.PREVIOUS, circuit.INDUCTION))
NAMES = ("positional", "previous_token", "duplicate_token", "induction", "copying", "composition", "sink")


def corpus() -> Corpus:
    rng = random.Random(1)
    return open_corpus([" ".join(rng.choice(circuit.WORDS) for _ in range(40)) for _ in range(15)])


@cache
def study() -> Study:
    return study_of(circuit.checkpoint(), corpus(), *NAMES, replicates=50)


def test_the_circuit_predicts_what_followed_the_token_before() -> None:
    ids = [0, *(4 + number for number in (7, 3, 11, 5, 3))]
    with torch.no_grad():
        assert circuit.model()(None, torch.tensor([ids]))[0, -1].argmax() == 4 + 11


@pytest.mark.slow
def test_labels_are_exactly_those_of_the_circuit() -> None:
    result = study()
    assert result.labels == {
        PREVIOUS: ["positional:-1", "previous"],
        INDUCTION: ["induction", "copying", "k-composition:0.0"],
    }
    assert not result.unsupported


def test_numbers_are_those_of_the_circuit() -> None:
    heads = study().heads.set_index(["layer", "head"])
    assert heads.copying[circuit.INDUCTION] == pytest.approx(1)
    assert heads.copying.isna()[circuit.PREVIOUS], "it writes nothing that the vocabulary reads"
    table: Any = study().tables["composition"].set_index(["layer", "head", "kind", "earlier_layer", "earlier_head"])
    pair = table.loc[(*circuit.INDUCTION, "k", *circuit.PREVIOUS)]
    assert pair.score == pytest.approx(pair.highest) and pair.score == pytest.approx(len(circuit.PIECES) ** -0.5)
    for kind in "qv":
        assert table.score[(*circuit.INDUCTION, kind, *circuit.PREVIOUS)] == pytest.approx(0, abs=1e-9)


def test_heads_that_write_what_comes_next_or_the_opposite_of_what_they_see(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_text(" ".join(circuit.WORDS), encoding="utf-8")
    names = ("successor", "copy_suppression", "copying")
    result = study_of(circuit.checkpoint(orders=True), corpus(), *names, replicates=50, sequences=path)
    suppressing, succeeding = HeadId(Site.DECODER_SELF, 0, 1), HeadId(Site.DECODER_SELF, 1, 1)
    assert result.labels == {suppressing: ["copy-suppression"], INDUCTION: ["copying"], succeeding: ["successor"]}
    heads = result.heads.set_index(["layer", "head"])
    assert (
        heads.copying[0, 1] == pytest.approx(-1, abs=0.05)
        and heads.copy_suppression[0, 1] == heads.successor[1, 1] == 1
    )
    assert heads.successor[circuit.PREVIOUS] == heads.copy_suppression[circuit.PREVIOUS] == 0, "no logit reads it"
