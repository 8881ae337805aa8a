"""Dependency parses of sentences, read from CoNLL-U files, and the tags of words in CoNLL columns.

Tokens are surface tokens, with the relations of all words that a treebank splits them into.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headscope.data.lines import line_text, raw_lines
from headscope.errors import DataError

COLUMNS, MOST_WORDS = 10, 100_000
IDS = "ids are 1, 2, 3 … in order, ranges such as 3-4 before their words, empty nodes such as 8.1 after theirs"


@dataclass(frozen=True)
class Token:
    """A surface token: its character span in the parse's text; tag and lemma of its first word, if known."""

    start: int
    end: int
    tag: str = field(default="", compare=False)
    lemma: str = field(default="", compare=False)


@dataclass(frozen=True)
class Relation:
    """One dependency, without its subtype; `head` and `dependent` are the tokens of the two words."""

    relation: str
    head: int
    dependent: int


@dataclass(frozen=True)
class Parse:
    """A sentence, or several on one line: text, surface tokens in order, relations between them."""

    text: str
    tokens: tuple[Token, ...]
    relations: tuple[Relation, ...]


def main_type(relation: str) -> str:
    """`nsubj` for `nsubj:pass`."""
    return relation.partition(":")[0]


def read_conllu(path: Path) -> Iterator[Parse]:
    """The sentences of a CoNLL-U file (`.gz` too), one at a time; DataError names the line of an error.

    The text is that of `# text`, else forms joined as SpaceAfter=No says. Empty nodes, enhanced dependencies and
    relations within a token are ignored.
    """
    number, sentence, any_sentence = 0, _Sentence(), False
    try:
        for number, line in _lines(path):
            if line.strip():
                sentence.add(number, line)
            else:
                if sentence.forms:
                    yield sentence.parse()
                    any_sentence = True
                sentence = _Sentence()
        if sentence.forms:
            yield sentence.parse()
        elif not any_sentence:
            raise _Broken(max(number, 1), "no sentence in the file; give a CoNLL-U file with at least one")
    except _Broken as error:
        raise DataError(f"{path}:{error.line}: {error}") from None


@dataclass
class _Word:
    line: int
    head: int
    relation: str
    token: int  # the surface token that carries it
    tag: str = ""
    lemma: str = ""


class _Broken(Exception):
    """What is wrong on which line of a file."""

    def __init__(self, line: int, wrong: str) -> None:
        super().__init__(wrong)
        self.line = line


@dataclass
class _Sentence:
    text: str | None = None
    forms: list[tuple[int, str, bool]] = field(default_factory=list)  # line, form, space after
    words: list[_Word] = field(default_factory=list)
    range_line: int = 0
    range_end: int = 0  # the last word of the latest multiword token

    def add(self, number: int, line: str) -> None:
        if line.startswith("#"):
            said = re.match(r"#\s*text\s*=\s*(.*?)\s*$", line)
            self.text = said[1] if said and self.text is None else self.text
            return
        cells = line.split("\t")
        if len(cells) != COLUMNS:
            raise _Broken(number, f"{len(cells)} columns; a row has {COLUMNS}, separated by tabs")
        if len(self.forms) >= MOST_WORDS:
            raise _Broken(number, f"a sentence of more than {MOST_WORDS} words; an empty line ends one")
        kind = re.fullmatch(r"(\d{1,9})(?:([-.])(\d{1,9}))?", cells[0])
        first, between, last = (int(kind[1]), kind[2], int(kind[3] or 0)) if kind else (-1, "", 0)
        if kind and between is None:
            self._word(number, cells, first)
        elif between == "-" and first == len(self.words) + 1 and self.range_end < first <= last:
            self.range_line, self.range_end = number, last
            self._surface(number, cells)
        elif between != "." or first != len(self.words):
            raise _Broken(number, f"id {_short(cells[0])} where {len(self.words) + 1} was due; {IDS}")

    def parse(self) -> Parse:
        if self.range_end > len(self.words):
            ends = f"the range ends at {self.range_end} but the sentence has {len(self.words)} words"
            raise _Broken(self.range_line, f"{ends}; {IDS}")
        text, spans = self._locate()
        relations = [Relation(word.relation, self._head(word).token, word.token) for word in self.words if word.head]
        between = tuple(relation for relation in relations if relation.head != relation.dependent)
        first = {word.token: word for word in reversed(self.words)}
        tokens = [Token(*span, first[number].tag, first[number].lemma) for number, span in enumerate(spans)]
        return Parse(text, tuple(tokens), between)

    def _word(self, number: int, cells: list[str], identifier: int) -> None:
        if identifier != len(self.words) + 1:
            raise _Broken(number, f"id {identifier} where {len(self.words) + 1} was due; {IDS}")
        if identifier > self.range_end:
            self._surface(number, cells)
        head, relation = cells[6], main_type(cells[7])
        if not (head.isascii() and head.isdigit() and len(head) < 10):
            raise _Broken(number, f"head {_short(head)} of word {identifier} is no number; 0 is for the root")
        if relation in ("", "_"):
            raise _Broken(number, f"word {identifier} has no relation; column 8 is one, such as nsubj")
        tag, lemma = ("" if cell == "_" else cell for cell in (cells[3], cells[2]))
        self.words.append(_Word(number, int(head), relation, len(self.forms) - 1, tag, lemma))

    def _surface(self, number: int, cells: list[str]) -> None:
        if not cells[1].strip():
            raise _Broken(number, f"id {cells[0]} has no form; column 2 is the word as written")
        self.forms.append((number, cells[1], "SpaceAfter=No" not in cells[9].split("|")))

    def _head(self, word: _Word) -> _Word:
        count = len(self.words)
        if word.head > count or self.words[word.head - 1] is word:
            raise _Broken(word.line, f"head {word.head} is no other word of the sentence; give 1 to {count}, or 0")
        return self.words[word.head - 1]

    def _locate(self) -> tuple[str, list[tuple[int, int]]]:
        joined = "".join(form + " " * space for _, form, space in self.forms).rstrip()
        text, position, spans = self.text or joined, 0, []
        for number, form, _ in self.forms:
            position = _past_spaces(text, position)
            if not text.startswith(form, position):
                there = _short(text[position:])
                raise _Broken(number, f"form {_short(form)} is not there in `# text` ({there}); it has all forms")
            spans.append((position, position + len(form)))
            position += len(form)
        if _past_spaces(text, position) < len(text):
            more = _short(text[position:])
            raise _Broken(self.forms[-1][0], f"`# text` goes on after the last form ({more}); add it")
        return text, spans


def _past_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(raw_lines(Path(path)), start=1):
        yield number, line_text(raw, path, number)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:39] + "…")


DOCUMENT = "-DOCSTART-"  # the line between documents of CoNLL-2003


class TaggedWords(NamedTuple):
    """A sentence in columns: its words, their tags, and the number of its first line."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    line: int


def read_columns(path: Path) -> Iterator[TaggedWords]:
    """The sentences of a file: the first column (by tabs, else spaces) is the word, the last its tag."""
    words: list[str] = []
    tags: list[str] = []
    number, has_rows = 0, False
    for number, raw in enumerate(raw_lines(path), start=1):
        line = line_text(raw, path, number).strip()
        columns = [column.strip() for column in line.split("\t" if "\t" in line else None)]
        if columns and columns[0] != DOCUMENT:
            if len(columns) < 2 or not columns[0] or not columns[-1]:
                raise DataError(f"{path}:{number}: {line[:40]!r} is not a word and its tag, in columns")
            words.append("".join(columns[0].split()))
            tags.append(columns[-1])
        elif words:
            yield TaggedWords(tuple(words), tuple(tags), number - len(words))
            words, tags, has_rows = [], [], True
    if words:
        yield TaggedWords(tuple(words), tuple(tags), number + 1 - len(words))
    elif not has_rows:
        raise DataError(f"{path} is empty; it must hold a word and its tag a line, and an empty line after a sentence")
