"""The sharpest queries of heads: of those that see five keys, by how many times an even weight the largest is."""

from __future__ import annotations

from typing import Any

import pytest

from headscope.engine.base import ANALYSES
from headscope.engine.plan import analyze
from tests.oracles import tiny
from tests.oracles.run_options import run_options


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
    options = run_options(seed=1, explained_steps=1, attention=attention, keep_special=keep)
    found = analyze(its, corpus, analyses=[ANALYSES.get("explained")], options=options, replicates=19)
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
