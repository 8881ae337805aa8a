"""--queries first|last: what heads do at the position that a model is read at, and nothing else."""

from __future__ import annotations

from typing import Any

import torch

from headscope.data.encoded import CountedTokens, Side
from headscope.engine.base import ANALYSES, RunOptions
from headscope.engine.plan import analyze
from headscope.heads import Site
from tests.oracles import speakers


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
        options = RunOptions(counted=CountedTokens(queries=queries))  # type: ignore[arg-type]
        study = analyze(its, corpus, analyses=[ANALYSES.get("confidence")], options=options, replicates=7)
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


def test_relations_of_words_are_left_out_with_the_reason() -> None:
    text, syntactic = speakers.corpus("bert", count=5), ANALYSES.get("syntactic")
    assert syntactic(RunOptions()).sample(text) is text
    assert "leave out --queries" in str(syntactic(RunOptions(counted=CountedTokens(queries="last"))).sample(text))
