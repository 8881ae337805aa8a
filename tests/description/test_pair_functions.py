"""Functions of pairs of positions, the shares that they explain, and sentences that say so."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from headscope.data.encoded import pad_side
from headscope.data.parses import Aligned
from headscope.description.features import FEATURES, describe_heads
from headscope.description.loglinear import Description, FitData, fit_description, loss_and_gradient, with_pairs
from headscope.description.pair_function import PAIR_FUNCTIONS, Masses, functions_for, sum_masses
from headscope.description.sample import SampleBlocks
from headscope.description.shares import ExplainedSums, explain_shares
from headscope.description.tokens import Pairs, TokenReader, Tokens, word_starts
from headscope.engine.base import ANALYSES, HeadBatch
from headscope.engine.evidence.report import Rate
from headscope.engine.plan import analyze
from headscope.heads import Site
from headscope.pair_functions.keys import CONTENT, FUNCTION, WORDS
from tests.makers import handmade
from tests.makers.studies import run_options, study_of
from tests.oracles import loglinear, speakers, tiny

NAMES = PAIR_FUNCTIONS.names()
SENTENCE = """[S]:x (:PUNCT The:DET dog:NOUN ):PUNCT bark:VERB ##s:VERB ,:PUNCT ":PUNCT the:DET Dog:PROPN 3:NUM !:PUNCT
":PUNCT It:PRON is:AUX .:PUNCT [S]:x a:DET ):PUNCT b:ADP [E]:x"""
PIECES, TAGS = zip(*(token.rsplit(":", 1) for token in SENTENCE.split()), strict=True)
Predicate = Callable[[Tokens, int, int], bool]


def make_tokens() -> Tokens:
    """A sentence with a tree, brackets, quotes, a word of two pieces, and a second text."""
    special = np.array([text in ("[S]", "[E]") for text in PIECES])
    text = np.array([piece.removeprefix("##") for piece in PIECES], dtype=object)
    starts = word_starts(PIECES, special, "##")
    word = np.where(special, -1, starts.cumsum() - 1)
    draw = np.random.default_rng(4)
    heads = np.array([-1, *(int(draw.integers(n)) for n in range(1, word.max() + 1))])
    parent = np.where(special, -1, heads[word.clip(min=0)])
    forms = np.array(["" if odd else piece.lower() for odd, piece in zip(special, text, strict=True)], dtype=object)
    names = {piece: n for n, piece in enumerate(dict.fromkeys(PIECES))}
    ids = np.array([names[piece] for piece in PIECES])
    segment = np.array([0] * 17 + [1] * 5)
    relation = np.full(len(text), "dep", dtype=object)
    return Tokens(
        ids, special, text, starts, word, np.array(TAGS, dtype=object), forms, parent, relation, segment, True
    )


def mark(t: Tokens, k: int) -> bool:
    return not t.special[k] and not any(c.isalnum() for c in t.text[k])


def nearest_before(t: Tokens, q: int, k: int, condition: Callable[[int], bool]) -> bool:
    return k == max((n for n in range(q) if condition(n)), default=-1)


ORACLES: dict[str, Predicate] = {
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
    "after-delimiter": lambda t, q, k: nearest_before(t, q, k, lambda n: n > 0 and mark(t, n - 1) and not mark(t, n)),
    "previous-sentence-end": lambda t, q, k: nearest_before(t, q, k, lambda n: t.text[n] in (".", "!", "?")),
    "final-punctuation": lambda t, q, k: mark(t, k) and all(mark(t, n) or t.special[n] for n in range(k, len(t))),
    "bracket": lambda t, q, k: (min(q, k), max(q, k)) in {(1, 4), (8, 13)},
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


@pytest.mark.parametrize("name", NAMES)
def test_holds_where_its_oracle_says(name: str) -> None:
    tokens = make_tokens()
    plain = np.flatnonzero(~tokens.special)
    queries = np.flatnonzero(~tokens.special)[::2]
    actual = np.asarray(PAIR_FUNCTIONS.get(name).holds(Pairs(tokens, tokens, queries)))
    assert actual.shape == (len(queries), len(tokens)) and actual.dtype == bool
    expected = np.array([[bool(ORACLES[name](tokens, q, k)) for k in plain.tolist()] for q in queries.tolist()])
    np.testing.assert_array_equal(actual[:, plain], expected)
    assert expected.any() or name in ("ADV", "ADJ", "PART", "CCONJ", "SCONJ", "final-punctuation")


@pytest.mark.parametrize("name", ["content-words", "function-words", "same-class"])
def test_a_parse_without_tags_has_no_classes_of_words(name: str) -> None:
    """For a parse without tags, such as links of atoms, functions of word classes hold nowhere."""
    checkpoint = speakers.checkpoint("bert")
    side = pad_side(checkpoint.encode(["ah 3 bi ah ) ah"], side="source", limit=97))
    units = [[index] for index in range(1, side.ids.shape[1] - 1)]
    reader = TokenReader.of(checkpoint, "source")
    for tags, expected in ((("NOUN", "NUM", "DET", "NOUN", "PUNCT", "DET"), True), (("",) * 6, False)):
        tokens = reader.tokens(replace(side, aligned=(Aligned(units, [("map", 0, 3)], 0, tags),)), 0)
        pairs = Pairs(tokens, tokens, np.arange(len(tokens)))
        assert tokens.has_parse and bool(PAIR_FUNCTIONS.get(name).holds(pairs).any()) is expected


# Shares of heads that were made by hand, and fits against plain softmax regression.


RULES = [getattr(handmade, name) for name in ("before", "sink", "mixture", "subject", "same_token", "parent", "even")]
BEFORE, SINK, MIXTURE, SUBJECT, SAME_TOKEN, PARENT, EVEN = range(len(RULES))


@pytest.fixture(scope="module")
def sample_blocks() -> SampleBlocks:
    return handmade.build_blocks(handmade.sample(RULES, sentences=120))


@pytest.fixture(scope="module")
def explanation(sample_blocks: SampleBlocks) -> tuple[ExplainedSums, Masses]:
    sums = explain_shares(sample_blocks)
    functions = functions_for(Site.ENCODER_SELF, [pairs for part in sample_blocks.pairs for pairs in part])
    return sums, sum_masses(sample_blocks, functions, sums.position)


def shares(sums: ExplainedSums) -> dict[str, np.ndarray]:
    room = sums.room.sum(0)
    return {group: (gain.sum(0) / room).numpy() for group, gain in sums.gains.items()}


@pytest.mark.slow
def test_heads_made_by_hand_are_explained_by_what_they_follow(explanation: tuple[ExplainedSums, Masses]) -> None:
    values = shares(explanation[0])
    for head in (BEFORE, SINK, MIXTURE):
        assert values["position"][head] == pytest.approx(1, abs=0.02)
    assert values["token"][SAME_TOKEN] < 0.8 and values["classes"][SAME_TOKEN] == pytest.approx(1, abs=0.02)
    for head in (SUBJECT, PARENT):
        assert values["lexical"][head] < 0.9 and values["syntax"][head] == pytest.approx(1, abs=0.02)
    assert np.isnan(values["syntax"][EVEN])


@pytest.mark.slow
def test_position_alone_explains_what_plain_regression_finds() -> None:
    """Held-out shares of position equal those of a softmax regression without a ridge, fitted to convergence."""
    sample = handmade.sample((handmade.subject, handmade.mixture), sentences=80)
    blocks = handmade.build_blocks(sample)
    expected = loglinear.held_out_shares(blocks, FEATURES["position"])
    assert shares(explain_shares(blocks))["position"] == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("exclude_sinks", "piece"), [(False, 2**19), (True, 2**19), (False, 200), (False, 5000)])
def test_gradients_are_those_of_autograd(exclude_sinks: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of rows or sentences processed at a time."""
    monkeypatch.setattr("headscope.description.loglinear.PIECE", piece)
    monkeypatch.setattr("headscope.description.loglinear.MIN_ROWS", 2)
    sample = handmade.sample(RULES, sentences=7, dtype=torch.float64)
    sample_blocks = handmade.build_blocks(sample, width=5, exclude_sinks=exclude_sinks)
    blocks = [loglinear.in_double(block) for block in sample_blocks.blocks]
    tables = (sample_blocks.tables[0].double(), sample_blocks.tables[1].double())
    data = FitData(blocks, [0, 2, 4], [block.sentences % 3 > 0 for block in blocks], tables)
    start = Description(torch.zeros(sum(sample_blocks.inventory.sizes), len(RULES), dtype=torch.float64))
    description = with_pairs(start, data, rank=3)
    flat = description.flat() + 0.1 * torch.randn(description.flat().shape, generator=torch.Generator().manual_seed(2))
    loss, gradient, held_out_loss = loss_and_gradient(description.like(flat), data)
    variable = flat.clone().requires_grad_()
    expected = loglinear.losses(description.like(variable), blocks, data.features, data.rows, tables)
    assert torch.allclose(loss, expected[0]) and torch.allclose(held_out_loss, expected[1])
    assert torch.allclose(gradient, torch.autograd.grad(expected[0].sum(), variable)[0], atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("resting", [1, 3])
def test_where_many_heads_rest_the_rest_of_their_weight_is_described(resting: int) -> None:
    """One or three of the six heads of a BERT give [CLS] 0.9 of their weight."""
    checkpoint, options = tiny.checkpoint("bert", 3), run_options(explained_steps=1)

    class SinkHeads(ANALYSES.get("explained")):  # type: ignore[misc]
        def observe(self, heads: HeadBatch) -> Any:
            weights = heads.weights.clone()
            for head in range(3):
                if 3 * heads.layer + head < resting:
                    weights[:, head] *= 0.1
                    weights[:, head, :, 0] += 0.9
            assert heads.rows is not None
            return super().observe(replace(heads, rows=heads.rows._replace(weights=weights)))

    study = analyze(checkpoint, tiny.corpus(3, count=17), analyses=[SinkHeads], options=options, replicates=19)
    assert ("beyond_sinks" in study.heads) is (resting == 3)
    descriptions = "".join(study.heads["description"])
    assert ("position and sinks" in descriptions) is (resting == 1)
    if resting == 3:
        assert (study.heads["beyond_sinks"][:3] < 0.1).all() and (study.heads["beyond_sinks"][3:] > 0.1).all()
        answer = next(answer for answer in study.answers() if answer.question == "What explains their weights")
        assert answer.sentence.startswith("6 heads beyond first and special tokens, which have 0.")
    example_heads = {row["head"] for row in study.tables["examples"].to_dict("records") if row["layer"] == 0}
    assert example_heads == {0, 1, 2} and (study.tables["examples"]["key_position"] > 0).all()


@pytest.mark.slow
def test_fits_reach_the_minimum_of_plain_regression_and_heads_do_not_depend_on_each_other() -> None:
    blocks = handmade.build_blocks(handmade.sample((handmade.mixture, handmade.subject), sentences=30))
    rows = [torch.ones(len(block.sentences), dtype=torch.bool) for block in blocks.blocks]
    data = FitData(blocks.blocks, [0, 1], rows, blocks.tables)
    start = Description(torch.zeros(sum(blocks.inventory.sizes), 2))

    def take_heads(heads: slice) -> FitData:
        return replace(data, blocks=[replace(block, weights=block.weights[..., heads]) for block in blocks.blocks])

    def loss(description: Description, heads: slice) -> torch.Tensor:
        return loss_and_gradient(description, take_heads(heads))[0]

    all_heads = slice(None)
    joint = fit_description(start, data, steps=60)
    minimum = loglinear.least_loss(blocks, data.features)
    assert (loss(joint, all_heads) / minimum).numpy() == pytest.approx(1, abs=0.01)
    single = fit_description(Description(start.theta[:, 1:]), take_heads(slice(1, 2)), steps=60)
    assert torch.allclose(loss(single, slice(1, 2)), loss(joint, all_heads)[1:], rtol=1e-3)


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
    descriptions = describe_heads(heads, {"labels": pd.DataFrame(labels), "token_pairs": pd.DataFrame([pair])})
    assert descriptions == [  # the same said twice, of two texts: once
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
    model, corpus = tiny.checkpoint(kind, 3), tiny.corpus(3, count=17)
    study = study_of(
        model, corpus, "explained", replicates=19, seed=1, explained_steps=1, attention=attention, keep_special=keep
    )
    observations = [tiny.trace_sentence(kind, model, sentence) for sentence in corpus]
    rows: list[Any] = list(study.tables["examples"].itertuples())
    by_head: dict[Any, list[Any]] = {}
    for row in rows:
        by_head.setdefault((row.layer, row.head), []).append(row)
    assert len(by_head) > 3
    (site,) = {site_layer[0] for site_layer in model.layout}
    for (layer, head), examples in by_head.items():
        best = []
        for observation in observations:
            queries = [
                (max(row[s] for s in keys[keys[0] == 0 :]) * n, n, observation.number, t)
                for t, row, keys in observation.rows((site, layer), head, keep)
                if (n := len(keys) - (keys[0] == 0)) >= 5
            ]
            best += [max(queries)] if queries else []
        best = sorted(best, reverse=True)[:5]
        assert [(row.keys_seen, row.sentence, row.query_position) for row in examples] == [entry[1:] for entry in best]
        assert [row.weight * row.keys_seen for row in examples] == pytest.approx([entry[0] for entry in best], rel=1e-5)
