"""The layers of the native Transformer: projections around `attend`, feed-forward, residual order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headscope.errors import DataError
from headscope.model.attention import TAPS, ScoreOptions, attend
from headscope.model.mixing.base import Mixing, Queries, build_mixing
from headscope.model.native.transformer_config import StackConfig


def sinusoids(length: int, width: int, *, like: Tensor) -> Tensor:
    """Rows 0 … length - 1 of the sinusoidal position embedding [length width].

    Row p is [sin(p·w_0), …, sin(p·w_{n-1}), cos(p·w_0), …] with n = width / 2 and w_k = exp(-k · ln 10000 / (n - 1)):
    the halves are side by side, not interleaved as in Vaswani et al. 2017, §3.5. An odd width gets one zero column.
    fairseq and story-of-heads do the same in single precision, which changes the last digits at far positions.
    """
    exact = torch.float64 if like.dtype == torch.float64 else torch.float32
    half = width // 2
    rates = torch.exp(torch.arange(half, dtype=exact, device=like.device) * -(math.log(10000) / max(half - 1, 1)))
    angles = torch.arange(length, dtype=exact, device=like.device)[:, None] * rates
    table = torch.cat([angles.sin(), angles.cos(), angles.new_zeros(length, width % 2)], dim=1)
    return table.to(like.dtype)


DEFAULT_LENGTH = 1024
"""Rows of a table for positions without a limit: fairseq's default max_source_positions and max_target_positions."""


def position_table(stack: StackConfig, learned_positions: Tensor | None, like: Tensor) -> Tensor:
    """The position table [n d] of a stack as files store it, including the offset rows before the first position.

    The `learned_positions` if there are any, else sinusoids, or zeros for a stack without positions.
    """
    if learned_positions is not None:
        return learned_positions
    length = (stack.max_positions or DEFAULT_LENGTH) + stack.position_offset
    if stack.positions == "none":
        return like.new_zeros(length, stack.d_model)
    return sinusoids(length, stack.d_model, like=like)


PADDING = -1  # the position of padding tokens


class SinusoidalPositions(nn.Module):
    """Sinusoids by position; the table grows with longer texts and is not part of the checkpoint."""

    def __init__(self, width: int, offset: int = 0) -> None:
        super().__init__()
        self.width, self.offset = width, offset
        self._table: Tensor | None = None

    def forward(self, positions: Tensor, like: Tensor, *, bound: int) -> Tensor:
        """Embeddings [… t d] of positions [… t] below `bound`, with dtype and device of `like`; 0 for padding."""
        table = self._table
        if table is None or len(table) <= bound or table.dtype != like.dtype or table.device != like.device:
            length = max(256, 1 << (bound - 1).bit_length())
            table = sinusoids(length + self.offset, self.width, like=like)[self.offset :]
            self._table = table = torch.cat([torch.zeros_like(table[:1]), table])  # row 0: padding
        return nn.functional.embedding(positions - PADDING, table)


class LearnedPositions(nn.Embedding):
    """A learned row for each position; with an offset the row before the first one is for padding and not trained."""

    def __init__(self, positions: int, width: int, offset: int = 0) -> None:
        super().__init__(positions + offset, width, padding_idx=offset - 1 if offset else None)
        self.offset = offset

    def forward(self, positions: Tensor, like: Tensor | None = None, *, bound: int = 0) -> Tensor:
        """Rows [… t d] of positions [… t] below `bound`; DataError where the table is too short."""
        last = self.num_embeddings - self.offset - 1
        if bound - 1 > last and int(positions.max()) > last:
            position = int(positions.max())
            raise DataError(f"a text reaches position {position}, the model has learned {last + 1}; shorten it")
        if self.offset:
            return super().forward(positions + self.offset)
        padding = positions == PADDING
        return super().forward(positions.masked_fill(padding, 0)).masked_fill(padding[..., None], 0)


ACTIVATION: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu-tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "linear": nn.Identity,
}
GAIN = 2**-0.5
"""Initial gain of query, key and value, as in fairseq; with 1 post-norm models learn late to attend to the source."""


@dataclass
class AttentionCache:
    """Keys and values [b h s k] of earlier steps (or of the memory), and the state of a mixing."""

    key: Tensor | None = None
    value: Tensor | None = None
    mixing: dict[str, Tensor] = field(default_factory=dict)

    def select(self, order: Tensor, *, keys: bool = True) -> None:
        """Reorder rows: new row i is old row order[i]; with `keys` False keys and values keep their order."""
        if keys and self.key is not None and self.value is not None:
            self.key, self.value = self.key.index_select(0, order), self.value.index_select(0, order)
        self.mixing = {name: tensor.index_select(0, order) for name, tensor in self.mixing.items()}


LayerCaches = tuple[AttentionCache, AttentionCache]
"""The caches of self attention and cross attention in one decoder layer."""


class Attention(nn.Module):
    """Multi-head attention with linear projections around `attend`.

    Head i has rows i·k … (i+1)·k of query, key and value and the same columns of output. With `head_input` "slice",
    head i reads only chunk `slice_of_head[i]` of the input, so its rows are d / chunks wide; with `shared_qkv` all
    heads share the rows of a single one.
    """

    slice_of_head: Tensor

    def __init__(self, config: StackConfig, heads: int, *, d_memory: int, mixing: str | None = None) -> None:
        super().__init__()
        self.heads, self.d_head, self.d_value = heads, config.d_head, config.d_value or config.d_head
        self.reads_slices, self.shared = config.head_input == "slice", config.shared_qkv
        self.dropout = config.attention_dropout
        self.chunks = config.chunks if self.reads_slices else 1
        rows = min(heads, 1) if self.shared else heads
        bias, d = config.qkv_bias, config.d_model
        self.query = new_linear(d // self.chunks, rows * self.d_head, bias=bias, gain=GAIN)
        self.key = new_linear(d_memory // self.chunks, rows * self.d_head, bias=bias, gain=GAIN)
        self.value = new_linear(d_memory // self.chunks, rows * self.d_value, bias=bias, gain=GAIN)
        self.output = new_linear(heads * self.d_value, d, bias=config.attention_bias)
        self.context_dropout = nn.Dropout(config.context_dropout)
        self.mixing: Mixing | None = None
        if mixing is not None:
            self.mixing = build_mixing(
                mixing, heads=heads, d_value=self.d_value, d_model=d, options=config.mixing_options
            )
        if self.reads_slices:
            self.register_buffer("slice_of_head", torch.arange(heads))

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        real: Tensor | None = None,
        causal: bool = False,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """The output [b t d] of attention from x [b t d] to itself, or to memory [b s d].

        `mask` [b 1 t s] is True for visible keys. `real` [b t] and `causal` are for the mixing. With a cache, self
        attention appends to it, and cross attention fills it once.
        """
        if self.heads == 0:
            return self.output(x.new_zeros(*x.shape[:-1], 0))  # the output's bias
        key, value = self._keys(x, memory, cache)
        mixing, folded_output = None, None
        if self.mixing is not None:
            folds = self.training and self.mixing.folds_in_training
            if folds and not self.context_dropout.p and not TAPS.get():
                folded_output = self.mixing.fold(self.output.weight)
            else:
                queries = Queries(x, real, causal, None if cache is None else cache.mixing)
                mixing = partial(self.mixing, queries=queries)
        query = self._split(self.query, x, self.d_head)
        context, _ = attend(self, query, key, value, ScoreOptions(mask), dropout=self.dropout, mixing=mixing)
        joint_context = context.transpose(1, 2).flatten(2)  # [b t h·k]
        if folded_output is not None:
            return nn.functional.linear(joint_context, folded_output, self.output.bias)
        return self.output(self.context_dropout(joint_context))

    def inputs(self) -> tuple[tuple[nn.Linear, int], ...]:
        """The query, key and value projections with the number of rows that a head has in them."""
        return (self.query, self.d_head), (self.key, self.d_head), (self.value, self.d_value)

    def _keys(self, x: Tensor, memory: Tensor | None, cache: AttentionCache | None) -> tuple[Tensor, Tensor]:
        if memory is not None and cache is not None and cache.key is not None and cache.value is not None:
            return cache.key, cache.value
        states = x if memory is None else memory
        key = self._split(self.key, states, self.d_head)
        value = self._split(self.value, states, self.d_value)
        if cache is not None:
            if cache.key is not None and cache.value is not None:
                key, value = torch.cat([cache.key, key], dim=2), torch.cat([cache.value, value], dim=2)
            cache.key, cache.value = key, value
        return key, value

    def _split(self, projection: nn.Linear, x: Tensor, width: int) -> Tensor:
        """Projected states by head: [b t d] to [b h t k]."""
        b, t, _ = x.shape
        if not self.reads_slices:
            states: Tensor = projection(x)
            return states.view(b, t, self.heads, width).transpose(1, 2)
        slices = x.view(b, t, self.chunks, -1).index_select(2, self.slice_of_head)  # [b t h d/chunks]
        if self.shared:
            states = projection(slices)
            return states.transpose(1, 2)
        states = torch.einsum("bthi,hki->bhtk", slices, projection.weight.view(self.heads, width, -1))
        return states if projection.bias is None else states + projection.bias.view(self.heads, 1, width)


class FeedForward(nn.Module):
    """outer(activation(inner(x))), position by position."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.inner = new_linear(config.d_model, config.d_ffn)
        self.outer = new_linear(config.d_ffn, config.d_model)
        self.activation = ACTIVATION[config.activation]()
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """From [b t d] to [b t d]."""
        return self.outer(self.dropout(self.activation(self.inner(x))))


@dataclass(frozen=True)
class View:
    """Attention masks [b 1 t s] (True where visible) of a layer, and the memory [b s d].

    `real` [b t] is True for tokens and False for padding of the stack's own input, None without padding.
    """

    mask: Tensor | None = None
    real: Tensor | None = None
    causal: bool = False
    memory: Tensor | None = None
    memory_mask: Tensor | None = None


class Layer(nn.Module):
    """Self attention, cross attention if there is a memory, feed-forward; each with residual and norm."""

    def __init__(self, config: StackConfig, number: int, *, d_memory: int | None = None) -> None:
        super().__init__()
        d = config.d_model
        self.pre = config.norm == "pre"
        self.dropout = nn.Dropout(config.dropout)
        self.self_attention = Attention(config, config.self_heads[number], d_memory=d, mixing=config.self_mixing)
        self.self_attention_norm = nn.LayerNorm(d, eps=config.norm_epsilon)
        self.cross_attention: Attention | None = None
        if d_memory is not None:
            heads = config.cross_heads[number]
            self.cross_attention = Attention(config, heads, d_memory=d_memory, mixing=config.cross_mixing)
            self.cross_attention_norm = nn.LayerNorm(d, eps=config.norm_epsilon)
        self.ffn = FeedForward(config)
        self.ffn_norm = nn.LayerNorm(d, eps=config.norm_epsilon)

    def forward(self, x: Tensor, view: View, caches: LayerCaches | None = None) -> Tensor:
        """From [b t d] to [b t d]."""
        own_cache, cross_cache = caches or (None, None)
        options = {"real": view.real, "causal": view.causal}
        attention = partial(self.self_attention, mask=view.mask, cache=own_cache, **options)
        x = self._around(x, self.self_attention_norm, attention)
        if self.cross_attention is not None:
            memory = {"memory": view.memory, "mask": view.memory_mask}
            attention = partial(self.cross_attention, cache=cross_cache, **memory, **options)
            x = self._around(x, self.cross_attention_norm, attention)
        return self._around(x, self.ffn_norm, self.ffn)

    def _around(self, x: Tensor, norm: nn.LayerNorm, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(norm(x))) if self.pre else norm(x + self.dropout(sublayer(x)))


def new_linear(inputs: int, outputs: int, *, bias: bool = True, gain: float = 1.0) -> nn.Linear:
    """A linear layer, Glorot-uniform with zero bias; inputs or outputs may be 0, for a layer without heads."""
    linear = nn.Linear(max(inputs, 1), max(outputs, 1), bias=bias)
    if not linear.weight.is_meta:
        nn.init.xavier_uniform_(linear.weight, gain=gain)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
    if not (inputs and outputs):
        # torch warns about empty layers when it fills them itself
        linear.weight = nn.Parameter(linear.weight.new_empty(outputs, inputs))
        if linear.bias is not None:
            linear.bias = nn.Parameter(linear.bias[:outputs].detach())
        linear.in_features, linear.out_features = inputs, outputs
    return linear


# Modules built for their shapes alone: no memory, no numbers.

_DRAWS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _NoDraws(TorchFunctionMode):
    """Skips random initialisation, for modules on the meta device.

    It has no effect on meta tensors, but torch imports its compiler for it, which takes a second.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return kwargs["tensor"] if function in _DRAWS else function(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Within the block modules are built on the meta device."""
    with torch.device("meta"), _NoDraws():
        yield
