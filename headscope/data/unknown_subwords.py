"""How many pieces of a text the vocabulary of a checkpoint does not have, and what that probably comes from.

A text that is not split, tokenised or cased as the model's training text was still runs, with unknown pieces in
place of words: its numbers are real, and say nothing about the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, Protocol

from headscope.data.corpus import Corpus
from headscope.data.encoded import Encoded

MANY = 0.02  # the share that is warned of
SideName = Literal["source", "target"]


class Advisor(Protocol):
    """Who knows where unknown pieces come from."""

    def why_unknown(self, side: SideName) -> str:
        """What unknown pieces of a side probably come from, and what to do."""
        ...


class Reader(Advisor, Protocol):
    """The part of a `Checkpoint` that reads text."""

    def encode(self, texts: Sequence[str], *, side: SideName, limit: int) -> list[Encoded]:
        """Ids of texts, at most `limit` of each."""
        ...


@dataclass
class UnknownPieces:
    """Pieces that were read, special ones left out, and how many of them were unknown, by side."""

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
        """Of the pieces of a side, those that were unknown."""
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
        return [f"unknown pieces: {', '.join(shares)}", *self.warnings(reader)]

    def warnings(self, reader: Advisor) -> list[str]:
        """What `reader` advises for each side with more than 2 %."""
        return [
            f"warning: {self.share(side):.1%} of the {side}'s pieces are unknown to the vocabulary; "
            f"{reader.why_unknown(side)}"
            for side in self.read
            if self.share(side) > MANY
        ]


def count_unknown(reader: Reader, corpus: Corpus, *, limit: int, sentences: int) -> UnknownPieces:
    """Unknown pieces of the first sentences of a corpus."""
    counts, some = UnknownPieces(), list(islice(corpus, sentences))
    counts.add("source", reader.encode([each.source for each in some], side="source", limit=limit))
    if corpus.has_target:
        counts.add("target", reader.encode([each.target or "" for each in some], side="target", limit=limit))
    return counts
