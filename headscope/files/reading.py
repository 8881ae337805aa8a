"""Reading the user's files: texts line by line (a line is one sentence), whole files up to a maximal size, TOML.

Also digests of files, and writing TOML. All errors are one line.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from headscope.errors import ConfigError, DataError, HeadscopeError, restate

MAX_BYTES = 64 << 20  # vocabularies, records and lists have a few megabytes
TOML_BYTES = 1 << 20

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Begins the small file that replaces a large one in a repository that was cloned without Git LFS."""

Kind = type[HeadscopeError]


def read_bytes(path: Path, *, error: Kind = DataError, name: str = "", limit: int = MAX_BYTES) -> bytes:
    """The bytes of a file; `error` where it cannot be read or has more than `limit`.

    `name` is the file's name in messages, by default its path.
    """
    try:
        with path.open("rb") as handle:
            content = handle.read(limit + 1)
    except (OSError, ValueError) as exception:
        raise error(f"{name or path} cannot be read: {getattr(exception, 'strerror', None) or exception}") from None
    if len(content) > limit:
        raise error(f"{name or path} has more than {limit:,} bytes; it is another kind of file")
    if content.startswith(LFS_POINTER):
        raise error(f"{name or path} is a Git LFS pointer and not the file itself; run `git lfs pull` in its folder")
    return content


def no_path(path: str | os.PathLike[str], what: str = "file") -> str:
    """The message for a missing path, `there is no file text.en`, with a similar name in the same folder, if any."""
    path = Path(path)
    try:
        near = get_close_matches(path.name, os.listdir(path.parent), n=1, cutoff=0.75)
    except (OSError, ValueError):
        near = []
    hint = "".join(f" (did you mean {path.parent / name}?)" for name in near)
    return f"there is no {what} {path}{hint}"


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a pointer of Git LFS; never fails."""
    try:
        with path.open("rb") as handle:
            return handle.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def read_text(path: Path, *, error: Kind = DataError, name: str = "", limit: int = MAX_BYTES) -> str:
    """A UTF-8 text, with `\\n` as line end and without a byte order mark. Errors as of `read_bytes`."""
    try:
        text = read_bytes(path, error=error, name=name, limit=limit).decode("utf-8-sig")
    except UnicodeDecodeError as exception:
        raise error(f"{name or path} cannot be read: byte {exception.start + 1} is not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, *, error: Kind = DataError, name: str = "", **hooks: Any) -> Any:
    """The value of a JSON file; `hooks` are arguments of `json.loads`. Errors as of `read_bytes`."""
    text = read_text(path, error=error, name=name)
    with restate(error, f"{name or path} is no JSON: {{why}}", ValueError, RecursionError):
        return json.loads(text, **hooks)


def read_object(path: Path, *, error: Kind = DataError) -> dict[str, Any]:
    """The object in a JSON file; `error` for any other value."""
    value = read_json(path, error=error)
    if not isinstance(value, dict):
        raise error(f"{path} holds no JSON object")
    return value


def read_record(path: Path) -> dict[str, Any]:
    """`read_object` of a run's record; empty where the file is missing or broken."""
    try:
        return read_object(path)
    except DataError:
        return {}


def file_digest(files: Sequence[Path]) -> str:
    """sha256 over the bytes of files, in the order given."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as handle:
            while block := handle.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file; ConfigError where it cannot be read."""
    if sys.version_info >= (3, 11):
        import tomllib  # novm: the other branch is for 3.10
    else:
        import tomli as tomllib
    text = read_text(path, error=ConfigError, limit=TOML_BYTES)
    # ValueError also for numbers of thousands of digits
    with restate(ConfigError, f"{path} is no TOML: {{why}}", ValueError, RecursionError):
        return tomllib.loads(text)


def to_toml(values: Mapping[str, Any], *, table: str = "") -> str:
    """Nested dictionaries of plain values as TOML; the values of a table come before its sub-tables."""
    lines = [f"{_key(name)} = {_toml(value)}" for name, value in values.items() if not isinstance(value, Mapping)]
    text = "".join(f"{line}\n" for line in ([f"[{table}]"] if table and lines else []) + lines)
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = to_toml(value, table=f"{table}.{_key(name)}" if table else _key(name))
            text += f"\n{inner}" if text else inner
    return text


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """A value as JSON, which is TOML as well if DEL is escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# Texts, line by line.

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
            location = f"{text}:{number}" if is_file else f"sentence {number} of the list"
            raise DataError(f"{location}: the line is empty; every line must hold one sentence")
        yield line
    if not number:
        raise DataError(f"{text_name(text)} is empty; it must hold one sentence a line")


def lines_of_text(text: Lines) -> Iterator[str]:
    """The lines of a file, or of a list of sentences; some may be empty."""
    return file_lines(Path(text)) if isinstance(text, (str, Path)) else _list_lines(text)


def _list_lines(sentences: Sequence[str]) -> Iterator[str]:
    for number, sentence in enumerate(sentences, start=1):
        location = f"sentence {number} of the list"
        if not isinstance(sentence, str):
            raise DataError(f"{location} is of type {type(sentence).__name__}; it must be a string")
        if half := re.search("[\ud800-\udfff]", sentence):
            raise DataError(f"{location}: character {half.start() + 1} is half a surrogate pair, which is no text")
        yield sentence.rstrip("\r\n")


def in_step(
    first: Iterable[A], second: Iterable[B], names: tuple[str, str], *, unit: str = "lines"
) -> Iterator[tuple[A, B]]:
    """Pairs of entries of both; DataError with both numbers of `unit` if one has more."""
    missing = object()
    pairs = itertools.zip_longest(first, second, fillvalue=missing)
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
    """The lines of a file (`.gz` too), as of `lines_of`; DataError where it cannot be read."""
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
    """The units of every line, and their separator: words and " ", or characters and "" if most lines lack spaces."""
    words = [line.split() for line in lines]
    if 2 * sum(len(line) > 1 for line in words) >= len(lines):
        return words, " "
    return [list(line.strip()) for line in lines], ""
