"""Pair functions: keys of one class, punctuation and tokens beside it, the same word, words related in the parse.

After Clark et al. 2019 (§3.2, §4), Kovaleva et al. 2019, and Raganato & Tiedemann 2018. Classes are universal tags of a
parse that has them, else classes by the form of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from headscope.description.pair_function import SELF, Predicate, pair_function
from headscope.description.tokens import Flags, Pairs, Tokens
from headscope.heads import Site

CROSS = frozenset({Site.CROSS})
EVERYWHERE = SELF | CROSS
CONTENT = frozenset({"NOUN", "PROPN", "VERB", "ADJ", "ADV", "NUM", "INTJ"})
FUNCTION = frozenset({"ADP", "AUX", "CCONJ", "DET", "PART", "PRON", "SCONJ"})
WORDS = {
    "NOUN": "nouns",
    "PROPN": "names",
    "VERB": "verbs",
    "AUX": "auxiliaries",
    "ADJ": "adjectives",
    "ADV": "adverbs",
    "ADP": "prepositions",
    "DET": "determiners",
    "PRON": "pronouns",
    "CCONJ": "coordinating conjunctions",
    "SCONJ": "subordinating conjunctions",
    "PART": "particles",
}


SENTENCE_ENDS = frozenset(".!?…。！？")
CLOSING = {")": "(", "]": "[", "}": "{", "»": "«", "”": "“", "’": "‘"}
QUOTES = frozenset({'"', "'", "``", "''"})


def _has_tag(tags: frozenset[str], pairs: Pairs) -> Flags:
    return pairs.keys_that(np.array([pairs.key.has_tags and tag in tags for tag in pairs.key.tag], dtype=bool))


def _texts(tokens: Tokens, holds: Callable[[str], bool]) -> Flags:
    """Whether a predicate holds for the text of each token [n]."""
    return np.array([holds(text) for text in tokens.text], dtype=bool)


def punctuation(tokens: Tokens) -> Flags:
    """Whether each token [n] is punctuation: not blank, and without letters or digits."""
    return _texts(tokens, lambda text: bool(text.strip()) and not any(map(str.isalnum, text))) & ~tokens.special


def is_nearest(pairs: Pairs, holds: Flags, *, before: bool = True) -> Flags:
    """Whether each key is the nearest of those where `holds` [s], before each query or after it: [n s]."""
    positions = np.append(np.flatnonzero(holds), -1)  # the last entry means none
    index = np.searchsorted(positions[:-1], pairs.at, side="left" if before else "right")
    return positions[index - before][:, None] == pairs.key_position


def matching_pairs(tokens: Tokens) -> list[tuple[int, int]]:
    """Matching brackets and quotes: pairs of opening and closing position."""
    open_marks: list[tuple[str, int]] = []
    pairs_found = []
    for position, text in enumerate(tokens.text):
        opening = CLOSING.get(text) or (text if text in QUOTES else "")
        last = max((n for n, (mark, _) in enumerate(open_marks) if mark == opening), default=None)
        if opening and last is not None:
            pairs_found.append((open_marks[last][1], position))
            del open_marks[last:]
        elif text in CLOSING.values() or text in QUOTES:
            open_marks.append((text, position))
    return pairs_found


def _after_delimiter(pairs: Pairs) -> Flags:
    return is_nearest(pairs, np.concatenate([[False], punctuation(pairs.key)[:-1]]) & ~punctuation(pairs.key))


def _final_punctuation(pairs: Pairs) -> Flags:
    is_mark = punctuation(pairs.key) | pairs.key.special
    return pairs.keys_that(np.logical_and.accumulate(is_mark[::-1])[::-1] & punctuation(pairs.key))


def _matching_bracket(pairs: Pairs) -> Flags:
    is_match = np.zeros((len(pairs.key), len(pairs.key)), dtype=bool)
    for one, other in matching_pairs(pairs.key):
        is_match[one, other] = is_match[other, one] = True
    return is_match[pairs.at]


def _root(pairs: Pairs) -> Flags:
    words = pairs.key.word
    return pairs.keys_that((pairs.key.parent < 0) & (words >= 0) & np.isin(words, pairs.key.parent))


def _is_other(pairs: Pairs) -> Flags:
    return pairs.position != pairs.key_position


Row = tuple[str, frozenset[Site], Predicate]
ON_TEXT: Mapping[str, Row] = {
    "numbers": ("numbers", EVERYWHERE, lambda p: p.keys_that(_texts(p.key, lambda text: any(map(str.isdigit, text))))),
    "capitals": (
        *("words with a capital letter", EVERYWHERE),
        lambda p: p.keys_that(_texts(p.key, lambda text: text[:1].isupper())),
    ),
    "punctuation": ("punctuation", EVERYWHERE, lambda p: p.keys_that(punctuation(p.key))),
    "previous-delimiter": ("the punctuation before", SELF, lambda p: is_nearest(p, punctuation(p.key))),
    "next-delimiter": ("the punctuation after", SELF, lambda p: is_nearest(p, punctuation(p.key), before=False)),
    "after-delimiter": ("the first token after the punctuation before", SELF, _after_delimiter),
    "previous-sentence-end": (
        *("the end of the sentence before", SELF),
        lambda p: is_nearest(p, _texts(p.key, SENTENCE_ENDS.__contains__)),
    ),
    "final-punctuation": ("the punctuation at the end of the source", CROSS, _final_punctuation),
    "bracket": ("the bracket or quote that belongs to it", SELF, _matching_bracket),
    "same-word": ("the other pieces of its word", SELF, lambda p: p.equal("word") & (p.k("word") >= 0) & _is_other(p)),
    "same-token": ("the same token elsewhere", SELF, lambda p: p.equal("ids") & _is_other(p)),
    "same-token-earlier": ("the same token earlier", SELF, lambda p: p.equal("ids") & (p.key_position < p.position)),
    "copy": (
        *("the same string in the source", CROSS),
        lambda p: p.equal("text") & _texts(p.key, lambda text: any(map(str.isalnum, text))),
    ),
    "other-text": ("the other text of the pair", SELF, lambda p: ~p.equal("segment")),
}
ON_PARSES: Mapping[str, Row] = {
    "content-words": ("content words", EVERYWHERE, partial(_has_tag, CONTENT)),
    "function-words": ("function words", EVERYWHERE, partial(_has_tag, FUNCTION)),
    **{tag: (words, EVERYWHERE, partial(_has_tag, frozenset({tag}))) for tag, words in WORDS.items()},
    "same-lemma": (
        *("another form of its word", SELF),
        lambda p: p.equal("lemma") & (p.k("lemma") != "") & ~p.equal("word"),
    ),
    "same-class": ("other words of its class", SELF, lambda p: p.equal("tag") & ~p.equal("word") & p.key.has_tags),
    "parent": ("the word that its word depends on", SELF, lambda p: p.equal("parent", "word") & (p.k("word") >= 0)),
    "child": ("words that depend on its word", SELF, lambda p: p.equal("word", "parent") & (p.k("parent") >= 0)),
    "sibling": (
        *("words that depend on the same word", SELF),
        lambda p: p.equal("parent") & (p.k("parent") >= 0) & ~p.equal("word"),
    ),
    "root": ("the root of the sentence", SELF, _root),
}
"""By name: the keys in words, the sites, and the predicate. Those of `ON_PARSES` need a parse."""
for _rows, _needs_parse in ((ON_TEXT, False), (ON_PARSES, True)):
    for _name, (_meaning, _sites, _holds) in _rows.items():
        pair_function(_name, meaning=_meaning, sites=_sites, needs_parse=_needs_parse)(_holds)
