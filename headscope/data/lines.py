"""Texts line by line, from files or lists of strings: a line is one sentence."""

from __future__ import annotations

import gzip
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, TypeVar

from headscope.errors import DataError
from headscope.files.reading import no_path

MAX_LINE = 1 << 20  # bytes
A = TypeVar("A")
B = TypeVar("B")
Lines = str | Path | Sequence[str]
"""A text: the path of a file with one sentence a line (`.gz` too), or the sentences themselves."""


def lines_of(handle: BinaryIO | gzip.GzipFile, *, name: str) -> Iterator[str]:
    """The lines of an open file without their ends, split at line feeds only.

    DataError, with the line, for one of more than `MAX_LINE` bytes, and for bytes that are not UTF-8.
    """
    for number in itertools.count(1):
        raw = handle.readline(MAX_LINE + 1)
        if len(raw) > MAX_LINE:
            raise DataError(f"{name}:{number}: the line has more than {MAX_LINE:,} bytes; a line is one sentence")
        if not raw:
            return
        try:
            line = str(raw, "utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}:{number}: byte {error.start + 1} is not UTF-8; convert the text first (iconv -f FROM -t utf-8)"
            ) from None
        yield line.rstrip("\r\n")


def text_name(text: Lines | None) -> str:
    """The name of a text in messages."""
    return str(text) if text is None or isinstance(text, (str, Path)) else f"the list of {len(text)} sentences"


_UNSEEN = re.compile(  # white space, controls, and what Unicode calls default ignorable: characters without width
    "[\\s\\x00-\\x1f\\x7f-\\x9f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200f\\u202a-\\u202e"
    "\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufff8\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a"
    "\\U000e0000-\\U000e0fff]*"
)


def is_empty(line: str) -> bool:
    """Whether a line shows nothing: it has no characters, or only white space and characters without width."""
    return _UNSEEN.fullmatch(line) is not None


def read_lines(text: Lines) -> Iterator[str]:
    """Lines of a UTF-8 file (`.gz` too), split at line feeds only, or of a list; DataError for an unusable text."""
    number, is_file = 0, isinstance(text, (str, Path))
    for number, line in enumerate(lines_of_text(text), start=1):
        if is_empty(line):
            place = f"{text}:{number}" if is_file else f"sentence {number} of the list"
            raise DataError(f"{place}: the line is empty; every line must hold one sentence")
        yield line
    if not number:
        raise DataError(f"{text_name(text)} is empty; it must hold one sentence a line")


def lines_of_text(text: Lines) -> Iterator[str]:
    """The lines of a file, or of a list of sentences; some may be empty."""
    return file_lines(Path(text)) if isinstance(text, (str, Path)) else _list_lines(text)


def _list_lines(sentences: Sequence[str]) -> Iterator[str]:
    for number, sentence in enumerate(sentences, start=1):
        place = f"sentence {number} of the list"
        if not isinstance(sentence, str):
            raise DataError(f"{place} is of type {type(sentence).__name__}; it must be a string")
        if half := re.search("[\ud800-\udfff]", sentence):
            raise DataError(f"{place}: character {half.start() + 1} is half a surrogate pair, which is no text")
        yield sentence.rstrip("\r\n")


def in_step(
    first: Iterable[A], second: Iterable[B], names: tuple[str, str], *, unit: str = "lines"
) -> Iterator[tuple[A, B]]:
    """What belongs together, one of each; DataError with both counts where one has more `unit` than the other."""
    missing = object()
    pairs = zip_longest(first, second, fillvalue=missing)
    for number, (one, other) in enumerate(pairs):
        if one is missing or other is missing:
            longer = number + 1 + sum(1 for _ in pairs)
            counts = (number, longer) if one is missing else (longer, number)
            raise DataError(
                f"{names[0]} and {names[1]} have different numbers of {unit}, {counts[0]:,} and {counts[1]:,}; "
                "line i of one must belong to line i of the other"
            )
        yield one, other  # type: ignore[misc]


def file_lines(path: Path) -> Iterator[str]:
    """`lines_of` a file (`.gz` too); DataError where it cannot be read."""
    try:
        with path.open("rb") as file:
            is_gzip = path.suffix == ".gz" or file.peek(2)[:2] == b"\x1f\x8b"
            yield from lines_of(gzip.GzipFile(fileobj=file) if is_gzip else file, name=str(path))
    except FileNotFoundError:
        raise DataError(no_path(path)) from None
    except IsADirectoryError:
        raise DataError(f"{path} is a directory; give a text file, one sentence a line") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); compress it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def text_units(lines: Sequence[str]) -> tuple[list[list[str]], str]:
    """The words of every line and a space, or its characters and nothing where most lines have no spaces."""
    words = [line.split() for line in lines]
    if 2 * sum(len(line) > 1 for line in words) >= len(lines):
        return words, " "
    return [list(line.strip()) for line in lines], ""
