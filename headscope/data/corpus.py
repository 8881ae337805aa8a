"""Parallel text, from files or lists of strings; files are streamed twice, never kept in memory.

The first pass checks the texts and counts and digests their lines; the second yields sentences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from headscope.data.parses import Parse, read_conllu
from headscope.errors import DataError
from headscope.files.lines import Lines, read_lines, text_name
from headscope.files.reading import exists, is_regular


class Sentence(NamedTuple):
    """One line of the corpus: its number from 0, the text, its translation and parse where there are any."""

    number: int
    source: str
    target: str | None = None
    parse: Parse | None = None


@dataclass(frozen=True)
class Corpus:
    """Sentences that can be iterated repeatedly, with their count and digest from the first pass."""

    name: str
    count: int
    digest: str
    read: Callable[[], Iterator[Sentence]]
    has_target: bool = False
    has_parses: bool = False

    def __iter__(self) -> Iterator[Sentence]:
        return islice(self.read(), self.count)

    def with_parses(self, parses: Callable[[], Iterator[Parse]]) -> Corpus:
        """The same sentences with parses, in the same order; DataError where the texts differ."""
        return replace(self, read=lambda: _parsed(self.read(), parses(), self.name), has_parses=True)

    def first(self, count: int) -> Corpus:
        """The first `count` sentences, or all where there are fewer; the digest stays that of the whole corpus."""
        return replace(self, count=min(self.count, count))

    def after(self, count: int) -> Corpus:
        """The sentences after the first `count`, with their own numbers; the digest stays that of the whole corpus."""
        return replace(self, count=max(self.count - count, 0), read=lambda: islice(self.read(), count, None))


def open_corpus(
    source: Lines | None,
    *,
    target: Lines | None = None,
    parses: Path | None = None,
    max_sentences: int | None = None,
) -> Corpus:
    """Check the texts and describe them: files or lists of strings, one sentence a line; parses in CoNLL-U.

    Without `source` the text comes from the parses. DataError names the file and line of a missing or
    empty file, an empty line, bytes that are not UTF-8, a broken parse, or texts of different lengths. The same
    sentences have the same digest, whether they come from a file or from a list.
    """
    if source is None and parses is None:
        raise DataError("no text: give --source FILE (one sentence a line), or --parse FILE.conllu that carries it")
    for path in (source, target, parses):
        if isinstance(path, Path) and exists(path) and not path.is_dir() and not is_regular(path):
            raise DataError(f"{path} is a pipe or a device; a text is read more than once, so write it to a file first")
    digest = hashlib.sha1()
    count = 0
    for sentence in islice(_sentences(source, target, parses), max_sentences):
        for text in (sentence.source, sentence.target or ""):
            digest.update(text.encode() + b"\n")
        count += 1
    return Corpus(
        name=text_name(parses if source is None else source),
        count=count,
        digest=digest.hexdigest(),
        read=lambda: _sentences(source, target, parses),
        has_target=target is not None,
        has_parses=parses is not None,
    )


def _sentences(source: Lines | None, target: Lines | None, parses: Path | None) -> Iterator[Sentence]:
    if source is None:
        assert parses is not None
        lines: Iterator[Sentence] = (
            Sentence(i, parse.text, None, parse) for i, parse in enumerate(read_conllu(parses))
        )
    else:
        lines = (Sentence(i, text) for i, text in enumerate(read_lines(source)))
    if target is not None:
        lines = _paired(lines, read_lines(target), text_name(parses if source is None else source), text_name(target))
    if parses is not None and source is not None:
        lines = _parsed(lines, read_conllu(parses), text_name(source))
    return lines


def _paired(lines: Iterator[Sentence], targets: Iterator[str], name: str, other: str) -> Iterator[Sentence]:
    for sentence, target in zip_longest(lines, targets):
        if sentence is None or target is None:
            raise DataError(_counts_differ("lines", name, other))
        yield sentence._replace(target=target)


def _parsed(lines: Iterator[Sentence], parses: Iterator[Parse], name: str) -> Iterator[Sentence]:
    """Sentences with their parses; where only whitespace differs, the text of the parse is taken (its spans)."""
    for sentence, parse in zip_longest(lines, parses):
        if sentence is None or parse is None:
            raise DataError(_counts_differ("sentences", name, "its parses"))
        if sentence.source.split() != parse.text.split():
            raise DataError(
                f"line {sentence.number + 1} of {name} is not the text of parse {sentence.number + 1}: "
                f"{sentence.source[:60]!r} against {parse.text[:60]!r}; parses must follow the lines"
            )
        yield sentence._replace(source=parse.text, parse=parse)


def _counts_differ(what: str, name: str, other: str) -> str:
    return f"{name} and {other} have different numbers of {what}; line i of one must belong to line i of the other"
