"""What a rule set says about the heads of one (site, layer), read at the heads' contexts.

The relevance of a head is the sum of the relevances of its neurons before the output projection (Voita et
al. 2019, appendix A; Achtibat et al. 2024). It is normalised over the heads of the layer for each explained
quantity, and averaged over these (`Relevance.normalized`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Relevance:
    """One (site, layer). `p` counts explained positions; it is 1 where their sum is what was explained.

    `raw` [p b h]: signed sums over query positions and k. `absolute` [p b h]: sums of the absolute values of
    the neurons. `by_query` [p b h t]: signed sums over k. `value_share` and `qk_share` [p b h]: how much of
    `raw` goes on through the values, and through queries and keys, in the unit of `raw`; None where a rule
    set does not tell them apart. They need not add up to `raw`: what the softmax absorbs (Achtibat et al.
    2024) and what plain gradients count twice is missing or too much.
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
    """Absolute values of raw [… h], normalised to sum to one over heads; NaN where all heads have none.

    The paper divides signed sums by their total. Where relevances are positive (the alpha-beta rule of
    Voita et al.) that is the same. In the other rule sets raw sums can cancel, so that the total passes near
    zero; absolute values are normalised there, which says how much a head matters and not in which direction.
    """
    size = raw.abs()
    return size / size.sum(dim=-1, keepdim=True)


def join_relevance(parts: list[Relevance]) -> Relevance:
    """Relevances of different explained positions, one after the other along `p`."""
    shares = ([part.value_share for part in parts], [part.qk_share for part in parts])
    value, qk = (None if any(each is None for each in share) else torch.cat(share) for share in shares)  # type: ignore[arg-type]
    return Relevance(
        torch.cat([part.raw for part in parts]),
        torch.cat([part.absolute for part in parts]),
        torch.cat([part.by_query for part in parts]),
        value,
        qk,
    )
