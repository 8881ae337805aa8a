"""Every analysis against a slow, obvious re-derivation, on tiny models in float64."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.analyses.distinctness import FactoredSlices, cosines, effective_rank, principal_cosines
from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus, Sentence
from headscope.data.parses import Parse, Relation, Token
from headscope.engine import plan
from headscope.engine.frequencies import count_subwords, frequency_ranks, read_counts
from headscope.engine.heads.head_batch import max_and_position
from headscope.errors import DataError
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.heads import Site, SiteLayer
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import bootstrap, distinctness, evidence, positional, rare_words, similarity, sink, syntactic, tiny
from tests.oracles.rows import ORACLES, RANKS
from tests.oracles.tiny import PIECES
from tests.oracles.trace import Term, Trace

pytestmark = pytest.mark.slow

REPLICATES, SEED, CLOSE = 23, 5, 1e-9
NAMES = (
    *("confidence", "confidence.base", "confidence.advanced", "confidence.pairwise", "entropy", "distance", "sink"),
    *("rare_words", "previous_token", "duplicate_token", "induction", "positional", "syntactic", "similarity"),
    *("similarity.js", "distinctness", "averages"),
)
"""The analyses that this file re-derives."""
SELF = (Site.ENCODER_SELF, Site.DECODER_SELF)
SITES = {
    "distance": SELF,
    **dict.fromkeys(["after_evenness", "after_weight", "before_evenness", "before_weight"], (Site.ENCODER_SELF,)),
    **dict.fromkeys(["previous_token", "duplicate_token", "induction"], (Site.DECODER_SELF,)),
}


@dataclass
class Trial:
    """A study of a tiny model, and the traces that the oracles read."""

    kind: str
    keep: bool
    checkpoint: HuggingFaceCheckpoint
    study: Study
    texts: list[Trace]
    repeats: list[Trace]

    @property
    def site_layers(self) -> list[SiteLayer]:
        return list(self.checkpoint.layout)

    @cached_property
    def rows(self) -> dict[tuple[str, int, int], dict[Any, Any]]:
        """heads.csv by head."""
        records = self.study.heads.to_dict("records")
        by_head = {(row["site"], row["layer"], row["head"]): row for row in records}
        assert len(by_head) == len(records)
        return by_head

    def estimate(self, column: str, site_layer: SiteLayer, head: int) -> tuple[float, float, float]:
        """Value and interval in heads.csv."""
        row = self.rows[site_layer[0].value, site_layer[1], head]
        return row[column], row[f"{column}_low"], row[f"{column}_high"]

    def mean(self, terms: Sequence[Term]) -> bootstrap.Estimate:
        return bootstrap.mean(terms, seed=SEED, replicates=REPLICATES)


CASES = [
    ("bert", 1, False, False),
    ("mistral", 3, False, False),
    ("gemma", 4, True, False),
    ("t5", 5, False, False),
    ("t5", 6, True, False),
    ("t5", 7, False, True),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def trial(request: pytest.FixtureRequest) -> Trial:
    kind, seed, keep, exclude_sinks = request.param
    checkpoint = tiny.checkpoint(kind, seed)
    two_sided = tiny.KINDS[kind].two_sided
    corpus = tiny.corpus(seed, count=11 if two_sided else 17, target=two_sided)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "RANDOM_SEQUENCES", 13)
        patch.setattr(plan, "RANDOM_BLOCK", 11)
        settings: Any = {"keep_special": keep, "exclude_sinks": exclude_sinks, "tokens": 97, "replicates": REPLICATES}
        options: Any = {"relations": "nsubj,det,obj", "ranks": torch.tensor(RANKS), "frequencies": "made", "seed": SEED}
        study = study_of(checkpoint, corpus, *NAMES, **settings, **options)
        repeats = observe_repeats(kind, checkpoint)
    texts = [tiny.trace_sentence(kind, checkpoint, sentence) for sentence in corpus]
    if exclude_sinks:
        texts = [text.without_first() for text in texts]
    return Trial(kind, keep, checkpoint, study, texts, repeats)


def observe_repeats(kind: str, checkpoint: HuggingFaceCheckpoint) -> list[Trace]:
    """The repeated random tokens, one sequence at a time."""
    if kind == "bert":
        return []
    texts: list[Trace] = []
    for batch in plan.random_batches(checkpoint, seed=SEED, batching=BatchingOptions(limit=97)):
        for row in range(0, len(batch.indices)):
            source = batch.source.ids[row].tolist()
            text = Trace(len(texts), source, [False] * len(source))
            if batch.target is not None:
                text.target = batch.target.ids[row].tolist()
                text.target_special = [True] + [False] * (len(text.target) - 1)
            else:
                text.source_special[0] = True
            texts.append(tiny.fill_calls(kind, checkpoint, text))
    return texts


def assert_same(actual: Sequence[float], expected: Sequence[float]) -> None:
    assert actual == pytest.approx(expected, abs=CLOSE, rel=0, nan_ok=True)


@pytest.mark.parametrize("column", ORACLES)
def test_means_over_tokens(trial: Trial, column: str) -> None:
    for site_layer in trial.site_layers:
        for head in range(trial.checkpoint.layout[site_layer]):
            if site_layer[0] not in SITES.get(column, tuple(Site)):
                assert column not in trial.study.heads or isnan(trial.estimate(column, site_layer, head)[0])
                continue
            if column.startswith("rare") and site_layer == (Site.DECODER_SELF, site_layer[1]) and trial.kind == "t5":
                assert isnan(trial.estimate(column, site_layer, head)[0])  # its keys are not the source
                continue
            terms = [ORACLES[column](text, site_layer, head, trial.keep) for text in trial.texts]
            assert_same(trial.estimate(column, site_layer, head), trial.mean(terms))


@pytest.mark.parametrize("column", ["previous_token", "duplicate_token", "induction"])
def test_patterns_on_repeated_random_tokens(trial: Trial, column: str) -> None:
    if not trial.repeats:
        assert f"{column}_random" not in trial.study.heads
        return
    for site_layer in [site_layer for site_layer in trial.site_layers if site_layer[0] is Site.DECODER_SELF]:
        for head in range(trial.checkpoint.layout[site_layer]):
            terms = [ORACLES[column](text, site_layer, head, trial.keep) for text in trial.repeats]
            assert_same(trial.estimate(f"{column}_random", site_layer, head), trial.mean(terms))


@pytest.mark.parametrize("kind", ["mistral", "t5"])
def test_random_tokens_are_a_block_twice(kind: str) -> None:
    count = 0
    for batch in plan.random_batches(tiny.checkpoint(kind, 1), seed=SEED, batching=BatchingOptions(limit=97)):
        target = batch.target
        for row in range(len(batch.indices)):
            ids = (batch.source if target is None else target).ids[row].tolist()
            start, block = ids[:1], ids[1:26]
            assert ids == [*start, *block, *block] and not {*block} & {0, 2, 3, 4} and len(ids) == 51
            assert start == [tiny.START if target is None else tiny.PAD]
            assert target is None or batch.source.ids[row].tolist() == block
            count += 1
    assert count == 64


def test_offsets(trial: Trial) -> None:
    table = trial.study.tables["positional"]
    for site_layer in [site_layer for site_layer in trial.site_layers if site_layer[0] in SELF]:
        for head in range(trial.checkpoint.layout[site_layer]):
            counts = [positional.histogram(text, site_layer, head, trial.keep) for text in trial.texts]
            able = [positional.able(text, site_layer, head, trial.keep) for text in trial.texts]
            offset = positional.modal(counts, able)
            assert trial.estimate("offset", site_layer, head)[0] == offset
            terms = [(float(hits[offset]), cases[offset]) for hits, cases in zip(counts, able, strict=True)]
            assert_same(trial.estimate("offset_share", site_layer, head), trial.mean(terms))
            rows = table[(table.site == site_layer[0].value) & (table.layer == site_layer[1]) & (table["head"] == head)]
            assert dict(zip(rows.offset, rows["count"], strict=True)) == dict(sum(counts, Counter()))
            possible = sum(able, Counter())
            assert rows.queries.tolist() == [possible[offset] for offset in rows.offset]
            row: Any
            for row in rows.itertuples():
                terms = [(float(hits[row.offset]), cases[row.offset]) for hits, cases in zip(counts, able, strict=True)]
                assert_same((row.share, row.share_low, row.share_high), trial.mean(terms))


def test_relations(trial: Trial) -> None:
    if trial.kind == "t5":
        assert set(trial.study.tables["syntactic"].site) == {"encoder-self"}
    best: dict[tuple[Any, ...], float] = {}
    rows: list[Any] = list(trial.study.tables["syntactic"].itertuples())
    parsed_site = Site.DECODER_SELF if trial.kind in ("mistral", "gemma") else Site.ENCODER_SELF
    site_layers = [site_layer for site_layer in trial.site_layers if site_layer[0] is parsed_site]
    assert len(rows) == sum(trial.checkpoint.layout[site_layer] for site_layer in site_layers) * 6
    for row in rows:
        site_layer, direction = (Site(row.site), row.layer), row.label[-1]
        assert row.direction == {">": "head-to-dependent", "<": "dependent-to-head"}[direction]
        hits = [syntactic.hits(text, site_layer, row.head, row.relation, direction) for text in trial.texts]
        assert_same((row.accuracy, row.accuracy_low, row.accuracy_high), trial.mean(hits))
        assert row.count == sum(count for _, count in hits)
        offsets = [syntactic.offsets(text, row.relation, direction) for text in trial.texts]
        offset = positional.modal(offsets)
        assert row.baseline_offset == offset
        base = [(float(line[offset]), sum(line.values())) for line in offsets]
        assert_same((row.baseline, row.baseline_low, row.baseline_high), trial.mean(base))
        margin = [(h - b, n) for (h, n), (b, _) in zip(hits, base, strict=True)]
        assert_same((row.margin, row.margin_low, row.margin_high), trial.mean(margin))
        key = (*site_layer, row.head)
        best[key] = max(best.get(key, -2.0), row.margin)
    for (site, layer, head), largest in best.items():
        assert trial.estimate("syntactic_margin", (site, layer), head)[0] == largest


def test_evidence_of_labels(trial: Trial) -> None:
    """A row for every label that passes by its estimate; p by loops over sentences."""
    rows: list[dict[Any, Any]] = trial.study.tables["labels"].to_dict("records")
    relations = trial.study.tables["syntactic"]
    passing = [f"syntactic:{label}" for label in relations[relations.margin >= 0.1].label]
    heads: list[Any] = list(trial.study.heads.itertuples())
    passing += ["sink"] * sum(_is_sink(trial, name, head) for name in ("sink", "sink_special") for head in heads)
    passing += [f"positional:{head.offset:+.0f}" for head in heads if head.offset_share >= 0.9]
    subset = [row for row in rows if row["label"].startswith(("syntactic:", "positional:", "sink"))]
    assert sorted(row["label"] for row in subset) == sorted(passing)
    for row in subset:
        head = (Site(row["site"]), row["layer"]), row["head"]
        terms: list[evidence.Row] = []
        against_chance: list[evidence.Row] = []
        for text in trial.texts:
            if row["measure"] == "syntactic_margin":
                relation, direction = row["label"][10:-1], row["label"][-1]
                is_row = (relations.label == row["label"][10:]) & (relations.site == row["site"])
                base = syntactic.offsets(text, relation, direction)[relations[is_row].baseline_offset.iloc[0]]
                hits, count = syntactic.hits(text, *head, relation, direction)
            elif row["measure"] == "offset_share":
                offset = int(row["label"][11:])
                histogram, able = (f(text, *head, trial.keep) for f in (positional.histogram, positional.able))
                hits, count, base = histogram[offset], able[offset], 0
            else:
                hits, count, base = *ORACLES[row["measure"]](text, *head, trial.keep), 0
                by_chance, _ = sink.chance(text, *head, trial.keep, only_special=row["measure"] == "sink_special")
                against_chance.append((hits, 2 * by_chance, count))
            terms.append((hits, base, count))
        p = evidence.p_value(terms, 0.5 if against_chance else row["threshold"])
        if against_chance:
            p = max(p, evidence.p_value(against_chance, 0.0))
        assert row["instances"] == sum(count for *_, count in terms) and row["units"] == sum(n > 0 for *_, n in terms)
        assert row["p"] == pytest.approx(p, rel=1e-3, abs=1e-9)
        has_enough = row["instances"] >= 20 and row["units"] >= 10
        assert row["given"] == (has_enough and row["value_low"] >= row["threshold"] and row["p_adjusted"] <= 0.05)
        assert row["missing"] or row["given"]


def _is_sink(trial: Trial, name: str, head: Any) -> bool:
    """Whether a head puts half of its weight on the sink, and twice as much as by chance."""
    site_layer, special = (Site(head.site), head.layer), name == "sink_special"
    terms = [sink.chance(text, site_layer, head.head, trial.keep, only_special=special) for text in trial.texts]
    return bool(getattr(head, name) >= max(0.5, 2 * sum(term[0] for term in terms) / sum(term[1] for term in terms)))


@pytest.mark.parametrize(
    "measure, oracle", [("cosine", similarity.cosine), ("l2", similarity.l2), ("js", similarity.jensen_shannon)]
)
def test_similarity_of_pairs(trial: Trial, measure: str, oracle: Callable[..., Term]) -> None:
    for (site, layer), heads in trial.checkpoint.layout.items():
        arrays = [trial.study.arrays[f"{site}/{layer}/{measure}{end}"] for end in ("", "_low", "_high")]
        for pair in [(i, j) for i in range(heads) for j in range(heads) if (i + j) % 2 or i == j]:
            terms = [oracle(text, (site, layer), pair, trial.keep) for text in trial.texts]
            assert_same([array[pair] for array in arrays], trial.mean(terms))


def test_cka(trial: Trial) -> None:
    """Sentence i is in fold i mod 8; replicates are shifted to have the value as their mean, and widened."""
    folds = [[text for text in trial.texts if text.number % 8 == fold] for fold in range(8)]
    for site_layer in trial.site_layers:
        arrays = [trial.study.arrays[f"{site_layer[0]}/{site_layer[1]}/cka{end}"] for end in ("", "_low", "_high")]
        heads = trial.checkpoint.layout[site_layer]
        value = np.array(
            [[similarity.cka(trial.texts, site_layer, (i, j), trial.keep) for j in range(heads)] for i in range(heads)]
        )
        np.testing.assert_allclose(arrays[0], value, atol=CLOSE, rtol=0)
        means = [(value[i].sum() - value[i, i]) / (heads - 1) for i in range(heads)]
        assert_same([trial.estimate("similarity_cka", site_layer, i)[0] for i in range(heads)], means)
    replicates = [
        similarity.cka(trial.texts, site_layer, (0, 1), trial.keep, sample=[text for n in draw for text in folds[n]])
        for draw in bootstrap.draw_samples(8, seed=SEED, replicates=REPLICATES)
    ]
    mean, wider = sum(replicates) / len(replicates), (8 / 7) ** 0.5
    values = [(r - mean) * wider + value[0, 1] for r in replicates]
    values = [min(1.0, max(0.0, r)) for r in values]
    assert_same([array[0, 1] for array in arrays[1:]], [bootstrap.quantile(values, share) for share in (0.025, 0.975)])


def slices(trial: Trial, site_layer: SiteLayer) -> dict[str, list[np.ndarray]]:
    """Every head's [k d] slice of each matrix, by the architecture's own names."""
    parts = dict(trial.checkpoint.model.named_modules())
    heads = trial.checkpoint.layout[site_layer]
    layer = site_layer[1]
    names, width, groups = {
        "bert": (
            [f"encoder.layer.{layer}.attention.{n}" for n in ("self.query", "self.key", "self.value", "output.dense")],
            5,
            heads,
        ),
        "mistral": ([f"layers.{layer}.self_attn.{n}_proj" for n in "qkvo"], 10, 2),
        "gemma": ([f"layers.{layer}.self_attn.{n}_proj" for n in "qkvo"], 6, 2),
        "t5": (
            [
                f"{'encoder' if site_layer[0] is Site.ENCODER_SELF else 'decoder'}.block.{layer}.layer."
                f"{'1.EncDecAttention' if site_layer[0] is Site.CROSS else '0.SelfAttention'}.{n}"
                for n in "qkvo"
            ],
            5,
            heads,
        ),
    }[trial.kind]
    by_letter = {}
    for letter, name in zip("qkvo", names, strict=True):
        weight = parts[name].weight.detach().numpy()
        weight = weight.T if letter == "o" else weight
        shared = heads // groups if letter in "kv" else 1
        by_letter[letter] = [weight[h // shared * width : (h // shared + 1) * width] for h in range(heads)]
    return by_letter


def test_distinctness(trial: Trial) -> None:
    table = trial.study.tables["distinctness"]
    for (site, layer), count in trial.checkpoint.layout.items():
        heads, matrices = range(count), slices(trial, (site, layer))
        for letter, weights in matrices.items():
            for column, oracle in (("cosine", distinctness.cosine), ("overlap", distinctness.overlap)):
                for i in heads:
                    pairs = [oracle(weights[i], weights[j]) for j in heads if j != i]
                    expected = sum(pairs) / len(pairs) if pairs else nan
                    assert_same(trial.estimate(f"{column}_{letter}", (site, layer), i), (expected,) * 3)
            rows = table[(table.site == site.value) & (table.layer == layer) & (table.matrix == f"W_{letter.upper()}")]
            assert list(zip(rows.head_a, rows.head_b, strict=True)) == [(i, j) for i in heads for j in heads if i < j]
            row: Any
            for row in rows.itertuples():
                a, b = weights[row.head_a], weights[row.head_b]
                assert_same((row.cosine, row.overlap), (distinctness.cosine(a, b), distinctness.overlap(a, b)))
                angles = distinctness.principal_angles(a, b)
                # acos near 1 keeps half of the digits
                assert (row.angle_smallest, row.angle_largest) == pytest.approx((angles[0], angles[-1]), abs=1e-5)
        for column, left, right in (("rank_qk", "q", "k"), ("rank_ov", "o", "v")):
            for i in heads:
                rank = distinctness.effective_rank(matrices[left][i], matrices[right][i])
                assert_same(trial.estimate(column, (site, layer), i), (rank,) * 3)


@pytest.mark.parametrize("condition", [1.0, 1e2, 9e2, 2e3, 9e4, 2e5, 9e5, 2e6])
def test_slices_that_nearly_lack_rank(condition: float) -> None:
    """Both factorizations of slices, on either side of the condition numbers that decide between them."""
    generator = torch.Generator().manual_seed(3)
    left, _, right = torch.linalg.svd(
        torch.randn(3, 5, 17, generator=generator, dtype=torch.float64), full_matrices=False
    )
    sizes = torch.logspace(0, -torch.tensor(condition).log10().item(), 5, dtype=torch.float64)
    weights = left @ (sizes[:, None] * right)
    factors = FactoredSlices.of(weights)
    square = weights @ weights.transpose(1, 2)
    torch.testing.assert_close(factors.triangle @ factors.triangle.transpose(1, 2), square, rtol=0, atol=1e-14)
    assert factors.lacking.tolist() == [condition > 1e6] * 3
    flat = [[distinctness.cosine(a, b) for b in weights.numpy()] for a in weights.numpy()]
    np.testing.assert_allclose(cosines(factors.dots).numpy(), flat, atol=1e-14)
    angle_cosines = principal_cosines(factors)
    if condition > 1e6:
        assert angle_cosines.isnan().all()
    else:
        for i, j in ((0, 1), (0, 2), (1, 2)):
            expected = np.cos(np.radians(distinctness.principal_angles(right[i].numpy(), right[j].numpy())))
            np.testing.assert_allclose(angle_cosines[i, j].numpy(), expected, atol=1e-9)


def test_heads_wider_than_the_model_all_span_its_stream() -> None:
    weights = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    factors = FactoredSlices.of(weights)
    torch.testing.assert_close(principal_cosines(factors), torch.ones(3, 3, 4, dtype=torch.float64))
    expected = [
        distinctness.effective_rank(one, other) for one, other in zip(weights.numpy(), -weights.numpy(), strict=True)
    ]
    np.testing.assert_allclose(effective_rank(factors.triangle, -factors.triangle).numpy(), expected, atol=1e-9)


# What the definitions say where models and corpora are odd.


def analyze(kind: str, sentences: Sequence[Sentence], *names: str, **options: Any) -> Study:
    """Some analyses on some sentences with a tiny model."""
    sides = {"has_target": sentences[0].target is not None, "has_parses": sentences[0].parse is not None}
    corpus = Corpus("made", len(sentences), "0" * 40, lambda: iter(sentences), **sides)
    options = {"ranks": torch.tensor(RANKS), **options}
    return study_of(tiny.checkpoint(kind, 1), corpus, *names, replicates=REPLICATES, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_added_up_in_float32(dtype: torch.dtype) -> None:
    """The model's own weights are coarse; means over them are not."""
    checkpoint = tiny.checkpoint("mistral", 1)
    checkpoint.model.to(dtype)
    sentence = Sentence(0, " ".join(["ah bh ci dj ek ah"] * 13))
    corpus = Corpus("made", 1, "0" * 40, lambda: iter([sentence]))
    names = ["confidence", "confidence.advanced", "distance", "entropy", "sink", "previous_token", "similarity"]
    study = study_of(checkpoint, corpus, *names, replicates=REPLICATES)
    text = tiny.trace_sentence("mistral", checkpoint, sentence)
    for row in study.heads.itertuples():
        site_layer = Site.DECODER_SELF, row.layer
        for column in ("confidence", "confidence_advanced", "distance", "entropy", "sink", "previous_token"):
            total, count = ORACLES[column](text, site_layer, row.head, False)
            assert getattr(row, column) == pytest.approx(total / count, rel=1e-5)


def test_queries_of_a_source_without_text_do_not_count() -> None:
    """Attention to nothing but the end of the sentence has no counted key, and no other key to divide by."""
    names = ("confidence", "confidence.advanced", "rare_words", "entropy", "sink", "positional")
    sentences = [Sentence(0, "ah bh ci", "dj ek"), Sentence(1, "\u3000", "ah bh ci dj")]
    together, alone = analyze("t5", sentences, *names), analyze("t5", sentences[:1], *names)
    columns = ("confidence", "confidence_advanced", "entropy", "sink", "sink_special", "rarest", "rarest_chance")
    for column in columns:
        for site in ("cross", "encoder-self"):
            actual, expected = (s.heads[column][s.heads.site == site].to_numpy() for s in (together, alone))
            np.testing.assert_allclose(actual, expected, atol=CLOSE)
    actual, expected = (s.heads.confidence[s.heads.site == "decoder-self"].to_numpy() for s in (together, alone))
    assert not np.allclose(actual, expected)


def test_a_rare_token_that_comes_twice_is_hit_at_both_places() -> None:
    """Three of four keys are the rarest, all four one of the two rarest; a sentence of one type has both equal."""
    ranks = torch.arange(53) + 600
    study = analyze("bert", [Sentence(0, "ci ah ci ci")], "rare_words", ranks=ranks)
    assert (study.heads.rarest_chance == 0.75).all() and (study.heads.rarest_two_chance == 1).all()
    assert (study.heads.rarest_two == 1).all()
    study = analyze("bert", [Sentence(0, "ci ci")], "rare_words", ranks=ranks)
    assert (study.heads[["rarest", "rarest_two", "rarest_chance", "rarest_two_chance"]] == 1).all(axis=None)


def test_ranks_follow_counts_then_pieces() -> None:
    checkpoint = tiny.checkpoint("bert", 1)
    texts = ["ah ah bh", "ci bh ah", "ŵŵ"]
    counts = count_subwords(checkpoint, texts, limit=99)
    by_piece = {PIECES[number]: count for number, count in counts.items()}
    assert by_piece == {"ah": 3, "bh": 2, "ci": 1, "[UNK]": 1}
    ranks = frequency_ranks(checkpoint, counts).tolist()
    assert ranks == rare_words.ranks(counts, PIECES, checkpoint.plain_ids(side="source"))
    assert [ranks[PIECES.index(piece)] for piece in ("ah", "bh", "[UNK]", "ci")] == [1, 2, 3, 4]
    plain = [rank for rank in ranks if rank]
    assert sorted(plain) == list(range(1, len(plain) + 1)) and len(plain) == len(checkpoint.plain_ids(side="source"))


def test_counts_from_a_file(tmp_path: Path) -> None:
    checkpoint, path = tiny.checkpoint("bert", 1), tmp_path / "counts"
    path.write_text("ah 7\n##a\t11\nno-piece 3\nah 2\n")
    assert read_counts(checkpoint, path) == {PIECES.index("ah"): 9, PIECES.index("##a"): 11}
    for line in ("ah", "ah -3", "ah 1.5", " 5", "ah ²", "7"):
        path.write_text(f"bh 3\n{line}\n")
        with pytest.raises(DataError, match="counts:2"):
            read_counts(checkpoint, path)
    path.write_text("ah 7\nno 3\nnein 2\n")
    with pytest.raises(DataError, match="1 of 3"):
        read_counts(checkpoint, path)


def parse_sentence(*words: str, relations: Sequence[tuple[str, int, int]]) -> Sentence:
    text, tokens, position = " ".join(words), [], 0
    for word in words:
        tokens.append(Token(position, position + len(word)))
        position += len(word) + 1
    return Sentence(0, text, None, Parse(text, tuple(tokens), tuple(Relation(*relation) for relation in relations)))


def test_baseline_of_tied_offsets_is_the_smaller_one() -> None:
    sentence = parse_sentence("ah", "bh", "ci", "dj", relations=[("obj", 0, 1), ("obj", 0, 3), ("obj", 2, 1)])
    table = analyze("bert", [sentence], "syntactic", relations="obj").tables["syntactic"]
    assert set(zip(table.label, table.baseline_offset, table.baseline, strict=True)) == {
        ("obj>", -1, 1 / 3),
        ("obj<", -3, 1 / 3),
    }


@pytest.mark.parametrize(("dtype", "tied", "apart"), [(torch.float32, 1e-7, 1e-6), (torch.float64, 1e-13, 1e-11)])
def test_rounding_does_not_decide_between_equal_weights(dtype: torch.dtype, tied: float, apart: float) -> None:
    assert max_and_position(torch.tensor([0.1, 0.4, 0.4 * (1 + tied)], dtype=dtype))[1] == 1
    assert max_and_position(torch.tensor([0.1, 0.4, 0.4 * (1 + apart)], dtype=dtype))[1] == 2


def test_unknown_pieces_are_text_and_special_ones_are_not() -> None:
    """ŵŵ is one unknown piece: with it there are three queries, offsets from -2 to 2."""
    table = analyze("bert", [Sentence(0, "ah ŵŵ bh")], "positional").tables["positional"]
    assert (table.groupby(["layer", "head"])["count"].sum() == 3).all() and table.offset.abs().max() <= 2
