"""Tokens as people read them, the same for all tokenizers.

A space before a token is ␣ (▁ of SentencePiece, Ġ of byte-level ones), a line break ⏎, a tab ⇥; bytes of a character
are put together where a token has all. Marks of other tokenizers stay: ##ly, un@@, ly</w>.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, get_args

from headscope.data.offsets import byte_table

Marks = Literal["", "▁", "Ġ", "##", "@@", "</w>"]
MARKS: tuple[Marks, ...] = get_args(Marks)
BEFORE: tuple[Marks, ...] = ("▁", "Ġ", "##")
AFTER: tuple[Marks, ...] = ("@@", "</w>")
VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥"}
CUT = 0x3400
"""Letters from here on, neither digits nor capitals, stand for the bytes of characters that a tokenizer cut."""


def marks_of(subwords: Sequence[str]) -> Marks:
    """How a vocabulary marks words: by what begins or ends at least a twentieth of its subwords."""
    counts: Counter[Marks] = Counter()
    for subword in subwords:
        for mark in BEFORE:
            counts[mark] += subword.startswith(mark)
        for mark in AFTER:
            counts[mark] += subword.endswith(mark)
    mark, count = counts.most_common(1)[0] if counts else ("", 0)
    return mark if count * 20 >= max(len(subwords), 1) else ""


def bare(subword: str, marks: Marks) -> str:
    """A subword without the mark."""
    if not marks:
        return subword
    return subword.removesuffix(marks) if marks in AFTER else subword.removeprefix(marks)


@lru_cache(maxsize=1 << 16)
def text_of(subword: str, marks: Marks) -> str:
    """The text that a subword stands for, without the mark: bytes decoded (Ã³ is ó); a letter for a cut byte."""
    text = bare(subword, marks)
    raw = _bytes_of(text, marks)
    if raw is None:
        return text.replace("▁", " ") if marks == "▁" else text
    characters = raw.decode(errors="surrogateescape")
    return "".join(chr(CUT + ord(c) - 0xDC00) if "\udc80" <= c <= "\udcff" else c for c in characters)


def display_subword(subword: str, marks: Marks) -> str:
    """A subword as people read it, of a vocabulary that marks words so."""
    raw = _bytes_of(subword, marks)
    if raw is not None and (marks == "Ġ" or raw.isascii()):
        subword = raw.decode(errors="backslashreplace")
    elif marks == "▁":
        subword = subword.replace("▁", " ")
    return visible(subword)


def _bytes_of(subword: str, marks: Marks) -> bytes | None:
    """The bytes that a subword is written for, letter by letter or as <0xHH>; None of one that is text."""
    if marks == "Ġ" and byte_table().keys() >= set(subword):
        return bytes(byte_table()[letter] for letter in subword)
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", subword) if marks == "▁" else None
    return bytes.fromhex(byte[1]) if byte else None


def visible(text: str) -> str:
    """A text in which blanks, line breaks and what cannot be printed are seen."""
    return "".join(VISIBLE.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
