"""Alignment of two texts, and within texts of a template: links, error rates, labels of heads."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope import assets
from headscope.analyses.alignment import Alignment
from headscope.data.batching import BatchingOptions, batches
from headscope.data.corpus import Corpus, Pair, open_corpus
from headscope.data.encoded import IGNORED
from headscope.data.template import scramble, with_template, words_in_texts
from headscope.data.word_alignment import grow_diag_final_and, train
from headscope.engine import plan
from headscope.engine.base import HeadBatch
from headscope.engine.evidence.aligned_heads import error_rate
from headscope.errors import ConfigError, DataError, HeadscopeError
from headscope.evaluation.opened import check_template
from headscope.formats.base import open_checkpoint
from headscope.heads import HeadId, Site
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import alignment, tiny
from tests.oracles.alignment import Links, attend_to, write_links
from tests.oracles.shuffled import reverse_folds

SENTENCES = 29


def links_of(corpus: Corpus, seed: int = 3) -> list[tuple[alignment.Links, alignment.Links]]:
    """Random sure and possible links of every sentence; some sentences have none."""
    rng = random.Random(seed)
    pairs = []
    for sentence in corpus:
        n, m = len(sentence.source.split()), len((sentence.target or "").split())
        links: alignment.Links = {(rng.randrange(n), rng.randrange(m)) for _ in range(rng.choice([0, 3, 7, 11]))}
        sure = {link for link in links if rng.random() < 0.7}
        pairs.append((sure, links - sure))
    return pairs


def study(checkpoint: Any, corpus: Corpus, cls: Any = Alignment, **options: Any) -> Study:
    return study_of(checkpoint, corpus, cls, tokens=211, replicates=7, **options)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_shares_and_error_rates_are_those_of_the_oracle(
    tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, corpus = tiny.checkpoint("t5", 7), tiny.corpus(7, count=SENTENCES, target=True)
    links = links_of(corpus)
    path = alignment.write_links(tmp_path / "links", links, first=first)
    monkeypatch.setattr(plan, "batches", reverse_folds)  # padding anywhere
    result = study(checkpoint, corpus, alignments=path, alignments_first=first)
    table: Any = result.tables["alignment"].set_index(["layer", "head", "relation"])
    texts = [tiny.trace_sentence("t5", checkpoint, sentence) for sentence in corpus]
    words = []
    for text in texts:
        assert text.target and text.target_special
        source = alignment.words_of(checkpoint.subwords(text.source, side="source"), text.source_special)
        words.append((source, alignment.words_of(checkpoint.subwords(text.target, side="target"), text.target_special)))
    site_layers = [site_layer for site_layer in checkpoint.layout if site_layer[0] is Site.CROSS]
    for site_layer, head, name in itertools.product(site_layers, range(3), alignment.AHEAD):
        shares, sizes = np.zeros(2), np.zeros(4)
        for text, sides, (sure, possible) in zip(texts, words, links, strict=True):
            looks = alignment.attended_words(text, site_layer, head, name, sides)
            shares += alignment.count_hits(looks, sure | possible)
            sizes += alignment.set_sizes(looks, sure, possible)
        row = table.loc[(site_layer[1], head, name)]
        assert row.share == pytest.approx(shares[0] / shares[1], abs=1e-12) and row.positions == shares[1]
        links_, on_sure, on_link, all_sure = sizes
        assert row.aer == pytest.approx(1 - (on_sure + on_link) / (links_ + all_sure), abs=1e-12)
        assert row.precision == pytest.approx(on_link / links_, abs=1e-12)
        assert row.recall == pytest.approx(on_sure / all_sure, abs=1e-12)


@pytest.mark.slow
def test_of_the_trained_model_heads_that_align_are_labelled_and_none_that_follows_positions() -> None:
    """The first four heads of each layer are made by hand: at the diagonal, a fixed offset, or near either."""
    kinds = ("en", "de")
    lines = [assets.captions(kind).read_text().splitlines()[:120] for kind in kinds]
    corpus = open_corpus(lines[0], target=lines[1])
    noise = torch.Generator().manual_seed(3)

    class Positional(Alignment):
        def observe(self, heads: HeadBatch) -> Any:
            key_index = heads.maximum.position.clone()  # [b h t]
            last = heads.keys.sum(-1, keepdim=True) - 1  # [b 1]
            index = torch.arange(key_index.shape[-1]).expand(key_index.shape[0], -1)
            diagonal = (index / (heads.queries.sum(-1, keepdim=True) - 1) * last).round().long()
            ahead, near = torch.randint(2, index.shape, generator=noise), torch.randint(3, index.shape, generator=noise)
            for head, positions in enumerate((index, diagonal, diagonal + ahead, index + near - 1)):
                key_index[:, head] = torch.minimum(positions.clamp(min=0), last)
            return super().observe(alignment.attend_to(heads, key_index))

    result = study(open_checkpoint(assets.trained_model()), corpus, Positional, alignments=assets.captions("align"))
    table = result.tables["alignment"]
    table = table[(table.relation == "predicted") & (table["head"] < 4)]
    assert (table.share > 0.4).sum() >= 6  # right often, and no more
    aligned = [head for head, labels in result.labels.items() if "aligned:predicted" in labels]
    assert all(head.head >= 4 for head in aligned)
    assert sum(head.layer == 2 for head in aligned) == 4


@pytest.mark.slow
def test_links_of_a_file_that_do_not_fit(tmp_path: Path) -> None:
    checkpoint, corpus = tiny.checkpoint("t5", 7), tiny.corpus(7, count=SENTENCES, target=True)
    links = links_of(corpus)
    path = alignment.write_links(tmp_path / "links", links, first=1)
    with pytest.raises(DataError, match=r"\d+.*--alignments-first 1"):
        study(checkpoint, corpus, alignments=path)
    for text, message in (
        ("0-0\n" * (SENTENCES - 1), "28 lines, the text 29"),
        ("0-0\n1:1\n", "links:2: '1:1' is no link"),
        (f"0-{10**20}\n", f"links:1: '0-{10**20}' is no link"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            study(checkpoint, corpus, alignments=path)
    path.write_text("0-0\n" * (SENTENCES + 2))
    assert any("2 lines more than the text" in remark for remark in study(checkpoint, corpus, alignments=path).remarks)
    with pytest.raises(ConfigError):
        study(checkpoint, corpus, align_corpus=path)


def test_the_aligner_is_fast_aligns_model_in_loops() -> None:
    """Both directions: probabilities, also of the empty word, the tension, and the aligned word."""
    rng = random.Random(4)
    sides = [tuple([f"{side}{rng.randrange(5)}" for _ in range(rng.randint(2, 7))] for side in "st") for _ in range(9)]
    pairs = [(" ".join(source), " ".join(target)) for source, target in sides]
    aligner, _ = train(iter(pairs))
    sources, targets = aligner.types
    by_direction = []
    for model, reverse in ((aligner.forward, False), (aligner.backward, True)):
        sentences = [(target, source) if reverse else (source, target) for source, target in sides]
        table, null, tension = alignment.fit_model(sentences)
        assert model.tension == pytest.approx(tension) and len(table) == len(model.pairs)
        for words, value in table.items():
            first, second = words[::-1] if reverse else words
            index = np.searchsorted(aligner.keys, sources[first] * (len(targets) + 1) + targets[second])
            assert model.pairs[index] == pytest.approx(value)
        for word, value in null.items():
            assert model.null[(sources if reverse else targets)[word]] == pytest.approx(value)
        by_direction.append([alignment.align_words(sentence, table, null, tension) for sentence in sentences])
    assert any(None in choices for choices in itertools.chain(*by_direction))
    for number, (source, target) in enumerate(sides):
        forward, backward = np.zeros((2, 1, len(target), len(source)), dtype=bool)
        for position, choice in enumerate(by_direction[0][number]):
            forward[0, position, [] if choice is None else choice] = True
        for position, choice in enumerate(by_direction[1][number]):
            backward[0, [] if choice is None else choice, position] = True
        expected = np.argwhere(grow_diag_final_and(forward, backward)[0])[:, ::-1].tolist()
        assert sorted(expected) == sorted(aligner.align(pairs[number : number + 1])[0].pairs.tolist())


def test_the_aligner_finds_a_dictionary() -> None:
    """Words of two languages, one to one, in similar order: the aligner finds nearly all links."""
    rng = random.Random(11)
    pairs, truth = [], []
    for _ in range(701):
        words = [rng.randrange(97) for _ in range(rng.randint(3, 13))]
        order = sorted(range(len(words)), key=lambda i: i + rng.uniform(0, 2.5))
        pairs.append((" ".join(f"s{w}" for w in words), " ".join(f"t{words[i]}" for i in order)))
        truth.append({(i, j) for j, i in enumerate(order)})
    aligner, count = train(iter(pairs))
    alignments = [set(map(tuple, links.pairs.tolist())) for links in aligner.align(pairs)]
    right = sum(len(a & b) for a, b in zip(alignments, truth, strict=True))
    assert count == 701 and right > 0.97 * sum(map(len, truth)) and right > 0.95 * sum(map(len, alignments))
    alone = [set(map(tuple, aligner.align([pair])[0].pairs.tolist())) for pair in pairs[:23]]
    assert alone == alignments[:23]
    assert aligner.align([("unknown", "words here")])[0].pairs.shape[1] == 2


WAYS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


def grow_diag(forward: alignment.Links, backward: alignment.Links) -> alignment.Links:
    """grow-diag-final-and of one sentence, a link at a time."""
    links, before = forward & backward, -1
    while len(links) > before:
        before = len(links)
        for a, b in WAYS:
            new = {(i + a, j + b) for i, j in links} & (forward | backward) - links
            free = [[link for link in new if link[side] not in {old[side] for old in links}] for side in (0, 1)]
            for side in (0, 1):
                links = links | {min(rival for rival in free[side] if rival[side] == link[side]) for link in free[side]}
    for direction in (forward, backward):
        alone = sorted(link for link in direction if all(link[side] not in {o[side] for o in links} for side in (0, 1)))
        first_of_row = [link for n, link in enumerate(alone) if link[0] not in {other[0] for other in alone[:n]}]
        links = links | {link for n, link in enumerate(first_of_row) if link[1] not in {o[1] for o in first_of_row[:n]}}
    return links


def test_two_directions_are_joined_as_link_by_link() -> None:
    noise = np.random.default_rng(5)
    forward, backward = noise.random((2, 97, 6, 7)) < 0.25
    joint = grow_diag_final_and(forward, backward)
    for one, other, links in zip(forward, backward, joint, strict=True):
        sets = [set(map(tuple, np.argwhere(array).tolist())) for array in (one, other, links)]
        assert sets[2] == grow_diag(*sets[:2])


# Texts of a template.

TEMPLATE = r"ah: {source}\nbi: {target}"


def parallel(count: int = 41, *, longest: int = 9) -> Corpus:
    """Lines of words of one piece and their translations, word for word in the same order."""
    rng = random.Random(5)
    lines = []
    for _ in range(count):
        words = rng.sample(tiny.WORDS, rng.randint(5, longest))
        lines.append((" ".join(words), " ".join(rng.sample(tiny.WORDS, len(words)))))
    source, target = zip(*lines, strict=True)
    return open_corpus(source, target=target)


def links_of_words(corpus: Corpus) -> list[tuple[Links, Links]]:
    return [({(index, index) for index in range(len(s.lines[0].split()))}, set()) for s in corpus]


def test_words_lie_where_the_lines_do_whatever_merges_at_their_borders() -> None:
    text = "EN: a dog.\nDE: ein Hund."
    pair = Pair("a dog.", "ein Hund.", (4, 15), ())
    #        EN     :␣a     ␣dog    .\nDE:    ␣e        in        ␣Hund     .
    spans = [(0, 2), (2, 5), (5, 9), (9, 14), (14, 16), (16, 18), (18, 23), (23, 24)]
    assert text[spans[3][0] : spans[3][1]] == ".\nDE:"
    source, target = words_in_texts([pair], [[None, *spans]])
    assert source.tolist() == [-1, -1, 0, 1, 1, -1, -1, -1, -1]
    assert target.tolist() == [-1, -1, -1, -1, -1, 0, 0, 1, 1]


def test_pairs_before_a_text_are_others() -> None:
    corpus = parallel(5)
    plain = list(corpus)
    texts = [f"ah: {sentence.source}\nbi: {sentence.target}" for sentence in plain]
    example_numbers = [[1, 2], [0, 2], [0, 1], [1, 2], [2, 3]]
    for number, sentence in enumerate(with_template(corpus, TEMPLATE, examples=2)):
        assert sentence.source == "\n\n".join(texts[other] for other in [*example_numbers[number], number])
        assert sentence.pair is not None and sentence.lines == (plain[number].source, plain[number].target)
        assert sentence.target is None
        for line, start in zip(sentence.lines, sentence.pair.starts, strict=True):
            assert sentence.source[start : start + len(line)] == line


def test_scrambling_moves_source_words_and_nothing_else() -> None:
    text = next(iter(with_template(parallel(), TEMPLATE, examples=1)))
    other = scramble(text, 3)
    assert text.pair is not None and other.pair is not None
    words, (start, target_start) = text.lines[0].split(), other.pair.starts
    assert other.pair.source.split() == [words[index] for index in other.pair.order] != words
    assert other.source[start : start + len(other.pair.source)] == other.pair.source
    assert other.source[target_start:] == text.lines[1] and other.source[:start] == text.source[:start]


def test_what_is_predicted_is_the_target() -> None:
    checkpoint = tiny.checkpoint("mistral", 7)
    corpus = with_template(parallel(3), TEMPLATE, examples=1)
    sentences = {sentence.number: sentence for sentence in corpus}
    for batch in batches(corpus, checkpoint, tokens=311, limit=97, labels=True):
        assert batch.labels is not None
        for number, row in zip(batch.indices.tolist(), batch.labels, strict=True):
            ids = checkpoint.tokenizer(sentences[number].lines[1], add_special_tokens=False)["input_ids"]
            assert row[row != IGNORED].tolist() == ids


@pytest.mark.parametrize(
    ("kind", "template", "examples", "message"),
    [
        ("mistral", "{source} only", 0, "must have {source}, then {target}, once each"),
        ("mistral", "{target} {source}", 0, "must have {source}, then {target}, once each"),
        ("mistral", "no-such-file", 0, "is no file and lacks {source} and {target}"),
        ("mistral", TEMPLATE, 41, "41 sentences: 41 lines are too few for --examples 41"),
        ("t5", TEMPLATE, 0, "--template is for decoder language models; leave it out for type 't5'"),
        ("bert", TEMPLATE, 0, "--template is for decoder language models; leave it out for type 'bert'"),
    ],
)
def test_templates_that_do_not_fit(kind: str, template: str, examples: int, message: str) -> None:
    with pytest.raises(HeadscopeError) as error:
        check_template(tiny.checkpoint(kind, 7))
        with_template(parallel(), template, examples=examples)
    assert message in str(error.value) and "\n" not in str(error.value)


def measure(checkpoint: Any, corpus: Corpus, folder: Path, cls: type[Alignment] = Alignment) -> Study:
    path = write_links(folder / "links", links_of_words(corpus))
    return study_of(checkpoint, corpus, cls, replicates=97, alignments=path)


class HandmadeHeads(Alignment):
    """Heads that look at: 0 the linked word, 1 the diagonal, 2 a fixed offset, 3 the word after the linked
    one, 4 the word that is linked to the next target word, 5 the first word.
    """

    def observe(self, heads: HeadBatch) -> Any:
        key_index = heads.maximum.position.clone()
        for row, span in enumerate(self._words(heads)):
            columns, n = span.columns, len(span.columns)
            for word, query in enumerate(span.last.tolist()):
                link = int(span.links[word].nonzero())
                following = int(span.links[word + 1].nonzero()) if word + 1 < n else 0
                key_index[row, :, query] = columns[[link, word, 0, min(link + 1, n - 1), following, 0]]
                key_index[row, 2, query] = max(query - 8, 0)
        return super().observe(attend_to(heads, key_index))


@pytest.mark.slow
def test_heads_are_named_by_what_they_follow_when_order_is_gone(tmp_path: Path) -> None:
    checkpoint = tiny.checkpoint("mistral", 7)
    corpus = with_template(parallel(), TEMPLATE, examples=0)
    study = measure(checkpoint, corpus, tmp_path, HandmadeHeads)
    site_layer = Site.DECODER_SELF, 1
    labels = {head: study.labels.get(HeadId(*site_layer, head), []) for head in range(6)}
    assert labels == {0: ["aligned:fed"], 1: [], 2: [], 3: ["aligned:successor"], 4: ["aligned:predicted"], 5: []}
    rows: Any = study.tables["alignment"].set_index(["layer", "relation", "head"])
    assert rows.loc[(1, "fed", 0)].share == rows.loc[(1, "fed", 1)].share == 1.0, "in order, the diagonal is as good"
    assert rows.loc[(1, "fed", 0)].lift_scrambled == 1.0 and abs(rows.loc[(1, "fed", 1)].lift_scrambled) < 0.1
    together: Any = study.tables["alignment_together"].set_index("name")
    assert together.loc["named aligned:fed", "which"] == "0.0 1.0 2.0" and together.loc["named aligned:fed", "aer"] == 0
    assert together.loc["diagonal", "aer"] == 0 and together.loc["named aligned:fed", "texts"] == 41


@pytest.mark.slow
def test_random_models_have_no_such_head(tmp_path: Path) -> None:
    for seed in range(4):
        checkpoint = tiny.checkpoint("mistral", seed)
        corpus = with_template(parallel(), TEMPLATE, examples=1)
        assert not measure(checkpoint, corpus, tmp_path).labels


@pytest.mark.parametrize("limit", [5, 23])
def test_texts_that_are_cut_have_the_words_that_are_left(limit: int, tmp_path: Path) -> None:
    checkpoint, corpus = tiny.checkpoint("mistral", 7), with_template(parallel(), TEMPLATE, examples=1)
    path = write_links(tmp_path / "links", links_of_words(corpus))
    study = study_of(
        checkpoint, corpus, Alignment, replicates=97, alignments=path, batching=BatchingOptions(limit=limit)
    )
    assert study.record["data"]["truncated"] and not study.labels
    assert ("alignment_together" in study.tables) is (limit == 23)


def test_error_rate_by_hand() -> None:
    links, sure = np.array([[1, 0, 1], [0, 1, 0]], bool), np.array([[1, 0, 0], [0, 1, 0]], bool)
    # A = {0-2, 1-1}: 2 of them linked, 1 sure, of 2 sure links: 1 − (1 + 2) / (2 + 2)
    assert error_rate({0: np.array([2, 1])}, {0: (links, sure)}) == 0.25
