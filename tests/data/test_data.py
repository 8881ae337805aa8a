"""Reading text and cutting it into batches: what comes through unchanged, and what is refused how."""

import gzip
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headscope.bootstrap import FOLDS
from headscope.data import batching
from headscope.data.batching import Omissions, batches
from headscope.data.corpus import Corpus, Sentence, open_corpus
from headscope.data.encoded import Batch, Encoded, pad_side
from headscope.data.parses import Parse, Relation, Token
from headscope.errors import DataError
from headscope.files.reading import read_lines

PLAIN = ["A man sleeps.", "  two  blanks ", "ümläut 😀 text", "last"]
CONLLU = """\
# text = Dogs bark .
1\tDogs\tdog\tNOUN\t_\t_\t2\tnsubj\t_\t_
2\tbark\tbark\tVERB\t_\t_\t0\troot\t_\t_
3\t.\t.\tPUNCT\t_\t_\t2\tpunct\t_\t_

# text = Go!
1\tGo\tgo\tVERB\t_\t_\t0\troot\t_\tSpaceAfter=No
2\t!\t!\tPUNCT\t_\t_\t1\tpunct\t_\t_

"""


def write(path: Path, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


@pytest.mark.parametrize("name", ["text.en", "text.en.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "open"])
def test_lines_are_split_at_line_feeds(tmp_path: Path, name: str, end: str, last: bool) -> None:
    path = write(tmp_path / name, end.join(PLAIN) + end * last)
    assert list(read_lines(path)) == PLAIN


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
def test_other_line_breaks_do_not_end_a_line(tmp_path: Path, mark: str) -> None:
    path = write(tmp_path / "text", f"one{mark}still one\ntwo\n")
    assert list(read_lines(path)) == [f"one{mark}still one", "two"]
    assert open_corpus(path).count == 2


def test_corpus_can_be_read_twice_and_has_a_digest_of_its_text(tmp_path: Path) -> None:
    corpus = open_corpus(write(tmp_path / "a.en.gz", "\n".join(PLAIN) + "\n"))
    first, second = list(corpus), list(corpus)
    assert first == second == [Sentence(i, text) for i, text in enumerate(PLAIN)]
    assert (corpus.count, corpus.has_target, corpus.has_parses) == (4, False, False)
    other = open_corpus(write(tmp_path / "b.en", "\r\n".join(PLAIN)))
    assert corpus.digest == other.digest  # of the lines, not of the file
    assert corpus.digest == hashlib.sha1("".join(f"{text}\n\n" for text in PLAIN).encode()).hexdigest()
    assert open_corpus(tmp_path / "b.en", max_sentences=3).digest != corpus.digest


def test_text_from_parses(tmp_path: Path) -> None:
    corpus = open_corpus(None, parses=write(tmp_path / "a.conllu.gz", CONLLU))
    sentences = list(corpus)
    assert [s.source for s in sentences] == ["Dogs bark .", "Go!"] and corpus.has_parses
    assert sentences[0].parse is not None and sentences[0].parse.relations[0] == Relation("nsubj", 1, 0)


def test_source_beside_parses_may_differ_in_blanks(tmp_path: Path) -> None:
    """Tokens of a parse have offsets in its text, so the text of the parse is used."""
    parses, source = write(tmp_path / "a.conllu", CONLLU), write(tmp_path / "a.en", " Dogs  bark .\nGo!\n")
    sentences = list(open_corpus(source, parses=parses))
    assert [s.source for s in sentences] == ["Dogs bark .", "Go!"]
    assert [s.parse.text for s in sentences if s.parse] == ["Dogs bark .", "Go!"]


@dataclass
class Words:
    """An encoder whose pieces are words, after one special token; ids are lengths of words."""

    limit: int = 10**9

    def encode(self, texts: Sequence[str], *, side: str, limit: int) -> list[Encoded]:
        rows = []
        for text in texts:
            ids = [1, *(len(word) for word in text.split())]
            rows.append(Encoded(ids[:limit], [i == 0 for i in range(min(len(ids), limit))], max(0, len(ids) - limit)))
        return rows

    def spans(self, text: str, ids: Sequence[int], *, side: str) -> list[tuple[int, int] | None] | None:
        ends = [match.span() for match in re.finditer(r"\S+", text)]
        return [None, *ends][: len(ids)]

    def decoder_inputs(self, sources: Sequence[Encoded]) -> list[Encoded]:
        return []


def corpus(lengths: Sequence[int], targets: Sequence[int] = (), *, with_parses: bool = False) -> Corpus:
    """Sentences of so many words; the word `x…x` is as long as its sentence's number, modulo 7, plus 2."""
    sentences = []
    for number, length in enumerate(lengths):
        text = " ".join(["x" * (number % 7 + 2)] * length)
        target = " ".join(["y"] * targets[number]) if targets else None
        parse = None
        if with_parses:
            spans = [match.span() for match in re.finditer(r"\S+", text)]
            pairs = [Relation("nsubj", index, index - 1) for index in range(1, length)]
            parse = Parse(text, tuple(Token(*span) for span in spans), tuple(pairs))
        sentences.append(Sentence(number, text, target, parse))
    return Corpus("made.en", len(sentences), "", lambda: iter(sentences), bool(targets), with_parses)


def make_batches(
    corpus: Corpus, *, tokens: int = 60, limit: int = 99, omissions: Omissions | None = None, **options: str
) -> list[Batch]:
    return list(batches(corpus, Words(), tokens=tokens, limit=limit, omissions=omissions or Omissions(), **options))  # type: ignore[arg-type]


LENGTHS = [(37 * number) % 23 + 1 for number in range(211)]


@pytest.mark.parametrize("window", [4096, 50, 7, 1])
@pytest.mark.parametrize("tokens", [1, 60, 10**6])
def test_every_sentence_once_in_its_fold_and_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, window: int, tokens: int
) -> None:
    monkeypatch.setattr(batching, "WINDOW", window)
    batches = make_batches(corpus(LENGTHS), tokens=tokens)
    numbers = [number for batch in batches for number in batch.indices.tolist()]
    assert sorted(numbers) == list(range(len(LENGTHS)))
    for batch in batches:
        rows, width = batch.source.ids.shape
        assert {number % FOLDS for number in batch.indices.tolist()} == {batch.fold}
        assert rows == 1 or rows * width <= tokens
        for row, number in enumerate(batch.indices.tolist()):
            length = LENGTHS[number] + 1
            assert batch.source.ids[row].tolist() == [1] + [number % 7 + 2] * (length - 1) + [0] * (width - length)
            assert batch.source.real[row].tolist() == [index < length for index in range(width)]
            assert batch.source.special[row].tolist() == [True] + [False] * (width - 1)
    if tokens == 10**6 and window > len(LENGTHS):
        assert [batch.fold for batch in batches] == list(range(FOLDS))
    if tokens == 60 and window > len(LENGTHS):
        assert len(batches) < len(LENGTHS) / 2  # it does fill its batches


def test_long_sentences_are_cut_and_counted() -> None:
    omissions = Omissions()
    batches = make_batches(corpus([3, 8, 9, 200]), limit=9, omissions=omissions)
    assert omissions.n_truncated == 2  # 8 words and the special token just fit
    lengths = {
        int(number): int(length)
        for batch in batches
        for number, length in zip(batch.indices, batch.source.real.sum(-1), strict=True)
    }
    assert lengths == {0: 4, 1: 9, 2: 9, 3: 9}


def test_long_sentences_are_refused_on_request() -> None:
    with pytest.raises(DataError, match=r"made\.en:3: 31.*9.*--max-length"):
        make_batches(corpus([3, 8, 30, 40]), limit=9, long="refuse")


def test_words_and_relations_come_along() -> None:
    omissions = Omissions()
    batches = make_batches(corpus([4, 2, 3], with_parses=True), omissions=omissions)
    for batch in batches:
        (aligned,) = batch.source.aligned
        length = [4, 2, 3][int(batch.indices)]
        assert aligned is not None and aligned.units == [[index + 1] for index in range(length)]
        assert aligned.relations == [("nsubj", index, index - 1) for index in range(1, length)]
    assert not omissions.misalignments and omissions.n_fused == 0


def test_sentences_that_do_not_align_are_counted_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    omissions = Omissions()
    batches = make_batches(corpus([4, 30], with_parses=True), limit=9, omissions=omissions)
    assert [batch.source.aligned[0] is None for batch in batches] == [False, True]
    assert omissions.misalignments == {"cut off at the length limit": 1}
    monkeypatch.setattr(Words, "spans", lambda *_, **__: None)
    omissions = Omissions()
    make_batches(corpus([4, 5], with_parses=True), omissions=omissions)
    assert omissions.misalignments == {"pieces cannot be located in the text": 2}


def test_side_pads_on_the_right() -> None:
    side = pad_side([Encoded([5, 6, 7], [True, False, True]), Encoded([8], [False])])
    assert side.ids.tolist() == [[5, 6, 7], [8, 0, 0]] and side.ids.dtype == torch.long
    assert side.real.tolist() == [[True] * 3, [True, False, False]]
    assert side.special.tolist() == [[True, False, True], [False] * 3]
