"""Every pair function against a slow re-derivation of one pair after the other, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headscope.data.encoded import Encoded, pad_side
from headscope.data.parses import Aligned
from headscope.data.token_text import Marks, marks_of
from headscope.description.pair_function import PAIR_FUNCTIONS
from headscope.description.tokens import Pairs, TokenReader, Tokens, shape, word_starts
from headscope.pair_functions.keys import CONTENT, FUNCTION, WORDS
from tests.oracles import speakers

NAMES = PAIR_FUNCTIONS.names()
SENTENCE = """[S]:x (:PUNCT The:DET dog:NOUN ):PUNCT bark:VERB ##s:VERB ,:PUNCT ":PUNCT the:DET Dog:PROPN 3:NUM !:PUNCT
":PUNCT It:PRON is:AUX .:PUNCT [S]:x a:DET ):PUNCT b:ADP [E]:x"""
WRITTEN, TAGGED = zip(*(token.rsplit(":", 1) for token in SENTENCE.split()), strict=True)
Alone = Callable[[Tokens, int, int], bool]


def made() -> Tokens:
    """A sentence with a tree, brackets, quotes, a word of two pieces, and a second text."""
    special = np.array([text in ("[S]", "[E]") for text in WRITTEN])
    text = np.array([piece.removeprefix("##") for piece in WRITTEN], dtype=object)
    starts = word_starts(WRITTEN, special, "##")
    word = np.where(special, -1, starts.cumsum() - 1)
    draw = np.random.default_rng(4)
    heads = np.array([-1, *(int(draw.integers(n)) for n in range(1, word.max() + 1))])
    parent = np.where(special, -1, heads[word.clip(min=0)])
    forms = np.array(["" if odd else piece.lower() for odd, piece in zip(special, text, strict=True)], dtype=object)
    names = {piece: n for n, piece in enumerate(dict.fromkeys(WRITTEN))}
    ids = np.array([names[piece] for piece in WRITTEN])
    segment = np.array([0] * 17 + [1] * 5)
    relation = np.full(len(text), "dep", dtype=object)
    return Tokens(
        ids, special, text, starts, word, np.array(TAGGED, dtype=object), forms, parent, relation, segment, True
    )


def mark(t: Tokens, k: int) -> bool:
    return not t.special[k] and not any(c.isalnum() for c in t.text[k])


def partner(t: Tokens, q: int, k: int) -> bool:
    first, last = sorted((q, k))
    known = {(1, 4), (8, 13)}
    return (first, last) in known


def nearest_before(t: Tokens, q: int, k: int, wanted: Callable[[int], bool]) -> bool:
    return k == max((n for n in range(q) if wanted(n)), default=-1)


def delimited(t: Tokens) -> Callable[[int], bool]:
    return lambda n: n > 0 and mark(t, n - 1) and not mark(t, n)


ALONE: dict[str, Alone] = {
    "same-word": lambda t, q, k: q != k and t.word[q] == t.word[k],
    "same-token": lambda t, q, k: q != k and t.ids[q] == t.ids[k],
    "same-token-earlier": lambda t, q, k: k < q and t.ids[q] == t.ids[k],
    "same-lemma": lambda t, q, k: t.word[q] != t.word[k] and t.lemma[q] == t.lemma[k] != "",
    "same-class": lambda t, q, k: t.word[q] != t.word[k] and t.tag[q] == t.tag[k],
    "copy": lambda t, q, k: t.text[q] == t.text[k] and not mark(t, k),
    "other-text": lambda t, q, k: t.segment[q] != t.segment[k],
    "punctuation": lambda t, q, k: mark(t, k),
    "previous-delimiter": lambda t, q, k: nearest_before(t, q, k, lambda n: mark(t, n)),
    "next-delimiter": lambda t, q, k: k == min((n for n in range(q + 1, len(t)) if mark(t, n)), default=-1),
    "after-delimiter": lambda t, q, k: nearest_before(t, q, k, delimited(t)),
    "previous-sentence-end": lambda t, q, k: nearest_before(t, q, k, lambda n: t.text[n] in (".", "!", "?")),
    "final-punctuation": lambda t, q, k: mark(t, k) and all(mark(t, n) or t.special[n] for n in range(k, len(t))),
    "bracket": partner,
    "content-words": lambda t, q, k: t.tag[k] in CONTENT,
    "function-words": lambda t, q, k: t.tag[k] in FUNCTION,
    "numbers": lambda t, q, k: t.text[k] == "3",
    "capitals": lambda t, q, k: t.text[k] in ("The", "Dog", "It"),
    "parent": lambda t, q, k: t.parent[q] == t.word[k] >= 0,
    "child": lambda t, q, k: t.parent[k] == t.word[q] >= 0,
    "sibling": lambda t, q, k: t.word[q] != t.word[k] and t.parent[q] == t.parent[k] >= 0,
    "root": lambda t, q, k: t.word[k] == 0,
    **{tag: (lambda t, q, k, tag=tag: t.tag[k] == tag) for tag in WORDS},  # type: ignore[misc]
}


def test_there_is_an_oracle_for_each() -> None:
    assert set(NAMES) == set(ALONE)


@pytest.mark.parametrize("name", NAMES)
def test_holds_where_its_oracle_says(name: str) -> None:
    tokens = made()
    plain = np.flatnonzero(~tokens.special)
    at = np.flatnonzero(~tokens.special)[::2]
    found = np.asarray(PAIR_FUNCTIONS.get(name).holds(Pairs(tokens, tokens, at)))
    assert found.shape == (len(at), len(tokens)) and found.dtype == bool
    expected = np.array([[bool(ALONE[name](tokens, q, k)) for k in plain.tolist()] for q in at.tolist()])
    np.testing.assert_array_equal(found[:, plain], expected)
    assert expected.any() or name in ("ADV", "ADJ", "PART", "CCONJ", "SCONJ", "final-punctuation")


@pytest.mark.parametrize("name", ["content-words", "function-words", "same-class"])
def test_a_parse_without_tags_has_no_classes_of_words(name: str) -> None:
    """Links of atoms, say: the classes that tokens show are not those of words."""
    checkpoint = speakers.checkpoint("bert")
    side = pad_side(checkpoint.encode(["ah 3 bi ah ) ah"], side="source", limit=97))
    units = [[place] for place in range(1, side.ids.shape[1] - 1)]
    reader = TokenReader.of(checkpoint, "source")
    for tags, found in ((("NOUN", "NUM", "DET", "NOUN", "PUNCT", "DET"), True), (("",) * 6, False)):
        read = reader.tokens(side, 0, Aligned(units, [("map", 0, 3)], 0, tags))
        pairs = Pairs(read, read, np.arange(len(read)))
        assert read.parsed and bool(PAIR_FUNCTIONS.get(name).holds(pairs).any()) is found


def read_as(subwords: list[str], marks: Marks, aligned: Aligned | None = None) -> Pairs:
    """All pairs of tokens of these subwords, of a vocabulary with such marks."""
    reader = TokenReader(speakers.checkpoint("bert"), "source", dict(enumerate(subwords)), marks)
    tokens = reader.tokens(pad_side([Encoded.plain(range(len(subwords)))]), 0, aligned)
    return Pairs(tokens, tokens, np.arange(len(tokens)))


def test_byte_level_tokens_are_what_they_spell() -> None:
    """ó is no number, Ã of é no capital, and “—” is punctuation, however bytes are written."""
    pairs = read_as(["El", "ĠÃ©l", "ciÃ³n", "ĠÐ²", "ĠÃī", "ĠâĢľ", "3", "âĢĿ", "ĠâĢĶ", "Ġa"], "Ġ")
    holding = {name: np.flatnonzero(PAIR_FUNCTIONS.get(name).holds(pairs)[0]) for name in ("numbers", "capitals")}
    assert holding["numbers"].tolist() == [6] and holding["capitals"].tolist() == [0, 4]
    assert np.flatnonzero(PAIR_FUNCTIONS.get("punctuation").holds(pairs)[0]).tolist() == [5, 7, 8]
    assert np.argwhere(PAIR_FUNCTIONS.get("bracket").holds(pairs)).tolist() == [[5, 7], [7, 5]]
    assert pairs.key.tag[[1, 3, 6, 8]].tolist() == ["short", "short", "NUM", "PUNCT"]
    assert pairs.key.starts.tolist() == [True, True, False, True, True, True, True, True, True, True]


def test_marks_of_words_are_those_of_the_vocabulary() -> None:
    assert marks_of(["the", "##s", "dog", "##ing"]) == "##"
    assert marks_of(["▁the", "s", "▁dog"]) == "▁" and marks_of(["Ġthe", "s"]) == "Ġ"
    assert marks_of(["th@@", "e"]) == "@@" and marks_of(["the</w>", "s"]) == "</w>"
    assert marks_of(["the", "dog"]) == "" and marks_of([]) == ""
    none = np.zeros(5, dtype=bool)
    assert word_starts(["▁un", "do", "▁it", ".", "a"], none, "▁").tolist() == [True, False, True, True, True]
    assert word_starts(["un@@", "do", "it", ".", "a"], none, "@@").tolist() == [True, False, True, True, True]
    assert word_starts(["un", "do</w>", "it</w>", ".</w>", "a"], none, "</w>").tolist() == [
        True,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("text", "starts", "expected"),
    [
        ("?!", True, "PUNCT"),
        ("3rd", False, "NUM"),
        ("ing", False, "piece"),
        ("Bo", True, "Capital"),
        ("at", True, "short"),
    ],
)
def test_what_a_token_shows(text: str, starts: bool, expected: str) -> None:
    assert shape(text, starts) == expected
