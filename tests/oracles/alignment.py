"""Which positions look at the aligned word, and the alignment error rate of Och & Ney (2003), by sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from headscope.engine.base import HeadBatch
from tests.oracles.seen import Place, Seen, Term

AHEAD = {"predicted": 1, "fed": 0, "next": 2}
Links = set[tuple[int, ...]]


def words_of(pieces: Sequence[str], special: Sequence[bool]) -> list[int | None]:
    """The word of each piece, which goes on where a piece begins with ##; None for special ones."""
    words: list[int | None] = []
    word = -1
    for piece, skipped in zip(pieces, special, strict=True):
        word += not skipped and not piece.startswith("##")
        words.append(None if skipped else word)
    return words


def looks(seen: Seen, place: Place, head: int, name: str, words: tuple[list[int | None], list[int | None]]) -> Links:
    """(position, source word, target word) without positions that are about no word."""
    found: Links = set()
    keys = seen.keys(place[0], False)
    for t, row in enumerate(seen.calls[place].weights[head].tolist()):
        about = words[1][t + AHEAD[name]] if t + AHEAD[name] < len(words[1]) else None
        best = max(keys, key=lambda s: (row[s], -s))
        if about is not None:
            word = words[0][best]
            assert word is not None
            found.add((t, word, about))
    return found


def share(found: Links, links: Links) -> Term:
    """Hits and positions whose word has a link."""
    due = [look for look in found if any(j == look[2] for _, j in links)]
    return sum(look[1:] in links for look in due), len(due)


def sizes(found: Links, sure: Links, possible: Links) -> tuple[int, int, int, int]:
    """|A|, |A∩S|, |A∩P| and |S| of words that positions are about."""
    pairs = {look[1:] for look in found}
    about = {look[2] for look in found}
    return len(pairs), len(pairs & sure), len(pairs & (sure | possible)), sum(j in about for _, j in sure)


def written(path: Path, links: list[tuple[Links, Links]], *, first: int = 0) -> Path:
    lines = [
        " ".join(
            f"{i + first}{mark}{j + first}" for part, mark in zip(both, "-?", strict=True) for i, j in sorted(part)
        )
        for both in links
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def looking(heads: HeadBatch, at: torch.Tensor) -> HeadBatch:
    """The same heads with all weight at these keys [b h t]."""
    weights = torch.zeros_like(heads.weights).scatter_(-1, at[..., None], 1.0)
    assert heads.rows is not None
    return replace(heads, rows=heads.rows._replace(weights=weights))
