"""What keys are to a query: of one class, punctuation and what it separates, the same, related in the parse.

After Clark et al. 2019 (§3.2, §4), Kovaleva et al. 2019, and Raganato & Tiedemann 2018. Classes are universal tags
where there is a parse that has them, else what tokens show.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from headscope.description.pair_function import SELF, pair_function
from headscope.description.tokens import Flags, Pairs, Tokens
from headscope.heads import Site

EVERYWHERE = SELF | {Site.CROSS}
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


def _keys_tagged(tags: frozenset[str], pairs: Pairs) -> Flags:
    return pairs.keys_that(np.array([pairs.key.tagged and tag in tags for tag in pairs.key.tag], dtype=bool))


pair_function("content-words", meaning="content words", sites=EVERYWHERE, needs_parse=True)(
    partial(_keys_tagged, CONTENT)
)
pair_function("function-words", meaning="function words", sites=EVERYWHERE, needs_parse=True)(
    partial(_keys_tagged, FUNCTION)
)
for _tag, _words in WORDS.items():
    pair_function(_tag, meaning=_words, sites=EVERYWHERE, needs_parse=True)(partial(_keys_tagged, frozenset({_tag})))


@pair_function("numbers", sites=EVERYWHERE)
def numbers(pairs: Pairs) -> Flags:
    """Numbers."""
    return pairs.keys_that(np.array([any(map(str.isdigit, text)) for text in pairs.key.text], dtype=bool))


@pair_function("capitals", sites=EVERYWHERE)
def capital_letters(pairs: Pairs) -> Flags:
    """Words with a capital letter."""
    return pairs.keys_that(np.array([text[:1].isupper() for text in pairs.key.text], dtype=bool))


ENDS = frozenset(".!?…。！？")
CLOSING = {")": "(", "]": "[", "}": "{", "»": "«", "”": "“", "’": "‘"}
EITHER = frozenset({'"', "'", "``", "''"})


def marks(tokens: Tokens) -> Flags:
    """Which tokens [n] have neither letters nor digits, and are no blanks."""
    return np.array([bool(text.strip()) and not any(map(str.isalnum, text)) for text in tokens.text]) & ~tokens.special


def nearest(pairs: Pairs, holds: Flags, *, before: bool) -> Flags:
    """The nearest key of those that hold [s], before each query or after it [n s]."""
    at = np.where(holds, np.arange(len(holds)), -1)
    if before:
        ahead = np.concatenate([[-1], np.maximum.accumulate(at)[:-1]])
    else:
        at = np.where(holds, np.arange(len(holds)), len(holds))
        ahead = np.concatenate([np.minimum.accumulate(at[::-1])[::-1][1:], [len(holds)]])
    is_nearest: Flags = ahead[pairs.at][:, None] == pairs.key_position
    return is_nearest


def matches(tokens: Tokens) -> list[tuple[int, int]]:
    """Brackets and quotes that belong together: opening and closing position."""
    open_marks: list[tuple[str, int]] = []
    pairs_found = []
    for place, text in enumerate(tokens.text):
        opening = CLOSING.get(text) or (text if text in EITHER else "")
        last = max((n for n, (mark, _) in enumerate(open_marks) if mark == opening), default=None)
        if opening and last is not None:
            pairs_found.append((open_marks[last][1], place))
            del open_marks[last:]
        elif text in CLOSING.values() or text in EITHER:
            open_marks.append((text, place))
    return pairs_found


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
    is_mark = marks(pairs.key) | pairs.key.special
    return pairs.keys_that(np.logical_and.accumulate(is_mark[::-1])[::-1] & marks(pairs.key))


@pair_function("bracket")
def matching_bracket(pairs: Pairs) -> Flags:
    """The bracket or quote that belongs to it."""
    is_match = np.zeros((len(pairs.key), len(pairs.key)), dtype=bool)
    for one, other in matches(pairs.key):
        is_match[one, other] = is_match[other, one] = True
    return is_match[pairs.at]


def _other(pairs: Pairs) -> Flags:
    other: Flags = pairs.position != pairs.key_position
    return other


@pair_function("same-word")
def other_subword_of_the_word(pairs: Pairs) -> Flags:
    """The other pieces of its word."""
    return pairs.equal("word") & pairs.keys_that(pairs.key.word >= 0) & _other(pairs)


@pair_function("same-token")
def same_token(pairs: Pairs) -> Flags:
    """The same token elsewhere."""
    return pairs.equal("ids") & _other(pairs)


@pair_function("same-token-earlier")
def same_token_earlier(pairs: Pairs) -> Flags:
    """The same token earlier."""
    return pairs.equal("ids") & (pairs.key_position < pairs.position)


@pair_function("same-lemma", needs_parse=True)
def same_lemma(pairs: Pairs) -> Flags:
    """Another form of its word."""
    other_word = ~pairs.equal("word")
    return pairs.equal("lemma") & pairs.keys_that(pairs.key.lemma != "") & other_word


@pair_function("same-class", needs_parse=True)
def same_class(pairs: Pairs) -> Flags:
    """Other words of its class."""
    return pairs.equal("tag") & ~pairs.equal("word") & pairs.key.tagged


@pair_function("copy", sites=frozenset({Site.CROSS}))
def copy(pairs: Pairs) -> Flags:
    """The same string in the source."""
    letters = np.array([any(map(str.isalnum, text)) for text in pairs.key.text])
    return pairs.equal("text") & pairs.keys_that(letters)


@pair_function("other-text", sites=SELF)
def other_text_of_the_pair(pairs: Pairs) -> Flags:
    """The other text of the pair."""
    return ~pairs.equal("segment")


@pair_function("parent", needs_parse=True)
def parent(pairs: Pairs) -> Flags:
    """The word that its word depends on."""
    return pairs.equal("parent", "word") & pairs.keys_that(pairs.key.word >= 0)


@pair_function("child", needs_parse=True)
def child(pairs: Pairs) -> Flags:
    """Words that depend on its word."""
    return pairs.equal("word", "parent") & pairs.keys_that(pairs.key.parent >= 0)


@pair_function("sibling", needs_parse=True)
def sibling(pairs: Pairs) -> Flags:
    """Words that depend on the same word."""
    same = pairs.equal("parent") & pairs.keys_that(pairs.key.parent >= 0)
    return same & ~pairs.equal("word")


@pair_function("root", needs_parse=True)
def root(pairs: Pairs) -> Flags:
    """The root of the sentence."""
    words = pairs.key.word
    rootless = (pairs.key.parent < 0) & (words >= 0)
    return pairs.keys_that(rootless & np.isin(words, pairs.key.parent))
