"""Dependency parses of sentences, read from CoNLL-U files, and the tags of words in CoNLL columns.

Tokens are surface tokens, with the relations of all words that a treebank splits them into.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from headscope.data.lines import decoded, line_text, lines_of, opened, raw_lines
from headscope.errors import DataError
from headscope.files.reading import no_path

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


def read_conllu(path: str | PathLike[str]) -> Iterator[Parse]:
    """The sentences of a CoNLL-U file (`.gz` too), one at a time; DataError names the line of an error.

    The text is that of `# text`, else forms joined as SpaceAfter=No says. Empty nodes, enhanced dependencies and
    relations within a token are ignored.
    """
    number, sentence, any_sentence = 0, _Sentence(path), False
    for number, line in _lines(path):
        if line.strip():
            sentence.add(number, line)
        elif sentence.forms:
            yield sentence.parse()
            sentence, any_sentence = _Sentence(path), True
        else:
            sentence = _Sentence(path)
    if sentence.forms:
        yield sentence.parse()
    elif not any_sentence:
        raise _broken(path, max(number, 1), "no sentence in the file", "give a CoNLL-U file with at least one")


@dataclass
class _Word:
    line: int
    head: int
    relation: str
    token: int  # the surface token that carries it
    tag: str = ""
    lemma: str = ""


@dataclass
class _Sentence:
    path: str | PathLike[str]
    text: str | None = None
    forms: list[tuple[int, str, bool]] = field(default_factory=list)  # line, form, space after
    words: list[_Word] = field(default_factory=list)
    range_line: int = 0
    range_end: int = 0  # the last word of the latest multiword token

    def add(self, number: int, line: str) -> None:
        if line.startswith("#"):
            self._comment(line)
            return
        cells = line.split("\t")
        if len(cells) != COLUMNS:
            wrong = f"{len(cells)} column{'s' * (len(cells) != 1)}"
            raise _broken(self.path, number, wrong, f"a row has {COLUMNS}, separated by tabs")
        if len(self.forms) >= MOST_WORDS:
            raise _broken(self.path, number, f"a sentence of more than {MOST_WORDS} words", "an empty line ends one")
        identifier = _identifier(cells[0])
        if isinstance(identifier, int):
            self._word(number, cells, identifier)
        elif identifier is not None and identifier[1] == "-":
            self._range(number, cells, identifier[0], identifier[2])
        elif identifier is None or identifier[0] != len(self.words):
            raise _broken(self.path, number, f"id {_short(cells[0])}", IDS)

    def parse(self) -> Parse:
        if self.range_end > len(self.words):
            wrong = f"the range ends at {self.range_end} but the sentence has {len(self.words)} words"
            raise _broken(self.path, self.range_line, wrong, IDS)
        text, spans = self._locate()
        relations = [Relation(word.relation, self._head(word).token, word.token) for word in self.words if word.head]
        between = tuple(relation for relation in relations if relation.head != relation.dependent)
        first = {word.token: word for word in reversed(self.words)}
        tokens = [Token(*span, first[number].tag, first[number].lemma) for number, span in enumerate(spans)]
        return Parse(text, tuple(tokens), between)

    def _comment(self, line: str) -> None:
        from conllu.parser import parse_comment_line

        for key, value in parse_comment_line(line):
            if key == "text" and self.text is None:
                self.text = value

    def _word(self, number: int, cells: list[str], identifier: int) -> None:
        if identifier != len(self.words) + 1:
            wrong = f"id {identifier} where {len(self.words) + 1} was due"
            raise _broken(self.path, number, wrong, IDS)
        if identifier > self.range_end:
            self._surface(number, cells)
        head, relation = cells[6], main_type(cells[7])
        if not (head.isascii() and head.isdigit() and len(head) < 10):
            wrong = f"head {_short(head)} of word {identifier} is not a number"
            raise _broken(self.path, number, wrong, "a head is a word of the sentence, or 0 for the root")
        if relation in ("", "_"):
            wrong = f"word {identifier} has no relation"
            raise _broken(self.path, number, wrong, "column 8 is a dependency relation such as nsubj")
        tag, lemma = ("" if cell == "_" else cell for cell in (cells[3], cells[2]))
        self.words.append(_Word(number, int(head), relation, len(self.forms) - 1, tag, lemma))

    def _range(self, number: int, cells: list[str], first: int, last: int) -> None:
        if first != len(self.words) + 1 or first <= self.range_end or last < first:
            raise _broken(self.path, number, f"range {cells[0]} where {len(self.words) + 1} was due", IDS)
        self.range_line, self.range_end = number, last
        self._surface(number, cells)

    def _surface(self, number: int, cells: list[str]) -> None:
        if not cells[1].strip():
            raise _broken(self.path, number, f"id {cells[0]} has no form", "column 2 is the word as written")
        self.forms.append((number, cells[1], "SpaceAfter=No" not in cells[9].split("|")))

    def _head(self, word: _Word) -> _Word:
        count = len(self.words)
        if word.head > count or self.words[word.head - 1] is word:
            target = "outside the sentence" if word.head > count else "the word itself"
            allowed = f"a head is another word of the sentence (1 to {count}), or 0 for the root"
            raise _broken(self.path, word.line, f"head {word.head} is {target}", allowed)
        return self.words[word.head - 1]

    def _locate(self) -> tuple[str, list[tuple[int, int]]]:
        text, position, spans = self.text or self._joined(), 0, []
        for number, form, _ in self.forms:
            position = _past_spaces(text, position)
            if not text.startswith(form, position):
                wrong = f"form {_short(form)} is not what `# text` has there ({_short(text[position:])})"
                raise _broken(self.path, number, wrong, "the text holds the forms in order")
            spans.append((position, position + len(form)))
            position += len(form)
        if _past_spaces(text, position) < len(text):
            wrong = f"`# text` goes on after the last form ({_short(text[position:])})"
            raise _broken(self.path, self.forms[-1][0], wrong, "the text holds the forms and nothing else")
        return text, spans

    def _joined(self) -> str:
        return "".join(form + " " * space for _, form, space in self.forms).rstrip()


def _identifier(cell: str) -> int | tuple[int, str, int] | None:
    from conllu.exceptions import ParseException
    from conllu.parser import parse_id_value

    try:
        return parse_id_value(cell)
    except (ParseException, ValueError):  # ValueError: a number of thousands of digits
        return None


def _past_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _lines(path: str | PathLike[str]) -> Iterator[tuple[int, str]]:
    """Numbered lines, decoded one by one so that an error names the line."""
    number = 0
    try:
        with opened(Path(path)) as stream:
            for raw in lines_of(stream, name=str(path)):
                number += 1
                yield number, decoded(raw, number)
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start + 1} of the line is not UTF-8"
        raise _broken(path, number, wrong, "CoNLL-U files are UTF-8") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        wrong = f"the gzip data are truncated or corrupt ({error})"
        raise _broken(path, number + 1, wrong, "get the file again") from None
    except FileNotFoundError:
        raise DataError(f"{no_path(path)}; give stanza, or a CoNLL-U file, plain or .gz") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; give a readable CoNLL-U file, plain or .gz") from None


def _broken(path: str | PathLike[str], line: int, wrong: str, allowed: str) -> DataError:
    return DataError(f"{path}:{line}: {wrong}; {allowed}")


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
