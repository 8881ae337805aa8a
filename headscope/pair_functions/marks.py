"""Punctuation, brackets, and what they separate (Clark et al. 2019, §3.2; Kovaleva et al. 2019)."""

from __future__ import annotations

import numpy as np

from headscope.description.pair_function import SELF, pair_function
from headscope.description.tokens import Flags, Pairs, Tokens
from headscope.heads import Site

EVERYWHERE = SELF | {Site.CROSS}
ENDS = frozenset(".!?…。！？")
CLOSING = {")": "(", "]": "[", "}": "{", "»": "«", "”": "“", "’": "‘"}
EITHER = frozenset({'"', "'", "``", "''"})


def marks(tokens: Tokens) -> Flags:
    """Which tokens [n] have neither letters nor digits."""
    return np.array([not any(map(str.isalnum, text)) for text in tokens.text]) & ~tokens.special


def nearest(pairs: Pairs, holds: Flags, *, before: bool) -> Flags:
    """The nearest key of those that hold [s], before each query or after it [n s]."""
    at = np.where(holds, np.arange(len(holds)), -1)
    if before:
        ahead = np.concatenate([[-1], np.maximum.accumulate(at)[:-1]])
    else:
        at = np.where(holds, np.arange(len(holds)), len(holds))
        ahead = np.concatenate([np.minimum.accumulate(at[::-1])[::-1][1:], [len(holds)]])
    found: Flags = ahead[pairs.at][:, None] == pairs.key_position
    return found


def matches(tokens: Tokens) -> list[tuple[int, int]]:
    """Brackets and quotes that belong together: opening and closing position."""
    open_marks: list[tuple[str, int]] = []
    found = []
    for place, text in enumerate(tokens.text):
        wanted = CLOSING.get(text) or (text if text in EITHER else "")
        last = max((n for n, (mark, _) in enumerate(open_marks) if mark == wanted), default=None)
        if wanted and last is not None:
            found.append((open_marks[last][1], place))
            del open_marks[last:]
        elif text in CLOSING.values() or text in EITHER:
            open_marks.append((text, place))
    return found


@pair_function("punctuation", sites=EVERYWHERE)
def punctuation(pairs: Pairs) -> Flags:
    """Punctuation."""
    return pairs.keys_that(marks(pairs.key))


@pair_function("previous-delimiter")
def previous_delimiter(pairs: Pairs) -> Flags:
    """The punctuation before."""
    return nearest(pairs, marks(pairs.key), before=True)


@pair_function("next-delimiter")
def next_delimiter(pairs: Pairs) -> Flags:
    """The punctuation after."""
    return nearest(pairs, marks(pairs.key), before=False)


@pair_function("after-delimiter")
def first_token_after_a_delimiter(pairs: Pairs) -> Flags:
    """The first token after the punctuation before."""
    after = np.concatenate([[False], marks(pairs.key)[:-1]]) & ~marks(pairs.key)
    return nearest(pairs, after, before=True)


@pair_function("previous-sentence-end")
def previous_sentence_end(pairs: Pairs) -> Flags:
    """The end of the sentence before."""
    return nearest(pairs, np.array([text in ENDS for text in pairs.key.text]), before=True)


@pair_function("final-punctuation", sites=frozenset({Site.CROSS}))
def final_punctuation(pairs: Pairs) -> Flags:
    """The punctuation at the end of the source."""
    found = marks(pairs.key) | pairs.key.special
    return pairs.keys_that(np.logical_and.accumulate(found[::-1])[::-1] & marks(pairs.key))


@pair_function("bracket")
def matching_bracket(pairs: Pairs) -> Flags:
    """The bracket or quote that belongs to it."""
    found = np.zeros((len(pairs.key), len(pairs.key)), dtype=bool)
    for one, other in matches(pairs.key):
        found[one, other] = found[other, one] = True
    return found[pairs.at]
