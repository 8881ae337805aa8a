"""Keys of one class, whatever the query: universal tags where there is a parse, else what tokens show."""

from __future__ import annotations

from functools import partial

import numpy as np

from headscope.description.pair_function import SELF, pair_function
from headscope.description.tokens import Flags, Pairs
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


def _tagged(tags: frozenset[str], pairs: Pairs) -> Flags:
    return pairs.keys_that(np.array([tag in tags for tag in pairs.key.tag], dtype=bool))


pair_function("content-words", meaning="content words", sites=EVERYWHERE, parsed=True)(partial(_tagged, CONTENT))
pair_function("function-words", meaning="function words", sites=EVERYWHERE, parsed=True)(partial(_tagged, FUNCTION))
for _tag, _words in WORDS.items():
    pair_function(_tag, meaning=_words, sites=EVERYWHERE, parsed=True)(partial(_tagged, frozenset({_tag})))


@pair_function("numbers", sites=EVERYWHERE)
def numbers(pairs: Pairs) -> Flags:
    """Numbers."""
    return pairs.keys_that(np.array([any(map(str.isdigit, text)) for text in pairs.key.text], dtype=bool))


@pair_function("capitals", sites=EVERYWHERE)
def capitalised(pairs: Pairs) -> Flags:
    """Words with a capital letter."""
    return pairs.keys_that(np.array([text[:1].isupper() for text in pairs.key.text], dtype=bool))
