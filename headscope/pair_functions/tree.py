"""Words that the query's word is related to in its parse, whatever the relation."""

from __future__ import annotations

import numpy as np

from headscope.description.pair_function import pair_function
from headscope.description.tokens import Flags, Pairs


@pair_function("parent", parsed=True)
def parent(pairs: Pairs) -> Flags:
    """The word that its word depends on."""
    return pairs.equal("parent", "word") & pairs.keys_that(pairs.key.word >= 0)


@pair_function("child", parsed=True)
def child(pairs: Pairs) -> Flags:
    """Words that depend on its word."""
    return pairs.equal("word", "parent") & pairs.keys_that(pairs.key.parent >= 0)


@pair_function("sibling", parsed=True)
def sibling(pairs: Pairs) -> Flags:
    """Words that depend on the same word."""
    same = pairs.equal("parent") & pairs.keys_that(pairs.key.parent >= 0)
    return same & ~pairs.equal("word")


@pair_function("root", parsed=True)
def root(pairs: Pairs) -> Flags:
    """The root of the sentence."""
    words = pairs.key.word
    rootless = (pairs.key.parent < 0) & (words >= 0)
    return pairs.keys_that(rootless & np.isin(words, pairs.key.parent))
