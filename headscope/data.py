"""Parallel text, from files or lists of strings, to batches; files are read twice, never held.

The first pass checks the texts and counts and digests their lines; the second yields sentences. Batches
are cut by tokens from windows of sentences sorted by length, each batch within one *fold* (sentence
number mod 8), so that statistics kept per batch can be bootstrapped like those kept per sentence.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from headscope.accumulate import FOLDS
from headscope.errors import DataError
from headscope.reading import exists, is_regular, lines_of
from headscope.syntax import Aligned, Parse, align, read_conllu
from headscope.unknown_pieces import UnknownPieces

WINDOW = 4096
IGNORED = -100  # a label where nothing is to be predicted
Long = Literal["truncate", "refuse"]
Lines = str | Path | Sequence[str]
"""A text: the path of a file with one sentence a line (`.gz` too), or the sentences themselves."""


class Sentence(NamedTuple):
    """One line of the corpus: its number from 0, the text, its translation and parse where there are any."""

    number: int
    source: str
    target: str | None = None
    parse: Parse | None = None


@dataclass(frozen=True)
class Corpus:
    """Sentences that can be read again and again, and what the first pass found out about them."""

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


def text_name(text: Lines | None) -> str:
    """What messages call a text."""
    return str(text) if text is None or isinstance(text, (str, Path)) else f"the list of {len(text)} sentences"


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
    """Sentences with their parses; where only blanks differ, the parse's text is taken, which its spans fit."""
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


def read_lines(text: Lines) -> Iterator[str]:
    """Lines of a UTF-8 file (`.gz` too), split at line feeds only, or of a list; DataError for what cannot be used."""
    return _file_lines(Path(text)) if isinstance(text, (str, Path)) else _list_lines(text)


def _list_lines(sentences: Sequence[str]) -> Iterator[str]:
    for number, sentence in enumerate(sentences, start=1):
        if not isinstance(sentence, str):
            raise DataError(f"sentence {number} of the list is a {type(sentence).__name__}; it must be a string")
        if not sentence.strip():
            raise DataError(f"sentence {number} of the list is empty; every entry must hold one sentence")
        try:
            sentence.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"sentence {number} of the list: character {error.start + 1} is half a surrogate pair, which is no text"
            ) from None
        yield sentence.rstrip("\r\n")
    if not sentences:
        raise DataError("the list of sentences is empty; give at least one")


def _file_lines(path: Path) -> Iterator[str]:
    number = 0
    for number, raw in enumerate(raw_lines(path), start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:{number}: byte {error.start + 1} is not UTF-8; convert the file first (iconv -t utf-8)"
            ) from None
        if not text.strip():
            raise DataError(f"{path}:{number}: the line is empty; every line must hold one sentence")
        yield text
    if number == 0:
        raise DataError(f"{path} is empty; it must hold one sentence a line")


def raw_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file (`.gz` too) as bytes; DataError where it cannot be read."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as handle:
            yield from lines_of(handle, name=str(path))
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a directory; give a text file, one sentence a line") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); compress it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


class Encoded(NamedTuple):
    """A sentence as the model reads it: ids, which of them are special, how many pieces were cut off.

    `unknown` counts the ids that stand for a piece of the text that the vocabulary does not have.
    """

    ids: list[int]
    special: list[bool]
    cut: int = 0
    unknown: int = 0


@dataclass(frozen=True)
class Side:
    """Token ids [b n] of one side of a batch, which positions are real tokens (not padding), which special."""

    ids: Tensor
    real: Tensor
    special: Tensor

    def to(self, device: torch.device) -> Side:
        """The same on another device."""
        return Side(self.ids.to(device), self.real.to(device), self.special.to(device))

    def rows(self, numbers: Tensor) -> Side:
        """The texts at `numbers` [n], in that order, without the padding at the end that none of them needs."""
        needed = self.real[numbers].any(dim=0).nonzero()  # [n 1]
        length = int(needed[-1]) + 1 if len(needed) else 0
        return Side(*(its[numbers, :length] for its in (self.ids, self.real, self.special)))


@dataclass(frozen=True)
class Batch:
    """Sentences that go through the model together; `indices` [b] are their numbers in the corpus.

    `target` holds the decoder's inputs (the reference shifted right). `aligned` has word units and
    relations of the source where there are parses, None for sentences that do not align. `labels` [b n] is
    what a decoder should say after each of its inputs, `IGNORED` where nothing, if that was asked for.
    """

    indices: Tensor
    fold: int
    source: Side
    target: Side | None = None
    aligned: tuple[Aligned | None, ...] = ()
    kind: Literal["text", "random"] = "text"
    labels: Tensor | None = None

    @property
    def positions(self) -> int:
        """Positions of the larger side, padding included."""
        return max(side.ids.numel() for side in (self.source, self.target) if side is not None)

    def rows(self, numbers: Tensor) -> Batch:
        """The sentences at `numbers` [n], in that order, without the padding that none of them needs."""
        source = self.source.rows(numbers)
        target = None if self.target is None else self.target.rows(numbers)
        length = (source if target is None else target).ids.shape[1]
        return replace(
            self,
            indices=self.indices[numbers.cpu()],
            source=source,
            target=target,
            aligned=tuple(self.aligned[number] for number in numbers.tolist()) if self.aligned else (),
            labels=None if self.labels is None else self.labels[numbers, :length],
        )

    def to(self, device: torch.device) -> Batch:
        """The same with its sides on another device (`indices` stay where they are)."""
        target = None if self.target is None else self.target.to(device)
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, source=self.source.to(device), target=target, labels=labels)


class Encoder(Protocol):
    """What batching needs of a checkpoint."""

    def encode(self, texts: Sequence[str], *, side: Literal["source", "target"], limit: int) -> list[Encoded]:
        """Token ids of texts, at most `limit` of each."""
        ...

    def spans(self, text: str, ids: Sequence[int]) -> list[tuple[int, int] | None] | None:
        """Character span of every piece; None for special ones, None overall where they cannot be located."""
        ...

    def labels(self, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """What a decoder must say after each of its inputs."""
        ...


@dataclass
class Losses:
    """What was cut off or could not be used while the corpus was read."""

    truncated: int = 0
    unaligned: Counter[str] = field(default_factory=Counter)
    fused: int = 0
    unknown: UnknownPieces = field(default_factory=UnknownPieces)


def batches(
    corpus: Corpus,
    encoder: Encoder,
    *,
    tokens: int,
    limit: int,
    long: Long = "truncate",
    losses: Losses,
    labels: bool = False,
) -> Iterator[Batch]:
    """Batches of at most `tokens` positions a side, padding included; at least one sentence each.

    Sentences of more than `limit` pieces are cut (and counted in `losses`), or refused with DataError
    where `long` is "refuse". With `labels` batches say what a decoder should predict.
    """
    sentences = iter(corpus)
    while window := list(islice(sentences, WINDOW)):
        encoded = _encode(window, encoder, limit=limit, long=long, name=corpus.name, losses=losses)
        if labels:
            encoded = _labelled(encoded, encoder, limit)
        for fold in range(FOLDS):
            mine = sorted((e for e in encoded if e.sentence.number % FOLDS == fold), key=_Ready.length)
            for group in _cut(mine, tokens):
                yield _collate(group, fold, encoder, losses)


class _Ready(NamedTuple):
    sentence: Sentence
    source: Encoded
    target: Encoded | None
    labels: list[int] | None = None

    def length(self) -> int:
        return max(len(self.source.ids), len(self.target.ids) if self.target else 0)


def _encode(
    window: list[Sentence], encoder: Encoder, *, limit: int, long: Long, name: str, losses: Losses
) -> list[_Ready]:
    sources = encoder.encode([s.source for s in window], side="source", limit=limit)
    losses.unknown.add("source", sources)
    targets: list[Encoded] | list[None] = [None] * len(window)
    if window[0].target is not None:
        translations = encoder.encode([s.target or "" for s in window], side="target", limit=limit)
        losses.unknown.add("target", translations)
        targets = translations
    ready = [_Ready(*parts) for parts in zip(window, sources, targets, strict=True)]
    for entry in ready:
        cut = max(entry.source.cut, entry.target.cut if entry.target else 0)
        if cut and long == "refuse":
            where = name if entry.source.cut else f"the target of {name}"
            raise DataError(
                f"{where}:{entry.sentence.number + 1}: {limit + cut} pieces, the limit is {limit}; shorten the line, "
                "raise --max-length, or take --long truncate"
            )
        losses.truncated += bool(cut)
    return ready


def _labelled(ready: list[_Ready], encoder: Encoder, limit: int) -> list[_Ready]:
    said = [each.sentence.source if each.target is None else each.sentence.target or "" for each in ready]
    found = encoder.labels(said, limit=limit)
    return [each._replace(labels=labels) for each, labels in zip(ready, found, strict=True)]


def _cut(ready: list[_Ready], tokens: int) -> Iterator[list[_Ready]]:
    group: list[_Ready] = []
    for entry in ready:  # sorted: the last one is the longest
        if group and entry.length() * (len(group) + 1) > tokens:
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def _collate(group: list[_Ready], fold: int, encoder: Encoder, losses: Losses) -> Batch:
    targets = [entry.target for entry in group if entry.target is not None]
    labels = [entry.labels for entry in group if entry.labels is not None]
    return Batch(
        indices=torch.tensor([entry.sentence.number for entry in group]),
        fold=fold,
        source=side([entry.source for entry in group]),
        target=side(targets) if targets else None,
        aligned=tuple(_align(entry, encoder, losses) for entry in group if entry.sentence.parse is not None),
        labels=padded(labels, IGNORED) if labels else None,
    )


def _align(entry: _Ready, encoder: Encoder, losses: Losses) -> Aligned | None:
    parse = entry.sentence.parse
    assert parse is not None
    spans = encoder.spans(entry.sentence.source, entry.source.ids)
    found = "pieces cannot be located in the text" if spans is None else align(parse, spans)
    if entry.source.cut:
        found = "cut off at the length limit"
    if isinstance(found, str):
        losses.unaligned[found] += 1
        return None
    losses.fused += found.fused
    return found


def padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Rows of whole numbers as one tensor [b n], filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows], dtype=torch.long)


def side(encoded: Sequence[Encoded], *, pad: int = 0) -> Side:
    """Pad to the longest, on the right: ids `pad`, not real, not special."""
    longest = max(len(sentence.ids) for sentence in encoded)
    ids = torch.full((len(encoded), longest), pad, dtype=torch.long)
    real, special = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for row, sentence in enumerate(encoded):
        ids[row, : len(sentence.ids)] = torch.tensor(sentence.ids, dtype=torch.long)
        real[row, : len(sentence.ids)] = True
        special[row, : len(sentence.ids)] = torch.tensor(sentence.special, dtype=torch.bool)
    return Side(ids, real, special)
