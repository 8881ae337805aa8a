"""Parallel text from files or lists of strings; files are streamed twice: checked and counted, then read."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from headscope.config import TextFiles
from headscope.data.parses import Parse, read_columns, read_conllu
from headscope.errors import ConfigError, DataError, flag
from headscope.files.reading import Lines, in_step, is_empty, read_lines, text_name

MAX_SHOWN = 60  # characters of a text in an error


class Labels(NamedTuple):
    """The class of a sentence (one id, no `words`), or the tag of each of its `words`."""

    ids: tuple[int, ...]
    words: tuple[str, ...] = ()


class Contrast(NamedTuple):
    """The contrast of a prompt: its corrupt version, and the answer to the clean prompt.

    The prompt is the first `length` subwords of the line, without an end of sentence, which no continuation follows.
    At output `position` the logit of `answer` is read, minus that of `wrong` if there is one: ids of the vocabulary, or
    numbers of classes. `longer`: the answer has more subwords than this id.
    """

    corrupt: str
    length: int
    position: int
    answer: int
    wrong: int | None = None
    longer: bool = False


class Pair(NamedTuple):
    """The source and target lines that a template was filled with, and where both start in the text.

    Where source words are scrambled, `order` has each word's number in the original line.
    """

    source: str
    target: str
    starts: tuple[int, int]
    order: tuple[int, ...]


class Sentence(NamedTuple):
    """One line of the corpus: its number from 0, its text, and where there are any its translation and parses of both.

    `second` is the other text of a pair that a model reads together, `labels` the correct labels of a classifier,
    `contrast` belongs to a prompt, whose translation ends with the answer. `pair` are the lines in a filled template.
    """

    number: int
    source: str
    target: str | None = None
    parse: Parse | None = None
    second: str | None = None
    labels: Labels | None = None
    contrast: Contrast | None = None
    target_parse: Parse | None = None
    pair: Pair | None = None

    @property
    def lines(self) -> tuple[str, str]:
        """The source and the target line, also where a template was filled with them."""
        return (self.pair.source, self.pair.target) if self.pair else (self.source, self.target or "")


@dataclass(frozen=True)
class Corpus:
    """Sentences that can be iterated repeatedly, with their count and digest from the first pass.

    The flags say which optional fields of `Sentence` are there.
    """

    name: str
    count: int
    digest: str
    read: Callable[[], Iterator[Sentence]]
    has_target: bool = False
    has_parses: bool = False
    has_target_parses: bool = False
    has_second: bool = False
    has_labels: bool = False
    has_contrast: bool = False
    has_template: bool = False

    def __iter__(self) -> Iterator[Sentence]:
        return islice(self.read(), self.count)

    @property
    def comes_with(self) -> dict[str, bool]:
        """Whether the text has targets and labels, as keyword arguments for metrics and objectives."""
        return {"has_target": self.has_target, "has_labels": self.has_labels}

    def counting(self) -> tuple[Corpus, Callable[[], int]]:
        """The same sentences, and a function that says how many have been read so far, in the longest pass."""
        count = 0

        def read() -> Iterator[Sentence]:
            nonlocal count
            for number, sentence in enumerate(self, start=1):
                count = max(count, number)
                yield sentence

        return replace(self, read=read), lambda: count

    def with_parses(self, parses: Callable[[], Iterator[Parse]]) -> Corpus:
        """The same sentences with parses, in the same order; DataError where the texts differ."""
        return replace(self, read=lambda: _add_parses(self.read(), parses(), self.name), has_parses=True)

    def with_field(self, field: str, read: Callable[[], Iterator[Sentence]], **changes: Any) -> Corpus:
        """The same lines with one more field, such as labels or contrasts, which the digest then covers too."""
        digest = hashlib.sha1(self.digest.encode())
        for number, sentence in enumerate(read()):  # to the end, where the files' numbers of lines are compared
            if number < self.count:
                digest.update(f"{getattr(sentence, field)}\n".encode())
        return replace(self, read=read, digest=digest.hexdigest(), **changes)

    def first(self, count: int) -> Corpus:
        """The first `count` sentences, or all where there are fewer; the digest stays that of the whole corpus."""
        return replace(self, count=min(self.count, count))

    def share(self, fraction: float, *, seed: int) -> Corpus:
        """A random share of the sentences, in their order; a larger share with the same seed contains it.

        The digest is that of the share.
        """
        numbers = list(range(self.count))
        random.Random(seed).shuffle(numbers)
        numbers_of_share = set(numbers[: max(1, round(fraction * self.count))])
        digest = hashlib.sha1(f"{self.digest} {sorted(numbers_of_share)}".encode()).hexdigest()

        def read() -> Iterator[Sentence]:
            return (sentence for index, sentence in enumerate(self) if index in numbers_of_share)

        return replace(self, count=len(numbers_of_share), digest=digest, read=read)

    def after(self, count: int) -> Corpus:
        """The sentences after the first `count`, with their own numbers; the digest stays that of the whole corpus."""
        return replace(self, count=max(self.count - count, 0), read=lambda: islice(self.read(), count, None))


def line_digests(*texts: Corpus) -> list[str]:
    """Eight digits of the SHA-1 of every source line, sorted, by which overlapping texts are recognised."""
    return sorted({hashlib.sha1(line.source.encode()).hexdigest()[:8] for text in texts for line in text})


def check_predictions(count: float, text: str) -> None:
    """DataError if a text, named `text`, has no token to predict, such as for a decoder a text of single tokens."""
    if not count:
        raise DataError(f"{text}: no sentence has a token to predict; give longer sentences")


def open_corpus(
    source: Lines | None,
    *,
    target: Lines | None = None,
    second: Lines | None = None,
    parses: Path | None = None,
    target_parses: Path | None = None,
    columns: Path | None = None,
    pairs: bool = False,
    max_sentences: int | None = None,
) -> Corpus:
    """Check, count and open texts: files or lists of strings, one sentence a line; parses in CoNLL-U.

    `second` has the other text of every line; with `pairs` it stands in the line itself, after a tab. Without `source`
    the text comes from the parses, or from the first column of a CoNLL file `columns`. DataError names the file and
    line of a missing or empty file, an empty line, bytes that are not UTF-8, a broken parse, or texts of different
    lengths. The digest depends on the sentences alone, not on whether they come from a file or a list.
    """
    if source is None and parses is None and columns is None:
        raise DataError(f"no text: give {flag.source} FILE (one sentence a line), or {flag.parse} FILE.conllu")
    for path in (source, target, second, parses, target_parses, columns):
        if isinstance(path, Path) and os.path.exists(path) and not (path.is_dir() or path.is_file()):
            raise DataError(f"{path} is a pipe or a device; a text is read more than once, so write it to a file first")
    name = text_name(next(text for text in (source, parses, columns) if text is not None))

    def read() -> Iterator[Sentence]:
        lines = _split(_texts(source, parses, columns), name) if pairs else _texts(source, parses, columns)
        lines = lines if target is None else _add_lines(lines, "target", target, name)
        lines = lines if second is None else _add_lines(lines, "second", second, name)
        if target_parses is not None:
            lines = _add_parses(lines, read_conllu(target_parses), text_name(target), of_target=True)
        return _add_parses(lines, read_conllu(parses), name) if parses is not None and source is not None else lines

    digest = hashlib.sha1()
    count = 0
    for sentence in islice(read(), max_sentences):
        for text in (sentence.source, sentence.target or "", *filter(None, [sentence.second])):
            digest.update(text.encode() + b"\n")
        count += 1
    return Corpus(
        name=name,
        count=count,
        digest=digest.hexdigest(),
        read=read,
        has_target=target is not None,
        has_parses=parses is not None,
        has_target_parses=target_parses is not None,
        has_second=pairs or second is not None,
    )


def open_text(
    files: TextFiles, *, parses: Path | None = None, target_parses: Path | None = None, max_sentences: int | None = None
) -> Corpus:
    """The corpus of a command, without labels; ConfigError if two options give the other texts of pairs."""
    if files.pairs and files.source2 is not None:
        raise ConfigError(f"{flag.source2} and {flag.pairs} both name the other text of a pair; give one of them")
    return open_corpus(
        files.source,
        target=files.target,
        second=files.source2,
        parses=parses,
        target_parses=target_parses,
        columns=files.labels if files.source is None and parses is None and isinstance(files.labels, Path) else None,
        pairs=files.pairs,
        max_sentences=max_sentences,
    )


def _texts(source: Lines | None, parses: Path | None, columns: Path | None) -> Iterator[Sentence]:
    if source is not None:
        return (Sentence(i, text) for i, text in enumerate(read_lines(source)))
    if parses is not None:
        return (Sentence(i, parse.text, None, parse) for i, parse in enumerate(read_conllu(parses)))
    assert columns is not None
    return (Sentence(i, " ".join(rows.words)) for i, rows in enumerate(read_columns(columns)))


def _add_lines(lines: Iterator[Sentence], field: str, text: Lines, name: str) -> Iterator[Sentence]:
    for sentence, line in in_step(lines, read_lines(text), (name, text_name(text))):
        yield sentence._replace(**{field: line})  # type: ignore[arg-type]


def _split(lines: Iterator[Sentence], name: str) -> Iterator[Sentence]:
    for sentence in lines:
        first, _, second = sentence.source.partition("\t")
        if is_empty(first) or is_empty(second) or "\t" in second:
            raise DataError(f"{name}:{sentence.number + 1}: every line must be two texts with one tab between")
        yield sentence._replace(source=first, second=second)


def add_labels(lines: Iterator[Sentence], labels: Iterator[Labels], name: str, other: str) -> Iterator[Sentence]:
    """Sentences with their labels; DataError unless the words of tags spell the text, whitespace aside."""
    for sentence, label in in_step(lines, labels, (name, other), unit="sentences"):
        if label.words and "".join(label.words) != "".join(sentence.source.split()):
            raise DataError(
                f"line {sentence.number + 1} of {name} is not the text of sentence {sentence.number + 1} of {other}: "
                f"{sentence.source[:MAX_SHOWN]!r} against {' '.join(label.words)[:MAX_SHOWN]!r}"
            )
        yield sentence._replace(labels=label)


def _add_parses(
    lines: Iterator[Sentence], parses: Iterator[Parse], name: str, *, of_target: bool = False
) -> Iterator[Sentence]:
    """Sentences with their parses; where only whitespace differs, the parse's text is taken, which its spans are of."""
    for sentence, parse in in_step(lines, parses, (name, "its parses"), unit="sentences"):
        text = (sentence.target or "") if of_target else sentence.source
        if text.split() != parse.text.split():
            raise DataError(
                f"line {sentence.number + 1} of {name} is not the text of parse {sentence.number + 1}: "
                f"{text[:MAX_SHOWN]!r} against {parse.text[:MAX_SHOWN]!r}; parses must follow the lines"
            )
        if of_target:
            yield sentence._replace(target=parse.text, target_parse=parse)
        else:
            yield sentence._replace(source=parse.text, parse=parse)
