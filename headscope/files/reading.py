"""Reading files of the user: whole ones up to a maximal size, and texts line by line; errors of one line."""

from __future__ import annotations

import gzip
import itertools
import json
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from headscope.errors import DataError, HeadscopeError

MOST_BYTES = 64 << 20  # of vocabularies, records and lists, which have a few megabytes
MOST_LINE = 1 << 20  # bytes of a line of text, which is one sentence

Kind = type[HeadscopeError]


def is_file(name: str | Path) -> bool:
    """Whether there is a file of this name; False also for an invalid name."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def exists(name: str | Path) -> bool:
    """Whether there is a file or directory of this name; False also for an invalid name."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, *, error: Kind = DataError, name: str = "", limit: int = MOST_BYTES) -> bytes:
    """The bytes of a file; `error` where it cannot be read or has more than `limit`.

    `name` is the file's name in messages, by default its path.
    """
    try:
        with path.open("rb") as handle:
            content = handle.read(limit + 1)
    except (OSError, ValueError) as failed:
        raise error(f"{name or path} cannot be read: {getattr(failed, 'strerror', None) or failed}") from None
    if len(content) > limit:
        raise error(f"{name or path} has more than {limit:,} bytes; it is another kind of file")
    return content


def read_text(path: Path, *, error: Kind = DataError, name: str = "", limit: int = MOST_BYTES) -> str:
    """A UTF-8 text, with `\\n` as line end. Errors as of `read_bytes`."""
    try:
        text = read_bytes(path, error=error, name=name, limit=limit).decode("utf-8")
    except UnicodeDecodeError as failed:
        raise error(f"{name or path} cannot be read: byte {failed.start + 1} is not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, *, error: Kind = DataError, name: str = "", limit: int = MOST_BYTES, **hooks: Any) -> Any:
    """The value of a JSON file; `hooks` are arguments of `json.loads`. Errors as of `read_bytes`."""
    text = read_text(path, error=error, name=name, limit=limit)
    try:
        return json.loads(text, **hooks)
    except (ValueError, RecursionError) as failed:
        raise error(f"{name or path} is no JSON: {' '.join(str(failed).split())[:160]}") from None


def read_object(path: Path, *, error: Kind = DataError, name: str = "") -> dict[str, Any]:
    """The object in a JSON file; `error` for any other value."""
    value = read_json(path, error=error, name=name)
    if not isinstance(value, dict):
        raise error(f"{name or path} holds no JSON object")
    return value


def read_record(path: Path) -> dict[str, Any]:
    """`read_object` of a run's record; empty where the file is missing or broken."""
    try:
        return read_object(path)
    except DataError:
        return {}


def lines_of(handle: BinaryIO | gzip.GzipFile, *, name: str) -> Iterator[bytes]:
    """The lines of an open file, one at a time; DataError for a line of more than `MOST_LINE` bytes."""
    for number in itertools.count(1):
        line = handle.readline(MOST_LINE + 1)
        if len(line) > MOST_LINE:
            raise DataError(f"{name}:{number}: the line has more than {MOST_LINE:,} bytes; a line is one sentence")
        if not line:
            return
        yield line


def is_regular(path: Path) -> bool:
    """Whether a path is a regular file, which can be read twice, and no pipe or device."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


A = TypeVar("A")
B = TypeVar("B")
Lines = str | Path | Sequence[str]
"""A text: the path of a file with one sentence a line (`.gz` too), or the sentences themselves."""


def text_name(text: Lines | None) -> str:
    """The name of a text in messages."""
    return str(text) if text is None or isinstance(text, (str, Path)) else f"the list of {len(text)} sentences"


def read_lines(text: Lines) -> Iterator[str]:
    """Lines of a UTF-8 file (`.gz` too), split at line feeds only, or of a list; DataError for an unusable text."""
    return _file_lines(Path(text)) if isinstance(text, (str, Path)) else _list_lines(text)


def in_step(
    first: Iterable[A], second: Iterable[B], names: tuple[str, str], *, unit: str = "lines"
) -> Iterator[tuple[A, B]]:
    """What belongs together, one of each; DataError with both counts where one has more `unit` than the other."""
    missing = object()
    rest = zip_longest(first, second, fillvalue=missing)
    for done, (one, other) in enumerate(rest):
        if one is missing or other is missing:
            longer = done + 1 + sum(1 for _ in rest)
            counts = (done, longer) if one is missing else (longer, done)
            raise DataError(
                f"{names[0]} and {names[1]} have different numbers of {unit}, {counts[0]:,} and {counts[1]:,}; "
                "line i of one must belong to line i of the other"
            )
        yield one, other  # type: ignore[misc]


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
