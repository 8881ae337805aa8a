"""White space and characters without width: which lines are empty, and where aligners and BPE split words."""

from __future__ import annotations

from pathlib import Path

import pytest

from headscope.config.small import TranslateOptions
from headscope.data.corpus import open_corpus
from headscope.data.lines import is_empty
from headscope.data.vocabulary import Splitter
from headscope.data.word_alignment import has_other_spaces, words_of, words_of_subwords
from headscope.errors import DataError
from headscope.evaluation.translation import translate_lines
from tests.oracles import checkpoints

SPACES = ["\u00a0", "\u202f", "\u3000", "\u2009", "\x0b", "\x85", "\u2028"]
WITHOUT_WIDTH = ["\u200b", "\ufeff", "\u2060", "\u00ad", "\u200d", "\u034f", "\ufe0f", "\u3164", "\x07"]


def fast_align(line: str) -> list[str]:
    """`Dict::ConvertWhitespaceDelimitedLine` of fast_align, byte by byte."""
    words, word = list[bytes](), b""
    for byte in line.encode():
        if byte in b" \t":
            words, word = words + [word] * bool(word), b""
        else:
            word += bytes([byte])
    return [each.decode() for each in words + [word] * bool(word)]


@pytest.mark.parametrize("space", [*SPACES, *WITHOUT_WIDTH, " ", "\t", "  \t"])
def test_words_of_aligners_are_those_of_fast_align(space: str) -> None:
    line = f" ab{space}cd e{space} f"
    assert words_of(line) == fast_align(line)
    assert has_other_spaces(line) is (space in SPACES)
    spans = [(n, n + 1) for n, letter in enumerate(line) if letter in "abcdef"]
    found, _ = words_of_subwords([line], [spans])
    assert found.tolist() == [n for n, word in enumerate(words_of(line)) for letter in word if letter in "abcdef"]


def then_fairseq(line: str) -> list[str]:
    """subword-nmt without merges (`segment`: strip, split at U+0020), then `tokenize_line` of fairseq."""
    words = [word for word in line.strip("\r\n ").split(" ") if word]
    marked = [
        " ".join(f"{letter}@@" if n < len(word) - 1 else letter for n, letter in enumerate(word)) for word in words
    ]
    return " ".join(marked).split()


@pytest.mark.parametrize("space", [*SPACES, "\t", "  ", "\u200b"])
def test_bpe_splits_as_subword_nmt_and_then_fairseq(space: str) -> None:
    line = f" ab{space}c {space} d{space}"
    found = Splitter("bpe", codes=b"#version: 0.2\nq q\n").split(line)
    assert [each.text for each in found] == then_fairseq(line)
    for each in found:
        assert line[each.start : each.end] == each.text.removesuffix("@@")


@pytest.mark.parametrize("line", ["", " ", *SPACES, *WITHOUT_WIDTH, " \u200b\u00a0\ufeff"])
def test_lines_that_show_nothing_are_empty_everywhere(tmp_path: Path, line: str) -> None:
    assert is_empty(line) and not is_empty(f"{line}a") and not is_empty("\u0301a")
    (tmp_path / "text").write_text(f"a b\n{line}\n", encoding="utf-8", newline="")
    if "\n" not in line:
        with pytest.raises(DataError, match=r"text:2: the line is empty"):
            open_corpus(tmp_path / "text")
    with pytest.raises(DataError, match="sentence 2 of the list is empty"):
        open_corpus(["a b", line])
    checkpoint = checkpoints.small()
    (first,), (nothing,), (last,) = translate_lines(
        checkpoint, ["a b", line, "c"], options=TranslateOptions(longest=9), tokens=50
    )
    assert nothing.text == "" and first.text and last.text
