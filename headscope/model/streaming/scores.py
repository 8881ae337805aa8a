"""The final scores of an attention call in blocks: scaled, capped, with position bias and mask, in float32 at least."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.model.streaming.visibility import Visibility


@dataclass(frozen=True)
class ScoreBlocks:
    """query [b h t k] (scaled already) and key [b g s k], of which blocks of scores [b h q n] are made.

    `softcap` and `position_bias` (broadcasts to [b h t s]) are those of `headscope.model.attention.attention_scores`,
    `sinks` [h] those of `attention_weights`.
    """

    query: Tensor
    key: Tensor
    visibility: Visibility
    softcap: float | None = None
    position_bias: Tensor | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        visibility: Visibility,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        position_bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> ScoreBlocks:
        """From a call's own query and key: the query is scaled once."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scaled = query.to(dtype) * scale
        return cls(
            scaled, key.to(dtype), visibility, softcap, position_bias, None if sinks is None else sinks.to(dtype)
        )

    @property
    def size(self) -> tuple[int, int, int, int]:
        """b, h, t, s."""
        b, h, t, _ = self.query.shape
        return b, h, t, self.key.shape[2]

    def block(self, queries: slice, keys: slice | Tensor, *, all_visible: bool = False) -> Tensor:
        """Scores [b h q n] of queries with keys (a slice, or positions [n]); `all_visible`: no mask is needed."""
        b, h, _, k = self.query.shape
        g = self.key.shape[1]
        rows = self.query[:, :, queries].reshape(b, g, -1, k)  # [b g h/g·q k]: a group's keys are read once
        products = rows @ self.key[:, :, keys].transpose(-1, -2)
        scores = products.view(b, h, queries.stop - queries.start, products.shape[-1])
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap  # not in place: it may need a gradient
        if self.position_bias is not None:
            _, _, t, s = self.size
            bias = self.position_bias.expand(-1, -1, t, s)
            scores = scores + bias[:, :, queries][..., keys]
        return scores if all_visible else self.visibility.hide(scores, queries, keys)

    def pairs(self, sentence: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Scores [n h] of single pairs: of sentence [n], from query [n] to key [n], each of which is visible."""
        (_, h, t, s), g = self.size, self.key.shape[1]
        rows = self.query[sentence, :, query].unflatten(1, (g, h // g))  # [n g h/g k]
        scores = torch.einsum("ngrk,ngk->ngr", rows, self.key[sentence, :, key]).flatten(1)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        mask = self.visibility.mask if self.visibility.spans is None else None
        for added in (self.position_bias, mask):
            if added is not None and added.dtype != torch.bool and type(added) is Tensor:
                rows_of = torch.zeros_like(sentence) if len(added) == 1 else sentence
                scores = scores + added.expand(-1, -1, t, s)[rows_of, :, query, key]  # [n h] or [n 1]
        return scores
