"""A pair function: queries that end with a vowel, and keys that begin with one."""

from __future__ import annotations

import numpy as np

from headscope.description.pair_function import pair_function
from headscope.description.tokens import Flags, Pairs


@pair_function("vowels")
def vowels(pairs: Pairs) -> Flags:
    """A vowel after a vowel."""
    ends = np.array([text[-1:].lower() in set("aeiou") for text in pairs.query.text[pairs.at]])
    begins = np.array([text[:1].lower() in set("aeiou") for text in pairs.key.text])
    flags: Flags = pairs.keys_that(begins) & ends[:, None]
    return flags
