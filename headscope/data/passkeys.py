"""Texts with passkeys hidden in them that are asked for at the end (DuoAttention, Xiao et al. 2024)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headscope.data.haystack import Haystack

ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    *("eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth"),
    *("nineteenth", "twentieth"),
)
SHALLOWEST, DEEPEST = 0.05, 0.95  # shares of the text between which passkeys are hidden


@dataclass(frozen=True, kw_only=True)
class Passkeys:
    """How many passkeys of how many words are hidden, and the sentences that tell and ask for them.

    `{ordinal}` in these gives way to first, second, … twentieth: there are at most as many passkeys.
    """

    count: int
    length: int
    words: tuple[str, ...]
    needle: str
    question: str

    def hidden(self, haystack: Haystack, *, length: int, luck: random.Random) -> tuple[str, str]:
        """A text of about `length` subwords with fresh passkeys in it, and the questions with their answers."""
        keys = [" ".join(luck.choices(self.words, k=self.length)) for _ in range(self.count)]
        depths = sorted(luck.uniform(SHALLOWEST, DEEPEST) for _ in keys)
        named = list(zip(ORDINALS, keys, strict=False))
        statements = [f"{self.needle.replace('{ordinal}', name)} {key}" for name, key in named]
        questions = [f"{self.question.replace('{ordinal}', name)} {key}" for name, key in named]
        return haystack.around(list(zip(depths, statements, strict=True)), length=length), "\n".join(questions)
