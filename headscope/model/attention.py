"""THE attention function: every head of every model goes through `attend`.

- Scores, weights and context are separate steps, so that training, capture, gates and tests share one implementation.
- *Taps* (see `headscope.model.taps`) are called with each attention call and may replace the context between weights·V
  and the output projection. They are entered with `with` and kept in a context variable, so that none outlives its
  block.
- Keys and values may have fewer heads than queries (grouped-query attention).
- While `CONTEXTS` holds a function, contexts come from it and no weights are made (`headscope.model.streaming`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from headscope.errors import CheckpointError, HeadscopeError, flag

T = TypeVar("T")
IMPLEMENTATION = "headscope"  # the attention implementation of transformers that headscope registers
_HEAD_MASKS = frozenset({"head_mask", "decoder_head_mask", "cross_attn_head_mask"})


def refuse_head_masks(arguments: Mapping[str, Any]) -> None:
    """CheckpointError for the head masks of transformers 4, which transformers 5 ignores silently."""
    for name in _HEAD_MASKS & arguments.keys():
        if arguments[name] is not None:
            advice = "gate heads with `with headscope.model.taps.gated(model, …)`"
            raise CheckpointError(f"{name}= was given, which transformers 5 ignores; {advice}")


def is_half(dtype: torch.dtype) -> bool:
    """Whether numbers of this type carry fewer bits than float32."""
    return dtype in (torch.float16, torch.bfloat16)


def precise_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype, or float32 for half precision."""
    return torch.float32 if is_half(dtype) else dtype


def precise(values: Tensor) -> Tensor:
    """Values in float32 at least: in half precision a sum of a few hundred weights is wrong in the third digit."""
    return values.to(precise_type(values.dtype))


@dataclass(frozen=True)
class ScoreOptions:
    """Options of an attention call for computing scores and weights from queries and keys.

    `mask` is the model's, or None: it broadcasts to [b h t s], additive, or boolean with True where a query may attend.
    `scaling` multiplies the dot products (default k^-0.5, Vaswani et al. 2017, §3.2.1); `softcap` c maps them to
    c·tanh(x/c) (Gemma 2); `position_bias` (T5) is added before the mask. `sinks` [h] is one extra score per head that
    takes part in the normalisation and is then dropped (gpt-oss), so rows sum to less than one.
    """

    mask: Tensor | None = None
    scaling: float | None = None
    softcap: float | None = None
    position_bias: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """Tensors of one call of `attend`, before mixing, gates and dropout of the weights.

    query [b h t k], key and value [b g s k] with g groups, context [b h t k]; `made_weights` [b h t s] are None where
    contexts came without them (`CONTEXTS`).
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    context: Tensor
    options: ScoreOptions = field(default_factory=ScoreOptions)
    made_weights: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """The weights [b h t s]; HeadscopeError where none were made."""
        if self.made_weights is None:
            size = f"{self.query.shape[2]} × {self.key.shape[2]} positions"
            raise HeadscopeError(f"no weights of {size} in a pass over long text; take {flag.attention} dense")
        return self.made_weights


Tap = Callable[[AttentionCall, Tensor], Tensor | None]
"""From an attention call and its context [b h t k] after earlier taps (and mixing), to a new context, or None to keep
it."""


class Products(Protocol):
    """The two matrix products of attention, which relevance rules replace (`PRODUCTS`)."""

    def scores(self, query: Tensor, key: Tensor, /) -> Tensor:
        """query · key for query [b h t k], key [b h s k]: [b h t s]."""
        ...

    def context(self, weights: Tensor, value: Tensor, /) -> Tensor:
        """weights · value for weights [b h t s], value [b h s k]: [b h t k]."""
        ...


Contexts = Callable[[Tensor, Tensor, Tensor, ScoreOptions], Tensor]
"""Contexts [b h t k] of query [b h t k], key and value [b g s k], without weights (`CONTEXTS`)."""


CONTEXTS: ContextVar[Contexts | None] = ContextVar("headscope_contexts", default=None)
"""The function that `attend` computes contexts with, without weights. It is not used while `PRODUCTS` is set, nor in
training with dropout: both need weights."""
PRODUCTS: ContextVar[Products | None] = ContextVar("headscope_products", default=None)
TAPS: ContextVar[tuple[Tap, ...]] = ContextVar("headscope_taps", default=())
BEFORE_MIXING: ContextVar[tuple[Tap, ...]] = ContextVar("headscope_taps_before_mixing", default=())


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Within the block a context variable has another value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def tap_contexts(tap: Tap, *, before_mixing: bool = False, first: bool = False) -> AbstractContextManager[None]:
    """Within the block, `tap` is called by every `attend`; taps entered later are called later.

    A tap gets the context after mixing, or with `before_mixing` the context before it. With `first` it is called before
    taps that were entered earlier.
    """
    taps = BEFORE_MIXING if before_mixing else TAPS
    return holding(taps, (tap, *taps.get()) if first else (*taps.get(), tap))


@contextmanager
def without_taps() -> Iterator[None]:
    """Within the block `attend` calls no tap: the model runs without gates, masks and captures."""
    with holding(TAPS, ()), holding(BEFORE_MIXING, ()):
        yield


def makes_weights() -> bool:
    """Whether `attend` makes weights in the present context (`CONTEXTS`, `PRODUCTS`)."""
    return CONTEXTS.get() is None or PRODUCTS.get() is not None


def attention_scores(query: Tensor, key: Tensor, options: ScoreOptions) -> Tensor:
    """Scores [b h t s] of query [b h t k] and key [b h s k]."""
    products = PRODUCTS.get()
    product = torch.matmul(query, key.transpose(-1, -2)) if products is None else products.scores(query, key)
    scores = product * (query.shape[-1] ** -0.5 if options.scaling is None else options.scaling)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.position_bias is not None:
        scores = scores + options.position_bias
    if options.mask is None:
        return scores
    if options.mask.dtype == torch.bool:
        return scores.masked_fill(~options.mask, torch.finfo(scores.dtype).min)
    return scores + options.mask


def attention_weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys of scores [b h t s], with `sinks`; computed in float32 where scores are of half precision.

    The row maximum is subtracted by softmax itself.
    """
    dtype = precise_type(scores.dtype)
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=dtype).to(scores.dtype)
    column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)  # [b h t 1]
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1, dtype=dtype).to(scores.dtype)[..., :-1]


def repeat_groups(states: Tensor, heads: int) -> Tensor:
    """Give each of `heads` query heads its group's states: [b g s k] to [b h s k]."""
    b, g, s, k = states.shape
    if g == heads:
        return states
    return states[:, :, None].expand(b, g, heads // g, s, k).reshape(b, heads, s, k)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: ScoreOptions,
    *,
    dropout: float = 0.0,
    mixing: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every head: scores, weights and context, then mixing, then taps such as gates.

    From query [b h t k], key and value [b g s k] to context [b h t k] and weights [b h t s] (before dropout; None if
    they are not made). `module` is the calling attention module: taps identify the site by it, and its `training` flag
    switches dropout. `mixing` maps contexts to contexts between weights·V and the taps.
    """
    contexts, weights = CONTEXTS.get(), None
    if contexts is not None and not makes_weights() and not (module.training and dropout):
        context = contexts(query, key, value, options)
    else:
        context, weights = dense_context(module, query, key, value, options, dropout)
    early, taps = BEFORE_MIXING.get(), TAPS.get()
    call = None
    if early or taps:  # the memory layout of the output projection, so that taps need no copy
        context = context.transpose(1, 2).contiguous().transpose(1, 2)
        call = AttentionCall(module, query, key, value, context, options, weights)
    context = _through(early, call, context)
    if mixing is not None:
        context = mixing(context)
    return _through(taps, call, context), weights


def dense_context(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Context [b h t k] and weights [b h t s] of query [b h t k], key and value [b g s k]."""
    heads = query.shape[1]
    scores = attention_scores(query, repeat_groups(key, heads), options)
    weights = attention_weights(scores, options.sinks).to(value.dtype)  # [b h t s]
    weights_after_dropout = nn.functional.dropout(weights, p=dropout, training=module.training)
    states, products = repeat_groups(value, heads), PRODUCTS.get()
    multiply = torch.matmul if products is None else products.context
    return multiply(weights_after_dropout, states), weights


def _through(taps: tuple[Tap, ...], call: AttentionCall | None, context: Tensor) -> Tensor:
    for tap in taps:
        assert call is not None
        tap_context = tap(call, context)
        context = context if tap_context is None else tap_context
    return context
