"""Pair functions: predicates on pairs of a query and a key, and the weight that heads put on pairs for which one holds.

The weight is compared with that of even attention, a fixed offset, and position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscope.description.sample import SampleBlocks
from headscope.description.tokens import Flags, Pairs
from headscope.heads import Site
from headscope.registry import Registry

Predicate = Callable[[Pairs], Flags]
SELF = frozenset({Site.ENCODER_SELF, Site.DECODER_SELF})


@dataclass(frozen=True)
class PairFunction:
    """A predicate with the name of its label (`looks:NAME`), the label in words, and the `sites` that it is for."""

    name: str
    summary: str
    holds: Predicate
    sites: frozenset[Site] = SELF
    needs_parse: bool = False


PAIR_FUNCTIONS: Registry[PairFunction] = Registry("pair function", package="headscope.pair_functions")


def pair_function(
    name: str, *, meaning: str = "", sites: frozenset[Site] = SELF, needs_parse: bool = False
) -> Callable[[Predicate], Predicate]:
    """Register a predicate: `Pairs` → flags [n s] of its n queries and s keys.

    `meaning` (default: the first line of its docstring) is what such keys are, in words. Special tokens and keys that
    the query does not see are masked out afterwards, whatever the predicate says.
    """

    def register(holds: Predicate) -> Predicate:
        keys = meaning or (holds.__doc__ or name).strip().splitlines()[0].rstrip(".")
        function = PairFunction(name, f"looks at {keys[0].lower()}{keys[1:]}", holds, sites, needs_parse)
        PAIR_FUNCTIONS.register(name, function, where=getattr(holds, "__module__", __name__))
        return holds

    return register


REACH = 16
"""Fixed offsets of the baseline go from −16 to 16 tokens."""


@dataclass(frozen=True)
class Masses:
    """Sums over the queries of each sentence, in the order of the blocks, for pair functions c.

    `mass` [b h c] is the weight on keys for which a function holds, `even` [b 1 c] that of even weights, and `count`
    [b 1 c] the queries that see such a key; `even` and `count` are [b h c] where rows count by head (`Block.mass`).
    `hard_…` are the same sums over hard queries: those for which the function does not hold at the best fixed `offset`
    [c]. `hard_position` [b h c] is the weight there under the description by position.
    """

    functions: Sequence[PairFunction]
    offset: Sequence[int]
    mass: Tensor
    even: Tensor
    count: Tensor
    hard_mass: Tensor
    hard_even: Tensor
    hard_position: Tensor
    hard_count: Tensor


def functions_for(site: Site, sentences: Sequence[Pairs]) -> list[PairFunction]:
    """The pair functions for a site; those that need a parse only if some sentence has one."""
    has_parse = any(pairs.key.has_parse for pairs in sentences)
    functions = [function for _, function in PAIR_FUNCTIONS if site in function.sites]
    return [function for function in functions if has_parse or not function.needs_parse]


def sum_masses(sample: SampleBlocks, functions: Sequence[PairFunction], position: Sequence[Tensor]) -> Masses:
    """The sums of all sentences; `position` has each block's probabilities [b n s h] under position alone."""
    flags = [_flags(pairs, block.visible, functions) for block, pairs in zip(sample.blocks, sample.pairs, strict=True)]
    counted = [
        (matching.any(dim=-1) & (block.mass > 0).any(dim=-1))
        for matching, block in zip(flags, sample.blocks, strict=True)
    ]  # [c b n]: queries that see a key for which the function holds
    at_offset = [_at_offsets(matching, pairs) for matching, pairs in zip(flags, sample.pairs, strict=True)]  # [o c b n]
    hits = torch.stack([part.flatten(2).sum(-1) for part in at_offset]).sum(0)  # [o c]
    distance = torch.arange(-REACH, REACH + 1).abs()[:, None]
    best = (hits * (REACH + 1) - distance).argmax(dim=0)  # the offset with most hits, of ties the smallest
    sums = []
    for block, matching, queries, hit, by_position in zip(
        sample.blocks, flags, counted, at_offset, position, strict=True
    ):
        hard = queries & ~hit[best, torch.arange(len(functions))]
        holds = matching.to(block.weights.dtype)
        even = holds.sum(-1) / block.visible.sum(-1).clamp(min=1)  # [c b n]
        mass, hard_mass = (_sum_weights(block.weights, holds, where) for where in (queries, hard))
        by_query = (even * queries, queries, even * hard, hard)
        counts = [torch.einsum("bnh,cbn->bhc", block.mass, values.to(even.dtype)) for values in by_query]
        sums.append((mass, *counts[:2], hard_mass, counts[2], _sum_weights(by_position, holds, hard), counts[3]))
    parts = (torch.cat(part) for part in zip(*sums, strict=True))
    return Masses(functions, (best - REACH).tolist(), *parts)


def _flags(sentences: Sequence[Pairs], visible: Tensor, functions: Sequence[PairFunction]) -> Tensor:
    """Whether each function holds for each pair of a block [c b n s], of visible keys that are not special."""
    holds = torch.zeros(len(functions), *visible.shape, dtype=torch.bool)
    for line, pairs in enumerate(sentences):
        n, s = len(pairs.at), len(pairs.key)
        plain = ~pairs.key.special[None]
        for number, function in enumerate(functions):
            if function.needs_parse and not pairs.key.has_parse:
                continue
            holds[number, line, :n, :s] = torch.from_numpy(np.ascontiguousarray(function.holds(pairs) & plain))
    return holds & visible


def _at_offsets(holds: Tensor, sentences: Sequence[Pairs]) -> Tensor:
    """Whether functions hold [c b n s] for each query and the key at each offset of ±`REACH`: [o c b n]."""
    c, b, n, s = holds.shape
    positions = torch.full((b, n), -REACH - s)
    for line, pairs in enumerate(sentences):
        positions[line, : len(pairs.at)] = torch.from_numpy(pairs.at)
    at_offsets = []
    for offset in range(-REACH, REACH + 1):
        keys = positions + offset
        inside = (keys >= 0) & (keys < s)
        index = keys.clamp(0, s - 1)[None, ..., None].expand(c, -1, -1, 1)
        at_offsets.append(holds.gather(-1, index)[..., 0] & inside)
    return torch.stack(at_offsets)


def _sum_weights(weights: Tensor, holds: Tensor, where: Tensor) -> Tensor:
    """The weights [b n s h] on keys where functions hold [c b n s], summed over queries `where` [c b n]: [b h c]."""
    return torch.einsum("bnsh,cbns->bhc", weights, holds * where[..., None])
