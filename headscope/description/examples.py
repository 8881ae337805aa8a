"""Examples of what heads look at: their sharpest queries, and pairs of tokens with high scores or weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headscope.description.loglinear import Tables
from headscope.description.sample import SampleBlocks
from headscope.description.tokens import Numbers, TokenReader

MAX_EXAMPLES, WINDOW = 5, 24  # examples of a head, tokens that are shown around a position
MIN_COUNT, MIN_WEIGHT = 5, 0.1  # rows and mean weight of a surprising pair
MIN_SEEN = 2  # rows of a pair that is listed by its lexical score
MIN_VISIBLE_KEYS = 5
"""Keys that a query must see to count as sharp: with fewer keys every head is sharp."""


class Sharpest(NamedTuple):
    """The sharpest query of every sentence of a batch and head: weight, keys seen, positions of query and key [4 b h].

    It is the query whose largest weight exceeds an even weight by the largest factor. Without a query that sees
    several keys the weight is −1. `numbers` are those of the sentences, `queries` the four values.
    """

    numbers: list[int]
    queries: Tensor

    @classmethod
    def of(
        cls, numbers: list[int], maximum: Tensor, key: Tensor, visible: Tensor, queries: Tensor, first: int
    ) -> Sharpest:
        """The sharpest queries, from the largest weights [b h t] on counted keys and the positions of these [b h t].

        `visible` [b t] is the number of counted keys that a query sees; `queries` [b t] mark counted queries, which
        begin at position `first`.
        """
        seen_keys = visible[:, None].expand_as(maximum)
        too_few = ~queries[:, None] | (seen_keys < MIN_VISIBLE_KEYS)
        query = (maximum * seen_keys).masked_fill(too_few, -1.0).argmax(dim=-1, keepdim=True)  # [b h 1]
        best = (maximum.masked_fill(too_few, -1.0), seen_keys, key)
        weight, n_keys, best_key = (part.gather(-1, query)[..., 0] for part in best)
        parts = (weight, n_keys, query[..., 0] + first, best_key)
        return cls(numbers, torch.stack([part.float() for part in parts]))  # in float32 rounding errors become ties


class Entry(NamedTuple):
    """An example: a sentence's number, positions of query and key, and keys seen; the least `minus_ratio` is the best.

    The ratio is that of the weight to an even weight.
    """

    minus_ratio: float
    sentence: int
    query: int
    key: int
    n_keys: int


@dataclass
class Examples:
    """The sharpest queries of each head of a site, one a sentence, and the ids of the sentences that they are in."""

    best: dict[tuple[int, int], list[Entry]] = field(default_factory=dict)
    ids: dict[int, tuple[Numbers, Numbers]] = field(default_factory=dict)

    def add(self, layer: int, sharpest: Sharpest) -> None:
        """Add the examples of a batch, from the CPU."""
        weight, n_keys, query, key = sharpest.queries.double().numpy()
        minus_ratio = -weight * n_keys
        for head in range(weight.shape[1]):
            best = self.best.setdefault((layer, head), [])
            threshold = best[-1].minus_ratio if len(best) == MAX_EXAMPLES else 0.0
            for row in np.flatnonzero(minus_ratio[:, head] <= threshold):
                if weight[row, head] > 0:
                    numbers = (int(part[row, head]) for part in (query, key, n_keys))
                    best.append(Entry(float(minus_ratio[row, head]), sharpest.numbers[row], *numbers))
            self.best[layer, head] = _leading(best)

    def forget(self) -> None:
        """Drop the ids of sentences without an example."""
        example_numbers = {entry.sentence for best in self.best.values() for entry in best}
        self.ids = {number: sides for number, sides in self.ids.items() if number in example_numbers}

    def merge(self, other: Examples) -> None:
        """Add the examples of other sentences."""
        for at, entries in other.best.items():
            self.best[at] = _leading([*self.best.get(at, []), *entries])
        self.ids |= other.ids
        self.forget()

    def rows(self, readers: tuple[TokenReader, TokenReader]) -> list[dict[str, Any]]:
        """Lines of examples.csv; `readers` decode queries and keys."""
        query_reader, key_reader = readers
        lines: list[dict[str, Any]] = []
        for (layer, head), best in sorted(self.best.items()):
            for rank, (minus_ratio, number, query, key, n_keys) in enumerate(best, start=1):
                queries, keys = self.ids[number]
                lines.append(
                    {
                        "layer": layer,
                        "head": head,
                        "rank": rank,
                        "sentence": number,
                        "weight": -minus_ratio / n_keys,
                        "keys_seen": n_keys,
                        "query": query_reader.label(int(queries[query])),
                        "key": key_reader.label(int(keys[key])),
                        "query_position": query,
                        "key_position": key,
                        "query_text": window(query_reader, queries, query),
                        "key_text": window(key_reader, keys, key),
                    }
                )
        return lines


def _leading(entries: list[Entry]) -> list[Entry]:
    """The best entries, at most one a sentence."""
    of_sentence: dict[int, Entry] = {}
    for entry in sorted(entries):
        of_sentence.setdefault(entry.sentence, entry)
    return sorted(of_sentence.values())[:MAX_EXAMPLES]


def window(reader: TokenReader, ids: Numbers, at: int) -> str:
    """The tokens around a position, with the one at the position in brackets."""
    start = max(0, at - WINDOW // 2)
    window_ids = ids[start : start + WINDOW].tolist()
    words = [reader.subword(number) for number in window_ids]
    words[at - start] = f"[{words[at - start]}]"
    text = " ".join(words)
    return ("… " if start else "") + text + (" …" if start + WINDOW < len(ids) else "")


@dataclass(frozen=True)
class TokenPairs:
    """Sums over all sampled rows by pair of tokens u: weights [u h], weights expected from position [u h], counts [u].

    `whole` [u h] is the sum of the rows' mass (`Block.mass`), of which weights are shares.
    """

    query: Numbers
    key: Numbers
    weight: Tensor
    expected: Tensor
    count: Tensor
    whole: Tensor


def token_pairs(sample: SampleBlocks, position: Sequence[Tensor], heads: slice) -> TokenPairs:
    """The sums of every pair of tokens that are not special and that a sampled query sees, for a slice of heads."""
    sides = zip(*((pairs.query, pairs.key) for sentences in sample.pairs for pairs in sentences), strict=True)
    special = [np.concatenate([tokens.ids[tokens.special] for tokens in side]) for side in sides]
    plain = [torch.from_numpy(~np.isin(ids, odd)) for ids, odd in zip(sample.ids, special, strict=True)]
    stride = len(sample.ids[1])
    numbers = [(block.queries[:, :, None] * stride + block.keys[:, None]) for block in sample.blocks]
    usable = [
        block.visible & plain[1][block.keys][:, None] & plain[0][block.queries][..., None] for block in sample.blocks
    ]
    flat = torch.cat([number[where] for number, where in zip(numbers, usable, strict=True)])
    unique, index = flat.unique(return_inverse=True)
    count = torch.bincount(index, minlength=len(unique))
    sums = []
    row_weights = [block.mass[:, :, None].expand_as(block.weights) for block in sample.blocks]
    for parts in ([block.weights for block in sample.blocks], position, row_weights):
        values = torch.cat([part[..., heads][where] for part, where in zip(parts, usable, strict=True)])
        sums.append(torch.zeros(len(unique), values.shape[1]).index_add_(0, index, values))
    pairs = unique.numpy()
    return TokenPairs(pairs // stride, pairs % stride, sums[0], sums[1], count, sums[2])


def leading_pairs(
    sample: SampleBlocks,
    position: Sequence[Tensor],
    lexical: Sequence[Tables],
    readers: tuple[TokenReader, TokenReader],
) -> list[dict[str, Any]]:
    """Lines of token_pairs.csv: for every head the pairs with the highest lexical scores, and surprising pairs.

    A score is averaged over the descriptions of both halves, minus the query's mean over all keys. The weight of a
    surprising pair exceeds that expected from position by the largest factor.
    """
    lines: list[dict[str, Any]] = []
    for layer, heads in sample.layers:
        pairs = token_pairs(sample, position, heads)
        mean = pairs.weight / pairs.whole.clamp(min=1e-6)
        rows = pairs.whole * (
            pairs.count.sum() / pairs.whole.double().sum(dim=0).clamp(min=1e-6)
        )  # [u h]: the rows' mass, scaled so that it is the number of rows on average
        lift = torch.where(
            (rows >= MIN_COUNT) & (mean >= MIN_WEIGHT), pairs.weight / pairs.expected.clamp(min=1e-6), 0.0
        )
        kinds = {"surprising": lift}
        if lexical:
            score = torch.stack([_scores(pairs, tables, heads) for tables in lexical]).mean(dim=0)
            is_frequent = (rows >= MIN_SEEN) & (mean >= MIN_WEIGHT)
            kinds["lexical"] = torch.where(is_frequent, score, 0.0)
        for head in range(lift.shape[1]):
            for kind, values in sorted(kinds.items()):
                lines += _lines(sample, pairs, values[:, head], readers, {"layer": layer, "head": head, "kind": kind})
    return lines


def _scores(pairs: TokenPairs, tables: Tables, heads: slice) -> Tensor:
    """(E[q] U)·(E[k] V) of pairs [u h], less its mean over keys."""
    queries, keys = tables[0][:, heads], tables[1][:, heads]
    keys = keys - keys.mean(dim=0)
    return (queries[torch.from_numpy(pairs.query)] * keys[torch.from_numpy(pairs.key)]).sum(-1)


def _lines(
    sample: SampleBlocks,
    pairs: TokenPairs,
    values: Tensor,
    readers: tuple[TokenReader, TokenReader],
    about: dict[str, Any],
) -> list[dict[str, Any]]:
    order, head = np.argsort(-values.numpy(), kind="stable")[:MAX_EXAMPLES], about["head"]
    return [
        {
            **about,
            "rank": rank,
            "query": readers[0].label(int(sample.ids[0][pairs.query[at]])),
            "key": readers[1].label(int(sample.ids[1][pairs.key[at]])),
            "score": float(values[at]),
            "weight": float(pairs.weight[at, head] / pairs.whole[at, head]),
            "expected": float(pairs.expected[at, head] / pairs.whole[at, head]),
            "count": int(pairs.count[at]),
        }
        for rank, at in enumerate(order.tolist(), start=1)
        if values[at] > 0
    ]
