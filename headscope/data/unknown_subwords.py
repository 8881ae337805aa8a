"""The share of a text's subwords that are unknown to the vocabulary, and the probable cause.

A text that is not split, tokenised or cased like the model's training text can be analysed, but with unknown subwords
in place of words its numbers say nothing about the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, Protocol

from headscope.data.corpus import Corpus
from headscope.data.encoded import Encoded, Encodes, encode_sources

MANY = 0.02  # larger shares give a warning
SideName = Literal["source", "target"]


class Advisor(Protocol):
    """A checkpoint, as far as it can explain unknown subwords."""

    def why_unknown(self, side: SideName) -> str:
        """The probable cause of a side's unknown subwords, and what to do."""
        ...


class Reader(Advisor, Encodes, Protocol):
    """A checkpoint that encodes text and knows what unknown subwords come from."""


@dataclass
class UnknownSubwords:
    """Numbers of subwords, without special ones, and of unknown ones among them, by side."""

    read: Counter[SideName] = field(default_factory=Counter)
    unknown: Counter[SideName] = field(default_factory=Counter)

    def add(self, side: SideName, encoded: Iterable[Encoded]) -> None:
        """Count sentences of a side."""
        for sentence in encoded:
            self.read[side] += len(sentence.ids) - sum(sentence.special)
            self.unknown[side] += sentence.unknown

    def __bool__(self) -> bool:
        return bool(self.read)

    def share(self, side: SideName) -> float:
        """The share of a side's subwords that are unknown."""
        return self.unknown[side] / self.read[side] if self.read[side] else 0.0

    def to_json(self) -> dict[str, dict[str, float]]:
        """`{"source": {"pieces": …, "unknown": …, "share": …}}`, with `target` where it was read."""
        return {
            side: {"pieces": self.read[side], "unknown": self.unknown[side], "share": round(self.share(side), 6)}
            for side in self.read
        }

    def remarks(self, reader: Advisor) -> list[str]:
        """The shares of both sides, and a warning with the likely cause for each side with more than 2 %."""
        if not self:
            return []
        shares = [f"{side} {self.share(side):.2%} of {self.read[side]:,}" for side in self.read]
        return [f"unknown subwords: {', '.join(shares)}", *self.warnings(reader)]

    def warnings(self, reader: Advisor) -> list[str]:
        """A warning with the likely cause for each side with more than 2 %."""
        return [
            f"warning: {self.share(side):.1%} of the {side}'s subwords are unknown to the vocabulary; "
            f"{reader.why_unknown(side)}"
            for side in self.read
            if self.share(side) > MANY
        ]


def count_unknown(reader: Reader, corpus: Corpus, *, limit: int, sentences: int) -> UnknownSubwords:
    """Unknown subwords in the first sentences of a corpus."""
    counts, sample = UnknownSubwords(), list(islice(corpus, sentences))
    counts.add("source", encode_sources(sample, reader, limit=limit))
    if corpus.has_target:
        counts.add("target", reader.encode([sentence.target or "" for sentence in sample], side="target", limit=limit))
    return counts
