"""CoNLL columns: a word a line, its tag in the last column, an empty line after every sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headscope.errors import DataError
from headscope.files.reading import raw_lines

START = "-DOCSTART-"  # the line between documents of CoNLL-2003


class Rows(NamedTuple):
    """A sentence in columns: its words, their tags, and the number of its first line."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    line: int


def read_columns(path: Path) -> Iterator[Rows]:
    """The sentences of a file (`.gz` too): the first column is the word, the last one its tag.

    Columns are parted by tabs where a line has one, else by spaces. DataError, with the line, for a line of one column
    and for a file without a sentence.
    """
    words: list[str] = []
    tags: list[str] = []
    number, has_rows = 0, False
    for number, raw in enumerate(raw_lines(path), start=1):
        line = _text(raw, path, number)
        columns = [column.strip() for column in line.split("\t" if "\t" in line else None)]
        if columns and columns[0] != START:
            if len(columns) < 2 or not columns[0] or not columns[-1]:
                raise DataError(f"{path}:{number}: {line[:40]!r} is not a word and its tag, in columns")
            words.append("".join(columns[0].split()))
            tags.append(columns[-1])
        elif words:
            yield Rows(tuple(words), tuple(tags), number - len(words))
            words, tags, has_rows = [], [], True
    if words:
        yield Rows(tuple(words), tuple(tags), number + 1 - len(words))
    elif not has_rows:
        raise DataError(f"{path} is empty; it must hold a word and its tag a line, and an empty line after a sentence")


def _text(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number}: byte {error.start + 1} is not UTF-8; convert the file first (iconv -t utf-8)"
        ) from None
