"""The sentence of a head: what its labels say, shares by size, pairs of words."""

from typing import Any

import pandas as pd
import pytest

from headscope.description.features import descriptions
from headscope.engine.evidence.report import Rate
from tests.makers.studies import study_of
from tests.oracles import tiny


def test_a_number_says_what_it_is_of_and_its_baseline() -> None:
    rate = Rate("of such words", "at the best fixed offset")
    assert rate.phrase("syntactic:obj>", 0.724, 0.35) == (
        "looks from head to dependent along obj: 0.72 of such words, 0.35 at the best fixed offset"
    )
    assert rate.phrase("rare", 0.5, float("nan")) == "looks at one of the two rarest tokens: 0.50 of such words"


def test_of_every_row_of_a_table() -> None:
    heads = pd.DataFrame(
        {"site": ["cross"] * 2, "layer": 0, "head": [0, 1], "explained": 0.6, "explained_lexical": 0.6}
    )
    texts = ["looks at the token before: 0.93 of its largest weights", "looks at the token before: 1.00 of its weight"]
    labels = [{"site": "cross", "layer": 0, "head": 1, "given": True, "description": text} for text in texts]
    pair = {"site": "cross", "layer": 0, "head": 0, "kind": "lexical", "query": "dog", "key": "Hund"}
    found = descriptions(heads, {"labels": pd.DataFrame(labels), "token_pairs": pd.DataFrame([pair])})
    assert found == [  # the same said twice, of two texts: once
        "explained by pairs of words 0.60; highest: “dog” → “Hund”",
        f"{texts[0]}; explained by pairs of words 0.60",
    ]


# The sharpest queries of heads: of those that see five keys, by how many times an even weight the largest is.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "attention", "keep"),
    [("mistral", "dense", False), ("mistral", "streamed", False), ("bert", "dense", False), ("bert", "dense", True)],
)
def test_sharpest_queries(kind: str, attention: str, keep: bool) -> None:
    """Against every query of every sentence, one at a time; a decoder's first token sees but itself.

    The first token is no example's key, even where special tokens count.
    """
    its, corpus = tiny.checkpoint(kind, 3), tiny.corpus(3, count=17)
    found = study_of(
        its, corpus, "explained", replicates=19, seed=1, explained_steps=1, attention=attention, keep_special=keep
    )
    seen = [tiny.watch(kind, its, sentence) for sentence in corpus]
    rows: list[Any] = list(found.tables["examples"].itertuples())
    by_head: dict[Any, list[Any]] = {}
    for row in rows:
        by_head.setdefault((row.layer, row.head), []).append(row)
    assert len(by_head) > 3
    (site,) = {place[0] for place in its.layout}
    for (layer, head), own in by_head.items():
        best = []
        for one in seen:
            queries = [
                (max(row[s] for s in keys[keys[0] == 0 :]) * n, n, one.number, t)
                for t, row, keys in one.rows((site, layer), head, keep)
                if (n := len(keys) - (keys[0] == 0)) >= 5
            ]
            best += [max(queries)] if queries else []
        best = sorted(best, reverse=True)[:5]
        assert [(row.keys_seen, row.sentence, row.query_position) for row in own] == [entry[1:] for entry in best]
        assert [row.weight * row.keys_seen for row in own] == pytest.approx([entry[0] for entry in best], rel=1e-5)
