"""Entropy, maximum and argmax of every row of attention weights in one pass over blocks of scores.

Each block of scores stays in the processor's cache while all statistics take what they need of it; sums are rescaled
as larger scores come (online softmax, Milakov & Gimelshein 2018), as fused attention kernels do it. A second fused call
with keys in the place of values would give the entropy too, for more time than it takes here, and with the rounding of
half precision where the model has that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.model.attention import precise_type
from headscope.model.streaming.visibility import HIDDEN, Visibility, query_blocks


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
        dtype = precise_type(query.dtype)
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


CELLS = 2**18
"""Scores in a block: one MB of float32, about a core's own cache."""
LEAST = 16
TENSORS = 4
"""As large as a block that are there with it, itself among them."""
CELLS_ON_DEVICE = 2**26
"""Scores in a block where kernels are launched one by one: the budget is that of the processor's own memory."""
COLUMNS = 512
"""Keys of a block."""
PART = 64
"""Keys whose maximum is looked at before single ones are."""


@dataclass(frozen=True)
class RowStatistics:
    """Of every query [b h t]: ln Σ exp(scores) (with the sink), entropy in nats, largest weight on the counted keys
    and its position (the first of those that tie)."""

    log_sum: Tensor
    entropy: Tensor
    max_weight: Tensor
    argmax_position: Tensor


def row_statistics(scores: ScoreBlocks, counted: Tensor, *, tie: float) -> RowStatistics:
    """Statistics of all rows; the maximum is over keys that are `counted` [b s].

    Scores nearer to each other than `tie` (as a share of the larger one where that is above one) count as equal. Rows
    that see no key have entropy and maximum 0.
    """
    parts = [_Rows(scores, counted, queries, tie).statistics() for queries in _query_blocks(scores)]
    return RowStatistics(*(torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True)))


def _query_blocks(scores: ScoreBlocks) -> Iterator[slice]:
    b, h, t, s = scores.size
    each = b * h * min(s, COLUMNS)  # scores of a query
    if scores.query.device.type == "cpu":
        return query_blocks(t, each * scores.query.itemsize * TENSORS, at_most=max(LEAST, CELLS // each))
    step = max(LEAST, CELLS_ON_DEVICE // each)
    return (slice(start, min(start + step, t)) for start in range(0, t, step))


class _Rows:
    """The running statistics of one block of queries."""

    def __init__(self, scores: ScoreBlocks, counted: Tensor, queries: slice, tie: float) -> None:
        b, h, _, _ = scores.size
        shape, new = (b, h, queries.stop - queries.start), scores.query.new_full
        self.scores, self.counted, self.queries, self.tie = scores, counted, queries, tie
        self.waits = scores.query.device.type != "cpu"  # to ask whether work can be saved would take longer there
        self.largest = new(shape, HIDDEN)  # of all visible keys
        self.total = new(shape, 0.0)  # Σ exp(score − largest)
        self.weighted = new(shape, 0.0)  # Σ exp(score − largest) · (score − largest)
        self.best = new(shape, HIDDEN)  # of the counted keys
        self.position = torch.zeros(shape, dtype=torch.long, device=scores.query.device)

    def statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of them [b h q], after a walk over the keys."""
        low, all_low, all_high, high = self.scores.visibility.bounds(self.queries)
        uncounted = ~self.counted
        for start in range(low, high, COLUMNS):
            keys = slice(start, min(start + COLUMNS, high))
            inside = start >= all_low and keys.stop <= all_high
            block = self.scores.block(self.queries, keys, all_visible=inside)  # [b h q n]
            largest = block.amax(dim=-1)
            self._sum(block, largest)
            skipped = uncounted[:, keys]
            if self.waits or bool(skipped.any()):
                block.masked_fill_(skipped[:, None, None], HIDDEN)
                largest = block.amax(dim=-1)
            self._compare(block, largest, start)
        return self._concluded()

    def _sum(self, block: Tensor, largest: Tensor) -> None:
        """Add a block's exponentials, with what there is rescaled to the new maximum."""
        new = torch.maximum(self.largest, largest)
        shift = self.largest - new
        scale = shift.exp()
        shifted = block - new[..., None]
        exponentials = shifted.exp()
        self.weighted = (self.weighted + shift * self.total) * scale + torch.linalg.vecdot(exponentials, shifted)
        self.total = self.total * scale + exponentials.sum(dim=-1)
        self.largest = new

    def _compare(self, block: Tensor, largest: Tensor, start: int) -> None:
        """Move the argmax to this block where its maximum is above all before it."""
        slack = self.tie * largest.abs().clamp(min=1)
        better = largest > self.best + slack
        if self.waits or bool(better.any()):
            first = _first_at_least(block, largest - slack)
            self.position = torch.where(better, first + start, self.position)
        self.best = torch.maximum(self.best, largest)

    def _concluded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sees = self.largest > HIDDEN / 2
        total = self.total.where(sees, 1.0)
        log_sum = (self.largest + total.log()).where(sees, 0.0)
        share = torch.ones_like(log_sum)
        if self.scores.sinks is not None:
            plain = log_sum
            log_sum = torch.logaddexp(plain, self.scores.sinks[:, None]).where(sees, 0.0)
            share = (plain - log_sum).exp()
        mean = self.weighted / total + (self.largest - log_sum)  # of the log weights
        entropy = (-share * mean).where(sees, 0.0)
        max_weight = (self.best - log_sum).exp().where(sees, 0.0)
        return log_sum, entropy, max_weight, self.position


def _first_at_least(block: Tensor, least: Tensor) -> Tensor:
    """The first place [b h q] in a block [b h q n] whose score is at least `least` [b h q]; one exists in every row."""
    missing = -block.shape[-1] % PART
    if missing:
        block = torch.nn.functional.pad(block, (0, missing), value=HIDDEN)
    parts = block.unflatten(-1, (-1, PART))  # [b h q n/64 64]
    part = _first_true(parts.amax(dim=-1) >= least[..., None])  # [b h q]
    chosen = parts.gather(-2, part[..., None, None].expand(*part.shape, 1, PART))[..., 0, :]  # [b h q 64]
    return part * PART + _first_true(chosen >= least[..., None])


def _first_true(flags: Tensor) -> Tensor:
    """The first True of each row [… n], n below 256."""
    n = flags.shape[-1]
    from_end = torch.arange(n, 0, -1, dtype=torch.uint8, device=flags.device)
    return n - (flags * from_end).amax(dim=-1).long()
