"""Handmade positional heads: possible offsets of queries, and labels."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch

from headscope.analyses.positional import Distance, Positional, queries_by_offset
from headscope.bootstrap import Bootstrap, GroupSums
from headscope.data.corpus import open_corpus
from headscope.data.encoded import Batch, Side
from headscope.engine.base import Aggregates, AnalysisReport, HeadBatch
from headscope.engine.heads.head_batch import Rows
from headscope.heads import HeadId, Site, all_heads
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.ranking.ranking import rank_heads
from tests.makers.studies import run_options, study_of
from tests.oracles import checkpoints, speakers

SITE = Site.ENCODER_SELF


def head_batch(scores: torch.Tensor, words: list[int], *, causal: bool = False, has_ends: bool = True) -> HeadBatch:
    """Heads of scores [h t t] on sentences of so many words, between two special tokens if `has_ends`."""
    b, t = len(words), scores.shape[-1]
    positions, length = torch.arange(t), torch.tensor(words)[:, None] + 2 * has_ends
    real = positions < length
    special = real & ((positions == 0) | (positions == length - 1)) & has_ends
    visible = real[:, None] & ~(causal & (positions > positions[:, None]))
    weights = (scores * visible[:, None]).softmax(-1)
    side = Side(torch.zeros(b, t, dtype=torch.long), real, special)
    keys, batch = real & ~special, Batch(torch.arange(b), 0, side)
    rows = Rows(weights, visible, slice(0, t))
    context = torch.zeros(b, weights.shape[1], t, 1)
    return HeadBatch(SITE, 0, context, keys, keys, side, side, batch, visible, rows)


def observe(scores: torch.Tensor, words: list[int], *, causal: bool = False, has_ends: bool = True) -> AnalysisReport:
    heads = head_batch(scores, words, causal=causal, has_ends=has_ends)
    analysis, sums = Positional(run_options(min_instances=20)), GroupSums()
    sums.add(heads.batch.indices, analysis.observe(heads)["offsets"])
    return analysis.report(Aggregates({("offsets", SITE, 0): sums}, Bootstrap(seed=1, replicates=200)))


def looking(offset: int, t: int) -> torch.Tensor:
    """Scores [t t] that are all on the key at an offset, or on the nearest key."""
    return 99.0 * torch.nn.functional.one_hot((torch.arange(t) + offset).clamp(0, t - 1), t)


def test_an_offset_holds_where_there_is_a_key_at_it() -> None:
    """In sentences of five words, one query in five has only a special token at ±1, two in five at +2."""
    offsets = [-1, 1, 2]
    report = observe(torch.stack([looking(offset, 7) for offset in offsets]), [5] * 30)
    offset, share = (column[SITE, 0] for column in report.columns.values())
    assert offset.value.tolist() == offset.low.tolist() == offset.high.tolist() == offsets
    assert share.value.tolist() == [1, 1, 1]
    assert [*report.labels.values()] == [[f"positional:{offset:+d}"] for offset in offsets]
    table = report.tables["positional"].set_index(["head", "offset"])
    assert [table.loc[(head, offset), "queries"] for head, offset in enumerate(offsets)] == [120, 120, 90]
    assert [row["instances"] for row in report.evidence] == [120, 120, 90]


@pytest.mark.parametrize("words", [2, 5, 9])
def test_distance_of_exactly_one_ahead_counts_the_last_word_too(words: int) -> None:
    """Its next token is special and not a key: if all weights are zero, the first key counts."""
    batch = head_batch(looking(1, words + 2)[None], [words] * 3)
    ratio = Distance(run_options()).observe(batch)["distance"]
    assert (ratio.total[:, 0] / ratio.count[:, 0]).tolist() == pytest.approx([2 - 2 / words] * 3)


@pytest.mark.parametrize("causal", [False, True])
def test_looking_at_the_first_word_is_no_offset(causal: bool) -> None:
    """One query of each text is as far back as text is long: it says nothing about the others."""
    first = 99.0 * torch.nn.functional.one_hot(torch.zeros(12, dtype=torch.long), 12)
    report = observe(first[None], [12] * 30, causal=causal, has_ends=False)
    assert not report.labels and not report.unsupported
    assert report.columns["offset_share"][SITE, 0].value[0] < 0.2


def test_pairs_by_offset_are_those_of_loops() -> None:
    """Blocks of queries from anywhere, and offsets that are counted together at the ends."""
    generator = torch.Generator().manual_seed(5)
    visible, is_counted = torch.rand(3, 11, 11, generator=generator) < 0.3, torch.rand(3, 11, generator=generator) < 0.7
    for reach in (1, 4, 10):
        for first, last in ((0, 11), (0, 5), (5, 11), (10, 11)):
            of_block = is_counted[:, first:last].float(), visible[:, first:last].float()
            able = queries_by_offset(*of_block, first, reach)[:, 0]
            for line, pairs, counts in zip(able, visible, is_counted, strict=True):
                expected = Counter(
                    offset
                    for query in range(first, last)
                    if counts[query]
                    for offset in {max(-reach, min(reach, int(key) - query)) for key in pairs[query].nonzero()}
                )
                assert line.tolist() == [expected[offset] for offset in range(-reach, reach + 1)]


# Ties are no preference: what is equal is not ranked without a word, and what is not there has no place.


@pytest.mark.parametrize("kind", ["native-pre", "gpt2"])
def test_heads_that_weigh_all_keys_alike_are_named(kind: str) -> None:
    """Keys of zero give every key the same score; the other layers of the model do not tie."""
    checkpoint = copy.copy(speakers.checkpoint(kind))
    checkpoint.model = copy.deepcopy(checkpoint.model)
    model: Any = checkpoint.model
    corpus = speakers.corpus(kind)
    assert not [text for text in study_of(checkpoint, corpus, "entropy").remarks if text.startswith("entropy")]
    if kind == "gpt2":
        projection, width = model.transformer.h[1].attn.c_attn, model.config.n_embd
        flat = [projection.weight[:, width : 2 * width], projection.bias[width : 2 * width]]
        site_layer = (Site.DECODER_SELF, 1)
    else:
        site, layer, _, module = next(iter(model.attention_modules()))
        flat, site_layer = list(module.key.parameters()), (site, layer)
    with torch.no_grad():
        for part in flat:
            part.zero_()
    study = study_of(checkpoint, corpus, "entropy")
    (remark,) = [text for text in study.remarks if text.startswith("entropy")]
    count = checkpoint.layout[site_layer]
    assert remark.startswith(f"entropy: {count} heads weigh all keys alike ({HeadId(*site_layer, 0)}, ")
    heads = study.heads[(study.heads.site == site_layer[0].value) & (study.heads.layer == site_layer[1])]
    assert heads.entropy_share.tolist() == pytest.approx([1.0] * count, abs=1e-6)


def test_ties_at_the_border_of_a_ranking() -> None:
    gates = GateLayout(checkpoints.small().attention_sites)
    heads = list(all_heads(gates.counts))
    scores = {head: float(number // 4) for number, head in enumerate(heads)}  # fours that tie
    for keep in range(gates.heads + 1):
        ranking = rank_heads(gates, keep, lambda removed: scores)
        kept = {gates.units[number][0] for number in ranking.stays_open.nonzero()[:, 0].tolist()}
        border = [scores[head] for head in heads if scores[head] in {scores[k] for k in kept} and head not in kept]
        expected = {head for head in heads if scores[head] in border}
        assert {gates.units[number][0] for number in ranking.tied.nonzero()[:, 0].tolist()} == expected


def test_batches_in_which_no_query_counts_leave_similarities_alone() -> None:
    """Lines of one token, without the first one: batches of them have nothing to compare."""
    texts = ["ah", "ah bi ah 3", "bi", "3", "bi bi ) ah bi", "ah", "ah ) bi", "bi", "3", "ah", "bi ah 3 ah bi ) ah"]
    tables = []
    for lines in (texts, [text for text in texts if " " in text]):
        corpus = open_corpus(lines, target=lines)
        study = study_of(speakers.checkpoint("t5"), corpus, "similarity", exclude_sinks=True)
        of_source = study.heads[study.heads.site != "decoder-self"]  # the decoder's first token is its start
        tables.append(of_source[["similarity_cosine", "similarity_cka"]].to_numpy())
    assert tables[0] == pytest.approx(tables[1], abs=1e-9) and (tables[0] == tables[0]).all()
