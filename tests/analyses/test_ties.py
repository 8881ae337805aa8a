"""Ties are no preference: what is equal is not ranked without a word, and what is not there has no place."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

from headscope.data.corpus import Corpus, Sentence
from headscope.engine.base import ANALYSES, RunOptions
from headscope.engine.plan import analyze
from headscope.heads import HeadId, Site, all_heads
from headscope.pruning.gate_layout import gate_layout
from headscope.pruning.ranking.ranking import rank_heads
from headscope.results.study import Study
from tests.oracles import checkpoints, speakers
from tests.oracles.run_options import run_options


def study(its: Any, corpus: Corpus, *names: str) -> Study:
    return analyze(its, corpus, analyses=[ANALYSES.get(name) for name in names], options=RunOptions(), replicates=19)


@pytest.mark.parametrize("kind", ["native-pre", "gpt2"])
def test_heads_that_weigh_all_keys_alike_are_named(kind: str) -> None:
    """Keys of zero give every key the same score; the other layers of the model do not tie."""
    its = copy.copy(speakers.checkpoint(kind))
    its.model = copy.deepcopy(its.model)
    model: Any = its.model
    corpus = speakers.corpus(kind)
    assert not [text for text in study(its, corpus, "entropy").remarks if text.startswith("entropy")]
    if kind == "gpt2":
        projection, width = model.transformer.h[1].attn.c_attn, model.config.n_embd
        flat = [projection.weight[:, width : 2 * width], projection.bias[width : 2 * width]]
        place = (Site.DECODER_SELF, 1)
    else:
        site, layer, _, module = next(iter(model.attention_modules()))
        flat, place = list(module.key.parameters()), (site, layer)
    with torch.no_grad():
        for part in flat:
            part.zero_()
    found = study(its, corpus, "entropy")
    (remark,) = [text for text in found.remarks if text.startswith("entropy")]
    count = its.layout[place]
    assert remark.startswith(f"entropy: {count} heads weigh all keys alike ({HeadId(*place, 0)}, ")
    heads = found.heads[(found.heads.site == place[0].value) & (found.heads.layer == place[1])]
    assert heads.entropy_share.tolist() == pytest.approx([1.0] * count, abs=1e-6)


def test_batches_in_which_no_query_counts_leave_similarities_alone() -> None:
    """Lines of one token, without the first one: batches of them have nothing to compare."""
    its, options = speakers.checkpoint("t5"), run_options(exclude_sinks=True)
    texts = ["ah", "ah bi ah 3", "bi", "3", "bi bi ) ah bi", "ah", "ah ) bi", "bi", "3", "ah", "bi ah 3 ah bi ) ah"]
    found = []
    for kept in (texts, [text for text in texts if " " in text]):
        lines = [Sentence(number, text, text) for number, text in enumerate(kept)]
        corpus = Corpus("lines", len(lines), "0" * 40, partial(iter, lines), has_target=True)
        made = analyze(its, corpus, analyses=[ANALYSES.get("similarity")], options=options, replicates=19)
        of_source = made.heads[made.heads.site != "decoder-self"]  # the decoder's first token is its start
        found.append(of_source[["similarity_cosine", "similarity_cka"]].to_numpy())
    assert found[0] == pytest.approx(found[1], abs=1e-9) and (found[0] == found[0]).all()


def test_ties_at_the_border_of_a_ranking() -> None:
    gates = gate_layout(checkpoints.small().attention_sites)
    heads = list(all_heads(gates.counts))
    scores = {head: float(number // 4) for number, head in enumerate(heads)}  # fours that tie
    for keep in range(gates.heads + 1):
        found = rank_heads(gates, keep, lambda gone: scores)
        kept = {gates.units[number][0] for number in found.kept.nonzero()[:, 0].tolist()}
        cut = [scores[head] for head in heads if scores[head] in {scores[k] for k in kept} and head not in kept]
        expected = {head for head in heads if scores[head] in cut}
        assert {gates.units[number][0] for number in found.tied.nonzero()[:, 0].tolist()} == expected
