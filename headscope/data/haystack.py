"""A text with sentences or passkeys hidden in it, which are asked for at the end (DuoAttention, Xiao et al. 2024)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from headscope.data.corpus import Corpus
from headscope.data.encoded import Encoder
from headscope.errors import DataError

BATCH = 256  # sentences that are encoded at a time


@dataclass(frozen=True)
class Haystack:
    """Sentences in their order, with their numbers of subwords; the corpus over again where it is too short."""

    sentences: tuple[str, ...]
    lengths: tuple[int, ...]

    @classmethod
    def read(cls, corpus: Corpus, encoder: Encoder, *, length: int) -> Haystack:
        """The first sentences of a corpus that have `length` subwords together."""
        sentences: list[str] = []
        lengths: list[int] = []
        lines = iter(corpus)
        while sum(lengths) < length and (texts := [sentence.source for sentence in islice(lines, BATCH)]):
            sentences += texts
            encodings = encoder.encode(texts, side="source", limit=10**9)
            lengths += [sum(not special for special in encoding.special) for encoding in encodings]
        if not sum(lengths):
            raise DataError(f"{corpus.name} has no text to hide a needle in")
        copies = -(-length // sum(lengths))
        return cls(tuple(sentences) * copies, tuple(lengths) * copies)

    def around(self, needles: Sequence[tuple[float, str]], *, length: int) -> str:
        """Sentences of at most `length` subwords, a line each, with needles after those shares (0 … 1) of them."""
        ends = list(accumulate(self.lengths))
        count = sum(end <= length for end in ends)
        lines: list[str] = []
        position = 0
        for depth, needle in sorted(needles, key=lambda pair: pair[0]):
            before = sum(end <= depth * (ends[count - 1] if count else 0) for end in ends[:count])
            lines += [*self.sentences[position:before], needle]
            position = max(position, before)
        return "\n".join([*lines, *self.sentences[position:count]])


def prompt_ids(encoder: Encoder, text: str, *, special: bool = True) -> list[int]:
    """Ids of a text that goes on: without special ones at its end, and with `special` False without any."""
    (sentence,) = encoder.encode([text], side="source", limit=10**9)
    ids, marks = list(sentence.ids), list(sentence.special)
    while marks and marks[-1]:
        ids.pop(), marks.pop()
    return ids if special else [number for number, mark in zip(ids, marks, strict=True) if not mark]


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

    def hidden(self, haystack: Haystack, *, length: int, generator: random.Random) -> tuple[str, str]:
        """A text of about `length` subwords with fresh passkeys in it, and the questions with their answers."""
        keys = [" ".join(generator.choices(self.words, k=self.length)) for _ in range(self.count)]
        depths = sorted(generator.uniform(SHALLOWEST, DEEPEST) for _ in keys)
        key_pairs = list(zip(ORDINALS, keys, strict=False))
        statements = [f"{self.needle.replace('{ordinal}', name)} {key}" for name, key in key_pairs]
        questions = [f"{self.question.replace('{ordinal}', name)} {key}" for name, key in key_pairs]
        return haystack.around(list(zip(depths, statements, strict=True)), length=length), "\n".join(questions)
