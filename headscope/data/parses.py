"""Dependency parses from CoNLL-U files and their alignment with subwords; tags of words from CoNLL columns.

Tokens are surface tokens. A token has the relations of all words that the treebank splits it into.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple, cast

from headscope.data.offsets import Span, fold_characters
from headscope.errors import DataError
from headscope.files.reading import file_lines

NO_SUBWORD = "token without piece"
NO_TOKEN = "piece without token"
IS_TRUNCATED = "truncated"
DISORDER = "pieces out of order"


@dataclass(frozen=True)
class Aligned:
    """Word units of a sentence: the smallest groups of tokens such that every subword lies within one group.

    `units` has the positions of each unit's subwords, `relations` (relation, head unit, dependent unit), without the
    `n_fused` relations within a unit; `tags` and `lemmas` are those of each unit's first token.
    """

    units: list[list[int]]
    relations: list[tuple[str, int, int]]
    n_fused: int
    tags: tuple[str, ...] = field(default=(), compare=False)
    lemmas: tuple[str, ...] = field(default=(), compare=False)


def align(parse: Parse, spans: Sequence[Span | None]) -> Aligned | str:
    """Word units of a sentence, or the reason why there are none; a subword belongs to the tokens that it overlaps."""
    token_ranges = find_tokens(parse, spans)
    if token_ranges is None:
        return NO_TOKEN
    # combining and control characters are not counted
    last = max((span[1] for span in spans if span is not None), default=0)
    remaining = "".join(parse.text[max(token.start, last) : token.end] for token in parse.tokens)
    if fold_characters(remaining, "bare"):
        return IS_TRUNCATED
    if len({token for first, last in token_ranges.values() for token in range(first, last + 1)}) < len(parse.tokens):
        return NO_SUBWORD
    inner_tokens = {token for first, last in token_ranges.values() for token in range(first, last)}
    begins = (token > 0 and token - 1 not in inner_tokens for token in range(len(parse.tokens)))
    unit_of = list(accumulate(map(int, begins)))
    units: list[list[int]] = [[] for _ in range(len(unit_of) - len(inner_tokens))]
    for subword, (first, _) in token_ranges.items():
        units[unit_of[first]].append(subword)
    in_order = [subword for unit in units for subword in unit]
    if in_order != sorted(in_order):
        return DISORDER
    ends = [(r.relation, unit_of[r.head], unit_of[r.dependent]) for r in parse.relations]
    unit_pairs = [end for end in ends if end[1] != end[2]]
    beginning = [parse.tokens[unit_of.index(unit)] for unit in range(len(units))]
    about = (tuple(token.tag for token in beginning), tuple(token.lemma for token in beginning))
    return Aligned(units, unit_pairs, len(ends) - len(unit_pairs), *about)


def find_tokens(parse: Parse, spans: Sequence[Span | None]) -> dict[int, Span] | None:
    """The first and last token of every visible subword. Returns None if a subword lies between tokens."""
    starts, ends = [token.start for token in parse.tokens], [token.end for token in parse.tokens]
    token_ranges: dict[int, Span] = {}
    for subword, (start, end) in enumerate(span or (0, 0) for span in spans):
        part = parse.text[start:end]
        start += len(part) - len(part.lstrip())
        if part.strip():
            end = start + len(part.strip())
            first, last = bisect_right(ends, start), bisect_left(starts, end) - 1
            if first > last:
                return None
            token_ranges[subword] = (first, last)
    return token_ranges


COLUMNS, MAX_WORDS = 10, 100_000
SPACES = re.compile(r"\s*")
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
    number, has_sentence, rows, text = 1, False, list[tuple[int, list[str]]](), None
    try:
        for number, line in enumerate(chain(file_lines(Path(path)), [""]), start=1):
            if line.startswith("#"):
                text_comment = re.match(r"#\s*text\s*=\s*(.*?)\s*$", line)
                text = text_comment[1] if text_comment and text is None else text
            elif line.strip():
                rows.append((number, line.split("\t")))
                if len(rows) > MAX_WORDS:
                    raise _Broken(number, f"a sentence of more than {MAX_WORDS} words; an empty line ends one")
            else:
                if rows:
                    yield _parse(rows, text)
                    has_sentence = True
                rows, text = [], None
        if not has_sentence:
            raise _Broken(max(number - 1, 1), "no sentence in the file; give a CoNLL-U file with at least one")
    except _Broken as error:
        line, problem = error.args
        raise DataError(f"{path}:{line}: {problem}") from None


class _Broken(Exception):
    """A broken line: its number, and the problem."""


class _Word(NamedTuple):
    line: int
    head: int
    relation: str
    token: int  # the surface token that carries it
    tag: str
    lemma: str


def _parse(rows: list[tuple[int, list[str]]], given_text: str | None) -> Parse:
    spans, words, text = list[Span](), list[_Word](), given_text or ""
    last_covered, range_line, line = 0, 0, 0  # the last word of the latest multiword token
    for line, cells in rows:
        if len(cells) != COLUMNS:
            raise _Broken(line, f"{len(cells)} columns; a row has {COLUMNS}, separated by tabs")
        due = len(words) + 1
        numbers = re.fullmatch(r"(\d{1,9})(?:([-.])(\d{1,9}))?", cells[0])
        first, separator, last = (int(numbers[1]), numbers[2], int(numbers[3] or 0)) if numbers else (-1, None, 0)
        if separator == "." and first == due - 1:
            continue
        if first != due or separator == "." or (separator and not last_covered < first <= last):
            raise _Broken(line, f"id {_short(cells[0])} where {due} was due; {IDS}")
        if separator or first > last_covered:
            if not (form := cells[1]).strip():
                raise _Broken(line, f"id {cells[0]} has no form; column 2 is the word as written")
            text += "" if given_text else form
            spans.append(_locate(form, text, spans[-1][1] if spans else 0, line))
            text += " " * (not given_text and "SpaceAfter=No" not in cells[9].split("|"))
        if separator:
            last_covered, range_line = last, line
        else:
            words.append(_word(line, cells, len(spans) - 1))
    if last_covered > len(words):
        raise _Broken(range_line, f"the range ends at {last_covered} but the sentence has {len(words)} words; {IDS}")
    for number, word in enumerate(words, start=1):
        if word.head > len(words) or word.head == number:
            raise _Broken(word.line, f"head {word.head} is no other word of the sentence; give 1 to {len(words)}, or 0")
    if spans and text[spans[-1][1] :].strip():
        raise _Broken(line, f"`# text` goes on after the last form ({_short(text[spans[-1][1] :])}); add it")
    beginning = {word.token: word for word in reversed(words)}
    tokens = [Token(*span, *beginning[number][-2:]) for number, span in enumerate(spans)]
    relations = [Relation(word.relation, words[word.head - 1].token, word.token) for word in words if word.head]
    return Parse(
        text.rstrip(), tuple(tokens), tuple(relation for relation in relations if relation.head != relation.dependent)
    )


def _word(line: int, cells: list[str], token: int) -> _Word:
    head, relation = cells[6], main_type(cells[7])
    if not re.fullmatch("[0-9]{1,9}", head):
        raise _Broken(line, f"head {_short(head)} of word {cells[0]} is no number; 0 is for the root")
    if relation in ("", "_"):
        raise _Broken(line, f"word {cells[0]} has no relation; column 8 is one, such as nsubj")
    tag, lemma = ("" if cell == "_" else cell for cell in (cells[3], cells[2]))
    return _Word(line, int(head), relation, token, tag, lemma)


def _locate(form: str, text: str, position: int, line: int) -> Span:
    start = cast("re.Match[str]", SPACES.match(text, position)).end()
    if not text.startswith(form, start):
        context = _short(text[start:])
        raise _Broken(line, f"form {_short(form)} is not there in `# text` ({context}); it has all forms")
    return start, start + len(form)


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
    has_rows = False
    for number, line in enumerate(chain(map(str.strip, file_lines(path)), [""]), start=1):
        columns = [column.strip() for column in line.split("\t" if "\t" in line else None)]
        if columns and columns[0] != DOCUMENT:
            if len(columns) < 2 or not columns[0] or not columns[-1]:
                raise DataError(f"{path}:{number}: {line[:40]!r} is not a word and its tag, in columns")
            words.append("".join(columns[0].split()))
            tags.append(columns[-1])
        elif words:
            yield TaggedWords(tuple(words), tuple(tags), number - len(words))
            words, tags, has_rows = [], [], True
    if not has_rows:
        raise DataError(f"{path} is empty; it must hold a word and its tag a line, and an empty line after a sentence")
