"""Keys that are the same as the query in some way (Clark et al. 2019, §3 and §4; Raganato & Tiedemann 2018)."""

from __future__ import annotations

import numpy as np

from headscope.description.pair_function import SELF, pair_function
from headscope.description.tokens import Flags, Pairs
from headscope.heads import Site


def _other(pairs: Pairs) -> Flags:
    other: Flags = pairs.position != pairs.key_position
    return other


@pair_function("same-word")
def other_subword_of_the_word(pairs: Pairs) -> Flags:
    """The other pieces of its word."""
    return pairs.equal("word") & _other(pairs)


@pair_function("same-token")
def same_token(pairs: Pairs) -> Flags:
    """The same token elsewhere."""
    return pairs.equal("ids") & _other(pairs)


@pair_function("same-token-earlier")
def same_token_earlier(pairs: Pairs) -> Flags:
    """The same token earlier."""
    return pairs.equal("ids") & (pairs.key_position < pairs.position)


@pair_function("same-lemma", parsed=True)
def same_lemma(pairs: Pairs) -> Flags:
    """Another form of its word."""
    other_word = ~pairs.equal("word")
    return pairs.equal("lemma") & pairs.keys_that(pairs.key.lemma != "") & other_word


@pair_function("same-class", parsed=True)
def same_class(pairs: Pairs) -> Flags:
    """Other words of its class."""
    return pairs.equal("tag") & ~pairs.equal("word")


@pair_function("copy", sites=frozenset({Site.CROSS}))
def copy(pairs: Pairs) -> Flags:
    """The same string in the source."""
    letters = np.array([any(map(str.isalnum, text)) for text in pairs.key.text])
    return pairs.equal("text") & pairs.keys_that(letters)


@pair_function("other-text", sites=SELF)
def other_text_of_the_pair(pairs: Pairs) -> Flags:
    """The other text of the pair."""
    return ~pairs.equal("segment")
