"""Alignment in texts of a template: where words lie, and which heads are named."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headscope.analyses.alignment import Alignment
from headscope.data.batching import BatchingOptions, batches
from headscope.data.corpus import Corpus, Pair, open_corpus
from headscope.data.encoded import IGNORED
from headscope.data.template import scramble, with_template, words_in_texts
from headscope.engine.base import HeadBatch
from headscope.engine.evidence.aligned_heads import error_rate
from headscope.errors import HeadscopeError
from headscope.evaluation.opened import check_template
from headscope.heads import HeadId, Site
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import tiny
from tests.oracles.alignment import Links, looking, written

TEMPLATE = r"ah: {source}\nbi: {target}"


def parallel(count: int = 41, *, longest: int = 9) -> Corpus:
    """Lines of words of one piece and their translations, word for word in the same order."""
    luck = random.Random(5)
    lines = []
    for _ in range(count):
        words = luck.sample(tiny.WORDS, luck.randint(5, longest))
        lines.append((" ".join(words), " ".join(luck.sample(tiny.WORDS, len(words)))))
    source, target = zip(*lines, strict=True)
    return open_corpus(source, target=target)


def links_of(corpus: Corpus) -> list[tuple[Links, Links]]:
    return [({(place, place) for place in range(len(s.lines[0].split()))}, set()) for s in corpus]


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
    filled = [f"ah: {sentence.source}\nbi: {sentence.target}" for sentence in plain]
    shown = [[1, 2], [0, 2], [0, 1], [1, 2], [2, 3]]
    for number, sentence in enumerate(with_template(corpus, TEMPLATE, examples=2)):
        assert sentence.source == "\n\n".join(filled[other] for other in [*shown[number], number])
        assert sentence.pair is not None and sentence.lines == (plain[number].source, plain[number].target)
        assert sentence.target is None
        for line, start in zip(sentence.lines, sentence.pair.starts, strict=True):
            assert sentence.source[start : start + len(line)] == line


def test_scrambling_moves_source_words_and_nothing_else() -> None:
    text = next(iter(with_template(parallel(), TEMPLATE, examples=1)))
    mixed = scramble(text, 3)
    assert text.pair is not None and mixed.pair is not None
    words, (start, target_start) = text.lines[0].split(), mixed.pair.starts
    assert mixed.pair.source.split() == [words[place] for place in mixed.pair.order] != words
    assert mixed.source[start : start + len(mixed.pair.source)] == mixed.pair.source
    assert mixed.source[target_start:] == text.lines[1] and mixed.source[:start] == text.source[:start]


def test_what_is_predicted_is_the_target() -> None:
    checkpoint = tiny.checkpoint("mistral", 7)
    corpus = with_template(parallel(3), TEMPLATE, examples=1)
    sentences = {sentence.number: sentence for sentence in corpus}
    for batch in batches(corpus, checkpoint, tokens=311, limit=97, labels=True):
        assert batch.labels is not None
        for number, row in zip(batch.indices.tolist(), batch.labels, strict=True):
            own = checkpoint.tokenizer(sentences[number].lines[1], add_special_tokens=False)["input_ids"]
            assert row[row != IGNORED].tolist() == own


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
    path = written(folder / "links", links_of(corpus))
    return study_of(checkpoint, corpus, cls, replicates=97, alignments=path)


class Made(Alignment):
    """Heads that look at: 0 the linked word, 1 the place on the diagonal, 2 a fixed offset, 3 the word after the linked
    one, 4 the word that is linked to the next target word, 5 the first word.
    """

    def observe(self, heads: HeadBatch) -> Any:
        at = heads.argmax_position.clone()
        for row, span in enumerate(self._spans(heads)):
            columns, n = span.columns, len(span.columns)
            for word, query in enumerate(span.last.tolist()):
                linked = int(span.links[word].nonzero())
                following = int(span.links[word + 1].nonzero()) if word + 1 < n else 0
                at[row, :, query] = columns[[linked, word, 0, min(linked + 1, n - 1), following, 0]]
                at[row, 2, query] = max(query - 8, 0)
        return super().observe(looking(heads, at))


@pytest.mark.slow
def test_heads_are_named_by_what_they_follow_when_order_is_gone(tmp_path: Path) -> None:
    checkpoint = tiny.checkpoint("mistral", 7)
    corpus = with_template(parallel(), TEMPLATE, examples=0)
    study = measure(checkpoint, corpus, tmp_path, Made)
    place = Site.DECODER_SELF, 1
    labels = {head: study.labels.get(HeadId(*place, head), []) for head in range(6)}
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
    path = written(tmp_path / "links", links_of(corpus))
    study = study_of(
        checkpoint, corpus, Alignment, replicates=97, alignments=path, batching=BatchingOptions(limit=limit)
    )
    assert study.record["data"]["truncated"] and not study.labels
    assert ("alignment_together" in study.tables) is (limit == 23)


def test_error_rate_by_hand() -> None:
    linked, sure = np.array([[1, 0, 1], [0, 1, 0]], bool), np.array([[1, 0, 0], [0, 1, 0]], bool)
    # A = {0-2, 1-1}: 2 of them linked, 1 sure, of 2 sure links: 1 − (1 + 2) / (2 + 2)
    assert error_rate({0: np.array([2, 1])}, {0: (linked, sure)}) == 0.25
