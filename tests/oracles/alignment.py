"""Which positions look at the aligned word, the alignment error rate of Och & Ney (2003), and fast_align's model."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from scipy.special import digamma

from headscope.engine.base import HeadBatch
from headscope.heads import SiteLayer
from tests.oracles.trace import Term, Trace

AHEAD = {"predicted": 1, "fed": 0, "next": 2}
Links = set[tuple[int, ...]]


def words_of(pieces: Sequence[str], special: Sequence[bool]) -> list[int | None]:
    """The word of each piece, which goes on where a piece begins with ##; None for special ones."""
    words: list[int | None] = []
    word = -1
    for piece, is_special in zip(pieces, special, strict=True):
        word += not is_special and not piece.startswith("##")
        words.append(None if is_special else word)
    return words


def attended_words(
    trace: Trace, site_layer: SiteLayer, head: int, name: str, words: tuple[list[int | None], list[int | None]]
) -> Links:
    """(position, source word, target word) without positions that are about no word."""
    links: Links = set()
    keys = trace.keys(site_layer[0], False)
    for t, row in enumerate(trace.calls[site_layer].weights[head].tolist()):
        target_word = words[1][t + AHEAD[name]] if t + AHEAD[name] < len(words[1]) else None
        best = max(keys, key=lambda s: (row[s], -s))
        if target_word is not None:
            word = words[0][best]
            assert word is not None
            links.add((t, word, target_word))
    return links


def count_hits(looks: Links, links: Links) -> Term:
    """Hits and positions whose word has a link."""
    due = [look for look in looks if any(j == look[2] for _, j in links)]
    return sum(look[1:] in links for look in due), len(due)


def set_sizes(looks: Links, sure: Links, possible: Links) -> tuple[int, int, int, int]:
    """|A|, |A∩S|, |A∩P| and |S| of words that positions are about."""
    pairs = {look[1:] for look in looks}
    target_words = {look[2] for look in looks}
    return len(pairs), len(pairs & sure), len(pairs & (sure | possible)), sum(j in target_words for _, j in sure)


def write_links(path: Path, links: list[tuple[Links, Links]], *, first: int = 0) -> Path:
    lines = [
        " ".join(
            f"{i + first}{mark}{j + first}" for part, mark in zip(pair, "-?", strict=True) for i, j in sorted(part)
        )
        for pair in links
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def attend_to(heads: HeadBatch, keys: torch.Tensor) -> HeadBatch:
    """Copy of the heads with all weight at these keys [b h t]."""
    weights = torch.zeros_like(heads.weights).scatter_(-1, keys[..., None], 1.0)
    assert heads.rows is not None
    return replace(heads, rows=heads.rows._replace(weights=weights))


FROM_NULL, TENSION, ALPHA = 0.08, 4.0, 0.01
"""As fast_align has them."""
Words = list[str]


def feature(i: int, j: int, n: int, m: int) -> float:
    """Minus the distance of two places, counted from 1, from the diagonal."""
    return -abs(i / n - j / m)


def priors(j: int, n: int, m: int, tension: float) -> list[float]:
    """Of word j of m, that it comes from each of n words."""
    values = [math.exp(tension * feature(i, j, n, m)) for i in range(1, n + 1)]
    return [(1 - FROM_NULL) * value / sum(values) for value in values]


def fit_model(sentences: Sequence[tuple[Words, Words]]) -> tuple[dict[tuple[str, str], float], dict[str, float], float]:
    """Four iterations of variational EM (Dyer et al. 2013): t(own | other), t(own | null) and the tension."""
    table = {(x, y): 1e-9 for source, target in sentences for x in source for y in target}
    null, tension = {y: 1e-9 for _, target in sentences for y in target}, TENSION
    positions = [(j, len(source), len(target)) for source, target in sentences for j in range(1, len(target) + 1)]
    for iteration in range(4):
        counts, from_null, feature_sum = dict.fromkeys(table, 0.0), dict.fromkeys(null, 0.0), 0.0
        for source, target in sentences:
            n, m = len(source), len(target)
            for j, y in enumerate(target, start=1):
                scores = [prior * table[x, y] for x, prior in zip(source, priors(j, n, m, tension), strict=True)]
                total = sum(scores) + FROM_NULL * null[y]
                from_null[y] += FROM_NULL * null[y] / total
                for i, (x, score) in enumerate(zip(source, scores, strict=True), start=1):
                    counts[x, y] += score / total
                    feature_sum += score / total * feature(i, j - 1, n, m)
        for _ in range(8 if iteration else 0):
            means = 0.0
            for j, n, m in positions:
                shares = [prior / (1 - FROM_NULL) for prior in priors(j, n, m, tension)]
                means += sum(share * feature(i, j, n, m) for i, share in enumerate(shares, start=1))
            tension = min(max(tension + 20 * (feature_sum - means) / len(positions), 0.1), 14.0)
        for x in {x for x, _ in table}:
            pairs = [pair for pair in table if pair[0] == x]
            total = sum(counts[pair] for pair in pairs) + ALPHA * len(pairs)
            table |= {pair: math.exp(digamma(counts[pair] + ALPHA) - digamma(total)) for pair in pairs}
        total = sum(from_null.values()) + ALPHA * len(null)
        null = {y: math.exp(digamma(from_null[y] + ALPHA) - digamma(total)) for y in null}
    return table, null, tension


def align_words(sentence: tuple[Words, Words], table: dict[tuple[str, str], float], null: dict[str, float],
                 tension: float) -> list[int | None]:  # fmt: skip
    """The word that each own word comes from, None where that is none."""
    source, target = sentence
    choices: list[int | None] = []
    for j, y in enumerate(target, start=1):
        weights = priors(j, len(source), len(target), tension)
        scores = [prior * table[x, y] for x, prior in zip(source, weights, strict=True)]
        best = max(range(len(source)), key=lambda i: scores[i])
        choices.append(best if scores[best] > FROM_NULL * null[y] else None)
    return choices
