"""Alignment of subwords with the words of a parse, by character spans."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from headscope.data.offsets import Span, fold_characters
from headscope.data.parses import Parse

NO_SUBWORD = "token without piece"
NO_TOKEN = "piece without token"
TRUNCATED = "truncated"
DISORDER = "pieces out of order"


@dataclass(frozen=True)
class Aligned:
    """Word units of a sentence: the positions of the subwords of the fewest tokens that no subword crosses.

    `relations` are (relation, head unit, dependent unit), without `fused` ones within a unit; `tags` and `lemmas` are
    those of first tokens.
    """

    units: list[list[int]]
    relations: list[tuple[str, int, int]]
    fused: int
    tags: tuple[str, ...] = field(default=(), compare=False)
    lemmas: tuple[str, ...] = field(default=(), compare=False)


def align(parse: Parse, spans: Sequence[Span | None]) -> Aligned | str:
    """Word units of a sentence, or why it has none; a subword is of the tokens that its span overlaps."""
    touched = _touched(parse, spans)
    if touched is None:
        return NO_TOKEN
    # combining and control characters are not counted
    last = max((span[1] for span in spans if span is not None), default=0)
    remaining = "".join(parse.text[max(token.start, last) : token.end] for token in parse.tokens)
    if fold_characters(remaining, "bare"):
        return TRUNCATED
    if len({token for first, last in touched.values() for token in range(first, last + 1)}) < len(parse.tokens):
        return NO_SUBWORD
    joined = {token for first, last in touched.values() for token in range(first, last)}
    unit_of: list[int] = []
    for token in range(len(parse.tokens)):
        unit_of.append(unit_of[-1] + (token - 1 not in joined) if unit_of else 0)
    units: list[list[int]] = [[] for _ in range(len(unit_of) - len(joined))]
    for subword, (first, _) in touched.items():
        units[unit_of[first]].append(subword)
    in_order = [subword for unit in units for subword in unit]
    if in_order != sorted(in_order):
        return DISORDER
    ends = [(r.relation, unit_of[r.head], unit_of[r.dependent]) for r in parse.relations]
    between = [end for end in ends if end[1] != end[2]]
    beginning = [parse.tokens[unit_of.index(unit)] for unit in range(len(units))]
    about = (tuple(token.tag for token in beginning), tuple(token.lemma for token in beginning))
    return Aligned(units, between, len(ends) - len(between), *about)


def _touched(parse: Parse, spans: Sequence[Span | None]) -> dict[int, Span] | None:
    starts, ends = [token.start for token in parse.tokens], [token.end for token in parse.tokens]
    touched: dict[int, Span] = {}
    for subword, span in enumerate(spans):
        start, end = _strip(parse.text, span)
        if start < end:
            first, last = bisect_right(ends, start), bisect_left(starts, end) - 1
            if first > last:
                return None
            touched[subword] = (first, last)
    return touched


def _strip(text: str, span: Span | None) -> Span:
    start, end = span or (0, 0)
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, start + len(part.strip())
