"""Character spans of a tokenizer's subwords in the text, and subwords as people read them.

Offsets from the tokenizer are used if letters and digits of the subwords match the text; else (Marian) subwords are
searched in the text. All conventions of marks (▁word, ##word, word@@, word</w>, bytes) are tried, and the one that
spells the text is taken.

Subwords are displayed alike for all tokenizers: a space before a token is ␣ (▁ of SentencePiece, Ġ of byte-level ones),
a line break ⏎, a tab ⇥; bytes are decoded where a token has all bytes of a character. Marks of other tokenizers stay:
##ly, un@@, ly</w>.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal, get_args

Span = tuple[int, int]
Level = Literal["written", "marks", "bare", "letters"]


def subword_spans(tokenizer: Any, text: str, ids: Sequence[int]) -> list[Span | None] | None:
    """Character spans in `text` of `ids`, which may be cut; None for special ones. None overall if ids do not spell it.

    Whitespace has an empty span, and subwords of one character share its span. Where subwords are searched, an unknown
    one covers its word, or all text between its known neighbours.
    """
    subwords = tokenizer.convert_ids_to_tokens(list(ids))
    unknown_id = getattr(tokenizer, "unk_token_id", None)
    if unknown_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        unknown_id = None  # GPT-2 has one token for all of them, which is never text
    is_unknown = [unknown_id is not None and number == unknown_id for number in ids]
    special = set(tokenizer.all_special_ids) - {unknown_id}
    if getattr(tokenizer, "is_fast", False):
        offsets = _offsets(tokenizer, text, ids, special)
        spans = None if offsets is None else _verified_spans(text, subwords, offsets, is_unknown)
        if spans is not None:
            return spans
    return _searched_spans(text, subwords, [number in special for number in ids], is_unknown)


# Tokenizers that report offsets.


def _offsets(tokenizer: Any, text: str, ids: Sequence[int], special: set[int]) -> list[Span | None] | None:
    """Offsets from encoding `text` again; `ids` must be a prefix of it, apart from special tokens around them."""
    for with_special in (True, False):
        encoding = tokenizer(
            text,
            add_special_tokens=with_special,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        before = 0 if with_special else next((n for n, number in enumerate(ids) if number not in special), len(ids))
        pairs = zip(ids[before:], encoding["input_ids"], strict=False)
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not special.issuperset(ids[before + length :]):
            continue
        spans: list[Span | None] = [None] * len(ids)
        for n in range(length):
            start, end = encoding["offset_mapping"][n]
            if not (encoding["special_tokens_mask"][n] or (start == end and ids[before + n] in special)):
                spans[before + n] = (start, end)
        return spans
    return None


def _verified_spans(
    text: str, subwords: Sequence[str], spans: Sequence[Span | None], is_unknown: Sequence[bool]
) -> list[Span | None] | None:
    """The spans, empty for subwords of whitespace; None if the subwords do not spell the text at their spans."""
    groups = _groups(len(text), spans)
    if groups is None:
        return None
    for read in CONVENTIONS:
        spellings = [read(subword) for subword in subwords]
        if all(any(is_unknown[n] for n in group) or _spells_span(text, group, spans, spellings) for group in groups):
            return [
                (span[0], span[0]) if span and not is_unknown[n] and not spellings[n].strip() else span
                for n, span in enumerate(spans)
            ]
    return None


def _groups(length: int, spans: Sequence[Span | None]) -> list[list[int]] | None:
    """Groups of subwords with overlapping spans. Returns None if spans are not in order or exceed the text."""
    groups: list[list[int]] = []
    begin = end = 0
    for subword, span in enumerate(spans):
        if span is None:
            continue
        if not begin <= span[0] <= span[1] <= length:
            return None
        if not groups or span[0] >= end:
            groups.append([])
        groups[-1].append(subword)
        begin, end = span[0], max(end, span[1])
    return groups


def _spells_span(text: str, group: list[int], spans: Sequence[Span | None], spellings: Sequence[bytes]) -> bool:
    """Whether a group of subwords has the letters and digits of the text that their spans cover."""
    inside = [span for n in group if (span := spans[n]) is not None]
    span_text = text[inside[0][0] : max(span[1] for span in inside)]
    try:
        spelling = b"".join(spellings[n] for n in group).decode()
    except UnicodeDecodeError:
        return False
    return fold_characters(spelling, "letters") == fold_characters(span_text, "letters")


# Other tokenizers: subwords are searched in the text.


def _searched_spans(
    text: str, subwords: Sequence[str], special: Sequence[bool], is_unknown: Sequence[bool]
) -> list[Span | None] | None:
    levels: tuple[Level, ...] = ("written", "marks", "bare")
    for level in levels:
        folded_text = _FoldedText(text, level)
        for read in CONVENTIONS:
            spellings = [b"" if special[n] else read(subword) for n, subword in enumerate(subwords)]
            spans = _search(folded_text, spellings, is_unknown)
            if spans is not None:
                return [None if special[n] else span for n, span in enumerate(spans)]
    return None


class _FoldedText:
    """A text in folded form (`fold_characters`), with the original position of each folded character."""

    def __init__(self, text: str, level: Level) -> None:
        folds = [fold_characters(character, level) for character in text]
        self.level = level
        self.characters = "".join(folds)
        self.origin = [n for n, character_fold in enumerate(folds) for _ in character_fold]
        self.text = text

    def span(self, start: int, end: int) -> Span:
        if start < end:
            return self.origin[start], self.origin[end - 1] + 1
        position = self.origin[start] if start < len(self.origin) else len(self.text)
        return position, position

    def shares(self, start: int, end: int, count: int) -> list[Span]:
        """Spans of the words of a range if there are `count` of them, else `count` times the whole range."""
        first, last = self.span(start, end)
        words = [(first + word.start(), first + word.end()) for word in re.finditer(r"\S+", self.text[first:last])]
        return words if len(words) == count else [(first, last)] * count


def _search(folded_text: _FoldedText, spellings: Sequence[bytes], is_unknown: Sequence[bool]) -> list[Span] | None:
    """Spans of all subwords: runs of known ones are located in order, unknown ones fill the gaps between them."""
    runs, gaps = _runs(spellings, is_unknown)
    parts = [_join_spellings([spellings[n] for n in run], folded_text.level) for run in runs]
    run_texts = [part for part in parts if part is not None]
    if len(run_texts) < len(parts):
        return None
    starts = _unique_starts(folded_text.characters, [run_text for run_text, _ in run_texts])
    if starts is None:
        return None
    span_of: dict[int, Span] = {}
    for run, start, (_, ranges) in zip(runs, starts, run_texts, strict=True):
        for subword, (first, last) in zip(run, ranges, strict=True):
            # A subword of combining marks only, at a level that drops them, gets the span of the letter before it.
            silent = first == last
            span_of[subword] = folded_text.span(max(start + first - silent, 0), start + last)
    for n, gap in enumerate(gaps):
        spans = folded_text.shares(starts[n] + len(run_texts[n][0]), starts[n + 1], len(gap))
        for group, span in zip(gap, spans, strict=True):
            span_of.update(dict.fromkeys(group, span))
    spans_in_order: list[Span] = []
    for n in range(len(spellings)):
        end = spans_in_order[-1][1] if spans_in_order else 0
        spans_in_order.append(span_of.get(n, (end, end)))  # without characters: empty, after its predecessor
    return spans_in_order


def _runs(spellings: Sequence[bytes], is_unknown: Sequence[bool]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Runs of known subwords, and the gaps between them: for each gap its unknown subwords, grouped by word."""
    runs: list[list[int]] = [[]]
    gaps: list[list[list[int]]] = []
    for n, spelling in enumerate(spellings):
        if is_unknown[n] and gaps and not runs[-1]:
            if is_unknown[n - 1]:
                gaps[-1][-1].append(n)
            else:
                gaps[-1].append([n])
        elif is_unknown[n]:
            gaps.append([[n]])
            runs.append([])
        elif spelling.strip():
            runs[-1].append(n)
    return runs, gaps


def _join_spellings(spellings: Sequence[bytes], level: Level) -> tuple[str, list[Span]] | None:
    """The folded text that subwords spell together, and each one's range in it; None if their bytes are no text."""
    try:
        spelling = b"".join(spellings).decode()
    except UnicodeDecodeError:
        return None
    run_text, of_byte = "", list[Span]()
    for character in spelling:
        part = fold_characters(character, level)
        of_byte += [(len(run_text), len(run_text) + len(part))] * len(character.encode())
        run_text += part
    ranges, begin = list[Span](), 0
    for subword in spellings:
        ranges.append((of_byte[begin][0], of_byte[begin + len(subword) - 1][1]))
        begin += len(subword)
    return run_text, ranges


def _unique_starts(text: str, parts: list[str]) -> list[int] | None:
    """The start of each part in the text, None unless unique; a single part need only begin the text."""
    if len(parts) == 1:
        return [0] if text.startswith(parts[0]) and (parts[0] or not text) else None
    forward = _leftmost(text, parts)
    mirror_starts = _leftmost(text[::-1], [part[::-1] for part in reversed(parts)])
    if forward is None or mirror_starts is None:
        return None
    backward = [len(text) - start - len(part) for start, part in zip(reversed(mirror_starts), parts, strict=True)]
    return forward if forward == backward else None


def _leftmost(text: str, parts: Sequence[str]) -> list[int] | None:
    """The earliest start of each part, in order, with gaps between parts; the first and last are at the text's ends."""
    if not text.startswith(parts[0]) or not text.endswith(parts[-1]):
        return None
    starts, end = [0], len(parts[0])
    for part in parts[1:-1]:
        start = text.find(part, end + 1)
        if start < 0:
            return None
        starts.append(start)
        end = start + len(part)
    starts.append(len(text) - len(parts[-1]))
    return starts if starts[-1] > end else None


# Comparison of characters.

_SINGLE, _DOUBLE, _DASHES = "‘’‚‛′´`", '“”„‟″«»"', "‐‑‒–—―−"
_PUNCTUATION = str.maketrans(
    # Punctuation normalizers (Moses's in Marian) write `''` for a double quote, or the other way round.
    {**dict.fromkeys(_SINGLE, "'"), **dict.fromkeys(_DOUBLE, "''"), **dict.fromkeys(_DASHES, "-")}
)


def fold_characters(text: str, level: Level) -> str:
    """Text normalised for comparison: no case, compatibility forms, plain quotes and dashes, no whitespace.

    Level `written` drops nothing else, `marks` control and format characters (as some tokenizers do), `bare` combining
    marks too, `letters` everything but letters and digits.
    """
    return "".join(_fold(character, level) for character in text)


@lru_cache(maxsize=1 << 16)
def _fold(character: str, level: Level) -> str:
    plain = unicodedata.normalize("NFKD", character.translate(_PUNCTUATION)).casefold()
    plain = unicodedata.normalize("NFKD", plain).translate(_PUNCTUATION)
    if level == "letters":
        return "".join(c for c in plain if unicodedata.category(c)[0] in "LN")
    ignored_categories = {"written": (), "marks": ("Cc", "Cf"), "bare": ("Cc", "Cf", "Mn")}[level]
    return "".join(c for c in plain if not c.isspace() and unicodedata.category(c) not in ignored_categories)


# Conventions of subwords.


def _encode(subword: str) -> bytes:
    return subword.encode(errors="replace")


@lru_cache(maxsize=1)
def byte_table() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


CONVENTIONS: tuple[Callable[[str], bytes], ...] = (
    lambda subword: _bytes_of(subword, "▁") or _encode(subword.replace("▁", " ")),
    lambda subword: _encode(subword.removeprefix("##") or subword),
    lambda subword: _encode(subword.removesuffix("@@") or subword),
    lambda subword: _encode(subword.removesuffix("</w>")),
    lambda subword: _bytes_of(subword, "Ġ") or _encode(subword),
    lambda subword: bytes(map(ord, subword)) if all(ord(c) < 256 for c in subword) else _encode(subword),
)
"""Conventions of subwords, tried in this order."""


# What people read.

Marks = Literal["", "▁", "Ġ", "##", "@@", "</w>"]
MARKS: tuple[Marks, ...] = get_args(Marks)
BEFORE: tuple[Marks, ...] = ("▁", "Ġ", "##")
AFTER: tuple[Marks, ...] = ("@@", "</w>")
VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥"}
CUT = 0x3400
"""Letters from here on, neither digits nor capitals, stand for the bytes of characters that a tokenizer cut."""


def marks_of(subwords: Sequence[str]) -> Marks:
    """The mark of words in a vocabulary: the one that most subwords have, at least a twentieth of them; else ""."""
    counts = {mark: sum(bare(subword, mark) != subword for subword in subwords) for mark in MARKS}
    mark = max(counts, key=counts.__getitem__)
    return mark if counts[mark] * 20 >= max(len(subwords), 1) else ""


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
    """A subword as it is displayed, from a vocabulary with these marks of words."""
    raw = _bytes_of(subword, marks)
    if raw is not None and (marks == "Ġ" or raw.isascii()):
        subword = raw.decode(errors="backslashreplace")
    elif marks == "▁":
        subword = subword.replace("▁", " ")
    return visible(subword)


def _bytes_of(subword: str, marks: Marks) -> bytes | None:
    """The bytes that a byte-level subword or a <0xHH> stands for. Returns None for a subword of text."""
    if marks == "Ġ" and byte_table().keys() >= set(subword):
        return bytes(byte_table()[letter] for letter in subword)
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", subword) if marks == "▁" else None
    return bytes.fromhex(byte[1]) if byte else None


def visible(text: str) -> str:
    """A text with spaces, line breaks and unprintable characters made visible."""
    return "".join(VISIBLE.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
