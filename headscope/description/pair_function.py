"""Pair functions: predicates that say of which pairs of a query and a key something holds; and what heads do with them.

How much weight a head puts on the keys of each is held beside what would put it there anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscope.description.sample import Laid
from headscope.description.tokens import Flags, Pairs
from headscope.heads import Site
from headscope.registry import Registry

Predicate = Callable[[Pairs], Flags]
SELF = frozenset({Site.ENCODER_SELF, Site.DECODER_SELF})


@dataclass(frozen=True)
class PairFunction:
    """A predicate with the name that labels have (`looks:NAME`), what such a head does in words, and its `sites`."""

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

    What such keys are, in words, is the first line of its docstring, or `meaning`. Nothing is said of special tokens,
    nor of keys that a query does not see: these are left out for all of them.
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
    """Sums of every sentence, in the order of the blocks, of pair functions c.

    `mass` [b h c] is the weight on keys of which a function holds, `even` [b 1 c] that of even weights, of `count`
    [b 1 c] queries that see such a key; [b h c] where queries count by the head (`Block.mass`). The parts with
    `hard` are those at queries where the key at the best fixed `offset` [c] is none of them; there `hard_position`
    [b h c] is what the description by position puts there.
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
    """The pair functions that mean something at a site, with the tokens that there are."""
    has_parse = any(pairs.key.has_parse for pairs in sentences)
    functions = [function for _, function in PAIR_FUNCTIONS if site in function.sites]
    return [function for function in functions if has_parse or not function.needs_parse]


def masses(stack: Laid, functions: Sequence[PairFunction], position: Sequence[Tensor]) -> Masses:
    """Of all sentences; `position` [b n s h] are the probabilities of every block under position alone."""
    flags = [_flags(pairs, block.visible, functions) for block, pairs in zip(stack.blocks, stack.pairs, strict=True)]
    due = [
        (matching.any(dim=-1) & (block.mass > 0).any(dim=-1))
        for matching, block in zip(flags, stack.blocks, strict=True)
    ]  # [c b n]
    right = [_at_offsets(matching, pairs) for matching, pairs in zip(flags, stack.pairs, strict=True)]  # [o c b n]
    hits = torch.stack([part.flatten(2).sum(-1) for part in right]).sum(0)  # [o c]
    nearest = torch.arange(-REACH, REACH + 1).abs()[:, None]
    best = (hits * (REACH + 1) - nearest).argmax(dim=0)  # the most hits, the nearest of those that tie
    sums = []
    for block, matching, dues, ok, by_position in zip(stack.blocks, flags, due, right, position, strict=True):
        hard = dues & ~ok[best, torch.arange(len(functions))]
        holds = matching.to(block.weights.dtype)
        even = holds.sum(-1) / block.visible.sum(-1).clamp(min=1)  # [c b n]
        mass, hard_mass = (_on(block.weights, holds, where) for where in (dues, hard))
        by_query = (even * dues, dues, even * hard, hard)
        counts = [torch.einsum("bnh,cbn->bhc", block.mass, values.to(even.dtype)) for values in by_query]
        sums.append((mass, *counts[:2], hard_mass, counts[2], _on(by_position, holds, hard), counts[3]))
    parts = (torch.cat(part) for part in zip(*sums, strict=True))
    return Masses(functions, (best - REACH).tolist(), *parts)


def _flags(sentences: Sequence[Pairs], visible: Tensor, functions: Sequence[PairFunction]) -> Tensor:
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
    c, b, n, s = holds.shape
    at = torch.full((b, n), -REACH - s)
    for line, pairs in enumerate(sentences):
        at[line, : len(pairs.at)] = torch.from_numpy(pairs.at)
    right = []
    for offset in range(-REACH, REACH + 1):
        place = at + offset
        inside = (place >= 0) & (place < s)
        index = place.clamp(0, s - 1)[None, ..., None].expand(c, -1, -1, 1)
        right.append(holds.gather(-1, index)[..., 0] & inside)
    return torch.stack(right)


def _on(weights: Tensor, holds: Tensor, where: Tensor) -> Tensor:
    """Σ over rows of `where` [c b n] of the weights [b n s h] on keys of which functions hold [c b n s]: [b h c]."""
    return torch.einsum("bnsh,cbns->bhc", weights, holds * where[..., None])
