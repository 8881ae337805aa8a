"""Sampled rows of attention, some of each sentence of a corpus, and blocks of them for fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headscope.data.encoded import Batch, CountedTokens, Side, groups
from headscope.description.features import Inventory
from headscope.description.loglinear import Block, Tables
from headscope.description.tokens import Embeddings, Numbers, Pairs, TokenReader
from headscope.heads import SITES, Site

MAX_WEIGHTS = 2**26
"""Weights that are kept of a site, all layers together: a quarter of a gigabyte, and minutes of fitting."""
BLOCK_WEIGHTS = 2**21  # weights of one block
RESTING_WEIGHT, RESTING_RATIO = 0.5, 2.0  # see `SiteSample.resting_share`


class SampledRows(NamedTuple):
    """Sampled rows of one sentence at one layer: weights [n s h] and visible keys [n s]."""

    weights: Tensor
    visible: Tensor


class ChosenRows(NamedTuple):
    """The sampled queries of one sentence: its number in the corpus, its row in the batch, their positions [n]."""

    number: int
    row: int
    positions: Tensor


@dataclass
class SiteSample:
    """The sample of one site: tokens of both sides of every sentence, sampled positions, rows by layer."""

    tokens: dict[int, Pairs] = field(default_factory=dict)
    rows: dict[int, dict[int, SampledRows]] = field(default_factory=dict)
    n_skipped: int = 0

    def add(self, layer: int, number: int, rows: SampledRows) -> None:
        """Add sampled rows of one sentence at one layer; a long sentence comes block by block."""
        earlier = self.rows.setdefault(layer, {}).get(number)
        if earlier is not None:
            rows = SampledRows(torch.cat([earlier.weights, rows.weights]), torch.cat([earlier.visible, rows.visible]))
        self.rows[layer][number] = rows

    def merge(self, other: SiteSample) -> None:
        """Take in the sample of other sentences."""
        self.tokens |= other.tokens
        for layer, rows in other.rows.items():
            self.rows.setdefault(layer, {}).update(rows)
        self.n_skipped += other.n_skipped

    def resting_share(self) -> float:
        """The share of heads that put half of their weight, and twice the even weight, on first and special tokens."""
        share = []
        for rows in self.rows.values():
            weight, even, count = torch.zeros(()), torch.zeros(()), 0
            for number, (weights, visible) in rows.items():
                key = self.tokens[number].key
                sinks = torch.from_numpy(key.special | (np.arange(len(key)) == 0))
                weight = weight + weights[:, sinks].sum(dim=(0, 1))  # [h]
                even = even + (visible[:, sinks].sum(dim=1) / visible.sum(dim=1).clamp(min=1)).sum()
                count += len(weights)
            share.append((weight >= RESTING_WEIGHT * count) & (weight >= RESTING_RATIO * even))
        return float(torch.cat(share).float().mean()) if share else 0.0

    def layers_by_view(self) -> list[list[int]]:
        """Layers in groups whose queries see the same keys."""
        layers_by_view: dict[tuple[Any, ...], list[int]] = {}
        for layer, rows in sorted(self.rows.items()):
            view = ((number, part.visible.shape, part.visible.numpy().tobytes()) for number, part in rows.items())
            layers_by_view.setdefault(tuple(sorted(view)), []).append(layer)
        return list(layers_by_view.values())


@dataclass
class Sampler:
    """Chooses `rows` queries of a sentence, fewer of a long one, independent of how sentences are batched.

    A sentence keeps at most `per_sentence` weights a head. `readers` are those of the queries' and the keys' side.
    """

    readers: tuple[TokenReader, TokenReader]
    seed: int
    rows: int
    per_sentence: int
    token_filter: CountedTokens

    def choose(self, batch: Batch, site: Site, sides: tuple[Side, Side], sample: SiteSample) -> list[ChosenRows]:
        """Choose queries of every sentence of a batch on the CPU, and put the sentences' tokens into the sample."""
        choices = []
        for row, number in enumerate(batch.indices.tolist()):
            positions = self._positions(sides, row, (number, SITES.index(site)))
            if positions is None:
                sample.n_skipped += 1
            elif len(positions):
                query = self.readers[0].tokens(sides[0], row)
                key = query if sides[0] is sides[1] else self.readers[1].tokens(sides[1], row)
                rank = sides[0].real[row].cumsum(0) - 1
                sample.tokens[number] = Pairs(query, key, rank[positions].numpy())
                choices.append(ChosenRows(number, row, positions))
        return choices

    def _positions(self, sides: Sequence[Side], row: int, draw: tuple[int, int]) -> Tensor | None:
        """Sorted positions [n]; None for a sentence whose rows are too long to keep any."""
        queries, keys = self.token_filter.queries_of(sides[0])[row], self.token_filter.keys_of(sides[1])[row]
        positions = queries.nonzero()[:, 0]
        if not len(positions) or not keys.any():
            return positions[:0]
        count = min(self.rows, len(positions), self.per_sentence // int(sides[1].real[row].sum()))
        if not count:
            return None
        order = np.random.default_rng([self.seed, *draw]).permutation(len(positions))[:count]
        return positions[torch.from_numpy(np.sort(order))]


@dataclass(frozen=True)
class SampleBlocks:
    """A sample in blocks, at `layers` (with the slice of each one's heads) that see the same keys.

    `pairs` has the tokens of each block's sentences. `tables` are static embeddings of all query tokens and of all key
    tokens, `ids` the token of each row.
    """

    blocks: list[Block]
    pairs: list[list[Pairs]]
    tables: Tables
    ids: tuple[Numbers, Numbers]
    layers: list[tuple[int, slice]]
    inventory: Inventory

    @property
    def row_sums(self) -> tuple[Tensor, Tensor]:
        """The total mass of each sentence's rows [b h], and their number [b h]."""
        weight_sums = torch.cat([block.mass.sum(dim=1).expand(-1, self.heads) for block in self.blocks])
        rows = torch.cat([block.visible.any(dim=-1).sum(dim=1) for block in self.blocks])
        return weight_sums, rows[:, None].to(weight_sums.dtype).expand_as(weight_sums)

    @property
    def heads(self) -> int:
        """All heads of these layers."""
        return int(self.layers[-1][1].stop)


def make_blocks(
    sample: SiteSample, layers: Sequence[int], embeddings: tuple[Embeddings, Embeddings], *, exclude_sinks: bool = False
) -> SampleBlocks:
    """Put a sample into blocks of sentences of about the same length, in an order that does not depend on batches.

    With `exclude_sinks` no query sees first or special tokens: a row's mass is its weight on the other keys.
    """
    rows = [sample.rows[layer] for layer in layers]
    numbers = sorted(rows[0], key=lambda number: (len(sample.tokens[number].key), number))
    sentences = [sample.tokens[number] for number in numbers]
    inventory = Inventory.of([(sentence.query, sentence.key) for sentence in sentences])
    sides = zip(*((sentence.query.ids[sentence.at], sentence.key.ids) for sentence in sentences), strict=True)
    ids = tuple(np.unique(np.concatenate(parts)) for parts in sides)
    counts = [of_layer[numbers[0]].weights.shape[-1] for of_layer in rows]
    ends = list(accumulate(counts))
    heads = [(layer, slice(end - count, end)) for layer, count, end in zip(layers, counts, ends, strict=True)]
    parts = list(
        groups(numbers, lambda n: (len(sample.tokens[n].at), len(sample.tokens[n].key), ends[-1]), BLOCK_WEIGHTS)
    )
    blocks = [_block(part, sample.tokens, rows, inventory, (ids[0], ids[1])) for part in parts]
    pairs = [[sample.tokens[number] for number in part] for part in parts]
    if exclude_sinks:
        blocks = [*map(_without_sinks, blocks, pairs)]
    return SampleBlocks(
        blocks, pairs, (embeddings[0](ids[0]), embeddings[1](ids[1])), (ids[0], ids[1]), heads, inventory
    )


def _block(
    numbers: Sequence[int],
    tokens: dict[int, Pairs],
    rows: Sequence[dict[int, SampledRows]],
    inventory: Inventory,
    ids: tuple[Numbers, Numbers],
) -> Block:
    b, n, s = len(numbers), max(len(tokens[k].at) for k in numbers), max(len(tokens[k].key) for k in numbers)
    weights = torch.zeros(b, n, s, sum(of_layer[numbers[0]].weights.shape[-1] for of_layer in rows))
    visible, row_weights = torch.zeros(b, n, s, dtype=torch.bool), torch.zeros(b, n, 1)
    features = np.zeros((len(inventory.sizes), b, n, s), dtype=np.int64)
    queries, keys = np.zeros((b, n), dtype=np.int64), np.zeros((b, s), dtype=np.int64)
    for line, number in enumerate(numbers):
        pairs, layer_rows = tokens[number], [of_layer[number] for of_layer in rows]
        q, k = len(pairs.at), len(pairs.key)
        weights[line, :q, :k] = torch.cat([part.weights for part in layer_rows], dim=-1)
        visible[line, :q, :k], row_weights[line, :q] = layer_rows[0].visible, 1.0
        features[:, line, :q, :k] = inventory.features(pairs)
        queries[line, :q] = np.searchsorted(ids[0], pairs.query.ids[pairs.at])
        keys[line, :k] = np.searchsorted(ids[1], pairs.key.ids)
    weights = weights / weights.sum(dim=2, keepdim=True).clamp(min=1e-12)  # those of sinks without a token apart
    categories, query_rows, key_rows = (torch.from_numpy(part) for part in (features, queries, keys))
    return Block(weights, visible, categories, query_rows, key_rows, row_weights, torch.tensor(numbers))


def _without_sinks(block: Block, sentences: Sequence[Pairs]) -> Block:
    is_no_sink = torch.zeros(len(sentences), block.visible.shape[-1], dtype=torch.bool)  # [b s]
    for line, pairs in enumerate(sentences):
        is_no_sink[line, 1 : len(pairs.key)] = torch.from_numpy(~pairs.key.special[1:])
    weights = block.weights * is_no_sink[:, None, :, None]
    row_weights = weights.sum(dim=2) * (block.mass > 0)  # [b n h]
    return replace(block, weights=weights, visible=block.visible & is_no_sink[:, None], mass=row_weights)
