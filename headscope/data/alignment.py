"""Which pieces make up which words of a parse.

The pieces come with their characters (`headscope.data.offsets`), the words with theirs; a sentence where the two
do not cover each other does not align, and the caller counts the reason.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from headscope.data.offsets import Span, fold_characters
from headscope.data.parses import Parse

NO_PIECE = "token without piece"
NO_TOKEN = "piece without token"
TRUNCATED = "truncated"
DISORDER = "pieces out of order"


@dataclass(frozen=True)
class Aligned:
    """A sentence whose words and pieces fit.

    A unit is the smallest run of surface tokens whose borders no piece straddles; `units` lists the
    positions of its pieces, in text order. `relations` are (relation, head unit, dependent unit); `fused`
    counts those left out because both ends fell into one unit.
    """

    units: list[list[int]]
    relations: list[tuple[str, int, int]]
    fused: int


def align(parse: Parse, spans: Sequence[Span | None]) -> Aligned | str:
    """Word units of a sentence, or the reason why its words and pieces do not fit.

    A piece touches the tokens that its span, less outer whitespace, overlaps. Pieces without a span
    (special tokens) and whitespace pieces belong to no unit.
    """
    touched = _touched(parse, spans)
    if touched is None:
        return NO_TOKEN
    if _cut_off(parse, spans):
        return TRUNCATED
    if len({token for first, last in touched.values() for token in range(first, last + 1)}) < len(parse.tokens):
        return NO_PIECE
    joined = {token for first, last in touched.values() for token in range(first, last)}
    unit_of = _unit_numbers(len(parse.tokens), joined)
    units: list[list[int]] = [[] for _ in range(len(unit_of) - len(joined))]
    for piece, (first, _) in touched.items():
        units[unit_of[first]].append(piece)
    in_order = [piece for unit in units for piece in unit]
    if in_order != sorted(in_order):
        return DISORDER
    ends = [(r.relation, unit_of[r.head], unit_of[r.dependent]) for r in parse.relations]
    between = [end for end in ends if end[1] != end[2]]
    return Aligned(units, between, len(ends) - len(between))


def _touched(parse: Parse, spans: Sequence[Span | None]) -> dict[int, Span] | None:
    """First and last token that each piece overlaps; None where a piece overlaps none."""
    starts, ends = [token.start for token in parse.tokens], [token.end for token in parse.tokens]
    touched: dict[int, Span] = {}
    for piece, span in enumerate(spans):
        start, end = _strip(parse.text, span)
        if start < end:
            first, last = bisect_right(ends, start), bisect_left(starts, end) - 1
            if first > last:
                return None
            touched[piece] = (first, last)
    return touched


def _strip(text: str, span: Span | None) -> Span:
    start, end = span or (0, 0)
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, start + len(part.strip())


def _cut_off(parse: Parse, spans: Sequence[Span | None]) -> bool:
    """Whether tokens go on after the last piece; marks and control characters may have been dropped."""
    end = max((span[1] for span in spans if span is not None), default=0)
    rest = "".join(parse.text[max(token.start, end) : token.end] for token in parse.tokens)
    return bool(fold_characters(rest, "bare"))


def _unit_numbers(count: int, joined: set[int]) -> list[int]:
    """The unit of each token, where the tokens `joined` share that of their successor."""
    numbers: list[int] = []
    for token in range(count):
        numbers.append(numbers[-1] + (token - 1 not in joined) if numbers else 0)
    return numbers
