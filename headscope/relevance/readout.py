"""The relevance of the heads of one (site, layer), read at the heads' contexts.

The relevance of a head is the sum of the relevances of its neurons before the output projection (Voita et
al. 2019, appendix A; Achtibat et al. 2024). It is normalised over the heads of the layer for each explained
quantity, and averaged over these (`Relevance.normalized`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Relevance:
    """One (site, layer). `p` is the axis of explained positions, of size 1 where their sum was explained.

    `raw` [p b h]: signed sums over query positions and k. `absolute` [p b h]: sums of the absolute values of
    the neurons. `by_query` [p b h t]: signed sums over k. `value_share` and `qk_share` [p b h]: how much of
    `raw` goes on through the values, and through queries and keys, in the unit of `raw`; None where a rule
    set does not separate them. They need not add up to `raw`: the softmax absorbs some (Achtibat et al. 2024), and
    plain gradients count some twice.
    """

    raw: Tensor
    absolute: Tensor
    by_query: Tensor
    value_share: Tensor | None = None
    qk_share: Tensor | None = None

    def normalized(self) -> Tensor:
        """|raw| over its sum over the heads of the layer [p b h]; see `over_heads`."""
        return over_heads(self.raw)


def over_heads(raw: Tensor) -> Tensor:
    """Absolute values of raw [… h], normalised to sum to one over heads; NaN where all are zero.

    The paper divides signed sums by their total, which is the same where relevances are positive (the alpha-beta rule
    of Voita et al.). In the other rule sets raw sums can cancel, so that the total passes near zero; absolute values
    say how much a head matters and not in which direction.
    """
    size = raw.abs()
    return size / size.sum(dim=-1, keepdim=True)


def join_relevance(parts: list[Relevance]) -> Relevance:
    """Relevances of different explained positions, concatenated along `p`."""

    def joined(name: str) -> Any:
        tensors = [getattr(part, name) for part in parts]
        return None if any(tensor is None for tensor in tensors) else torch.cat(tensors)

    return Relevance(*(joined(field.name) for field in fields(Relevance)))
