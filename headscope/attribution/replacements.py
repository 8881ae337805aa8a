"""What a head that is taken out gives in place of its context: nothing, its mean, or what it gave elsewhere.

Every choice looks at one sentence only, so a batch of N sentences gives what N batches of one give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headscope.attribution.gatevector import Contexts
from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.heads import Site


def mean_context(context: Tensor, real: Tensor) -> Tensor:
    """Mean over the sentence's own real positions [b t], special ones too: [b h 1 k] from contexts [b h t k]."""
    weights = real.to(context.dtype)
    total = torch.einsum("bhtk,bt->bhk", context, weights)
    return (total / weights.sum(dim=-1)[:, None, None])[:, :, None]


def other_context(context: Tensor, real: Tensor, shifts: Tensor) -> Tensor:
    """Contexts [b h t k] in which each real position has what the head gave `shifts` [b] real positions further on.

    Counted in a circle; positions that are not real get some real position's.
    """
    lengths = real.sum(dim=-1, keepdim=True)  # [b 1]
    order = (~real).to(torch.uint8).argsort(dim=-1, stable=True)  # real positions first
    rank = (real.cumsum(dim=-1) - 1).clamp(min=0)
    donor = order.gather(1, (rank + shifts[:, None]) % lengths.clamp(min=1))  # [b t]
    return context.gather(2, donor[:, None, :, None].expand_as(context))


def random_shifts(indices: Tensor, lengths: Tensor, *, seed: int) -> Tensor:
    """For each sentence number a shift from 1 to its length minus 1 (0 where there is one position): [b].

    A hash of number and seed (the finaliser of MurmurHash3), so that a sentence's shift is its own.
    """
    mask = 0xFFFFFFFF
    mixed = (indices * 0x9E3779B1 + seed * 0x85EBCA77 + 1) & mask
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & mask
    mixed = mixed ^ (mixed >> 16)
    return torch.where(lengths > 1, 1 + mixed.to(lengths.device) % (lengths - 1).clamp(min=1), 0)


def nothing(contexts: Contexts, batch: Batch, seed: int) -> Contexts:
    """A closed head gives nothing: its gate is zero (Voita et al. 2019; Michel et al. 2019)."""
    return {}


def means(contexts: Contexts, batch: Batch, seed: int) -> Contexts:
    """A closed head gives the mean of its contexts over the sentence, the same at every position.

    Wang et al. (2022) take the mean over a data set; here it is over the sentence's own positions.
    """
    return {where: [mean_context(each, _real(where, batch)) for each in calls] for where, calls in contexts.items()}


def others(contexts: Contexts, batch: Batch, seed: int) -> Contexts:
    """A closed head gives at each position what it gave at another position of the same sentence.

    All heads of a sentence are shifted alike, by a number of positions that follows from the seed and the
    sentence's number. A sentence of one position stays as it is.
    """
    shifts: dict[int, Tensor] = {}
    found = {}
    for where, calls in contexts.items():
        real = _real(where, batch)
        if id(real) not in shifts:
            shifts[id(real)] = random_shifts(batch.indices, real.sum(dim=-1), seed=seed)
        found[where] = [other_context(each, real, shifts[id(real)]) for each in calls]
    return found


REPLACEMENTS: Mapping[str, Callable[[Contexts, Batch, int], Contexts]] = {
    "zero": nothing,
    "mean": means,
    "resample": others,
}


def replacement(name: str) -> Callable[[Contexts, Batch, int], Contexts]:
    """A way to take heads out by its name; ConfigError for an unknown one."""
    if name not in REPLACEMENTS:
        raise ConfigError(f"--ablate-with {name!r} is not known; choose {', '.join(REPLACEMENTS)}")
    return REPLACEMENTS[name]


def _real(where: tuple[Site, int], batch: Batch) -> Tensor:
    """Which query positions of a site are no padding [b t]."""
    text = batch.source if batch.target is None else batch.target
    return (batch.source if where[0] is Site.ENCODER_SELF else text).real
