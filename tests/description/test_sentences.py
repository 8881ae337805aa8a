"""The sentence of a head: labels by their values, shares by size, pairs of words."""

from __future__ import annotations

import pandas as pd
import pytest

from headscope.description.sentences import descriptions, label_in_words, sentence


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("positional:-1", "looks at the token before"),
        ("positional:+3", "looks 3 tokens after"),
        ("positional:0", "looks at the token itself"),
        ("syntactic:nsubj<", "looks from dependent to head along nsubj"),
        ("looks:punctuation", "looks at punctuation"),
        ("aligned:predicted", "looks at the source word of the token being predicted"),
        ("shiny:x", "shiny:x"),
    ],
)
def test_labels_in_words(label: str, words: str) -> None:
    assert label_in_words(label) == words


def test_what_is_established_stands_first_and_the_strongest_of_it() -> None:
    row = {"explained": 0.71, "explained_position": 0.1, "explained_token": 0.01, "explained_lexical": 0.61}
    text = sentence([("rare", 0.52), ("positional:-1", 0.9)], row, [("dog", "Hund"), ("man", "Mann")])
    assert text == (
        "looks at the token before: 0.90; looks at the rarest token: 0.52; explained by pairs of words 0.61, "
        "position 0.10; highest: “dog” → “Hund”, “man” → “Mann”"
    )
    assert sentence([], {"explained": 0.25, "explained_position": 0.25}, []) == (
        "explained by position 0.25; 0.75 only the sentence says"
    )
    assert sentence([("sink", 0.93)], {"explained": 0.7, "explained_position": 0.7, "beyond_sinks": 0.07}, []) == (
        "rests on one place, whatever the query: 0.93; beyond sinks (0.07 of the weight) explained by position 0.70"
    )
    assert sentence([], {"explained": -0.1}, []) == "1.00 only the sentence says"  # a description can mislead
    assert sentence([], {"explained": float("nan")}, [("a", "b")]) == ""


def test_of_every_row_of_a_table() -> None:
    heads = pd.DataFrame(
        {"site": ["cross"] * 2, "layer": 0, "head": [0, 1], "explained": 0.6, "explained_lexical": 0.6}
    )
    label = {"site": "cross", "layer": 0, "head": 1, "label": "looks:copy", "value": 0.7, "given": True}
    pair = {"site": "cross", "layer": 0, "head": 0, "kind": "lexical", "query": "dog", "key": "Hund"}
    found = descriptions(heads, {"labels": pd.DataFrame([label]), "token_pairs": pd.DataFrame([pair])})
    assert found == [
        "explained by pairs of words 0.60; highest: “dog” → “Hund”",
        "looks at the same string in the source: 0.70; explained by pairs of words 0.60",
    ]
