"""Swaps as the MHR fork carries them out, with its way of finding weights by parts of their names.

What differs from `swaps`: the width of a head is the decoder's for encoders too; a layer "1" is also found in
10, 11, …, and encoder with encoder_attn in the decoder; a model's mixing matrices pass the same filter, so that
a swap of heads 0 of two layers swaps the whole matrices, while head 0 with another head fails there
(`swaps` leaves matrices to their layer). As there, Adam's moments of all of these stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from headscope.errors import ConfigError
from headscope.heads import HeadId, Site
from headscope.model.native.layers import Attention
from headscope.model.native.transformer import Transformer
from headscope.training.swaps.swaps import ParameterSlice, Swap, swap_parameters

MODULES = {
    Site.ENCODER_SELF: ("encoder", "self_attn"),
    Site.DECODER_SELF: ("decoder", "self_attn"),
    Site.CROSS: ("decoder", "encoder_attn"),
}


@dataclass(frozen=True)
class ForkHead:
    """One end of a swap in the fork's words: stack, module, layer (a string) and head."""

    stack: str
    module: str
    layer: str
    head: int

    @classmethod
    def of(cls, head: HeadId) -> ForkHead:
        """The same head in the fork's words."""
        return cls(*MODULES[head.site], str(head.layer), head.head)


@dataclass(frozen=True)
class ForkSwap:
    """A swap in the fork's words; nothing forbids that it crosses sites."""

    first: ForkHead
    second: ForkHead

    @classmethod
    def of(cls, swap: Swap) -> ForkSwap:
        """The same swap in the fork's words."""
        return cls(ForkHead.of(swap.first), ForkHead.of(swap.second))

    def __str__(self) -> str:
        ends = (f"{end.stack}.{end.layer}.{end.module} head {end.head}" for end in (self.first, self.second))
        return " ↔ ".join(ends)


def swap_heads_like_fork(model: Transformer, swaps: list[ForkSwap]) -> None:
    """Carry out swaps in their order, on the weights that the fork would pick.

    ConfigError where the fork stops with an error of sizes: head 0 against another head, which takes a whole
    mixing matrix against none of it (in the fork every model has such matrices).
    """
    for pairs in [fork_parts(model, swap) for swap in swaps]:
        for first, second in pairs:
            swap_parameters(first, second)


def check_fork_width(model: Transformer) -> None:
    """ConfigError where heads of the decoder are not d_model / heads wide: the fork would move parts of heads."""
    config = model.config.decoder
    width = config.d_model // max(config.most_heads, 1)
    if config.d_head != width:
        raise ConfigError(
            f"--compat fork swaps heads of width d_model / heads, here {width}, and these have {config.d_head}; take "
            "--compat none"
        )


def fork_parts(model: Transformer, swap: ForkSwap) -> list[tuple[ParameterSlice, ParameterSlice]]:
    """The pairs of slices that the fork swaps for one entry; ConfigError as in `swap_heads_like_fork`."""
    config = model.config.decoder
    heads = config.self_heads[0] if config.self_heads else 0
    width = config.d_model // max(heads, 1)
    _check(swap, heads, width)
    weights = dict(fork_weights(model))
    first, second = (_picked(weights, end) for end in (swap.first, swap.second))
    if not first or not second:
        raise ConfigError(f"{swap}: the fork finds no weights of that name; name a layer and module that is there")
    ends = [slice(end.head * width, (end.head + 1) * width) for end in (swap.first, swap.second)]
    swapped = []
    for pair in zip(first, second, strict=False):
        parts = [ParameterSlice(t, _bounded(rows, len(t)), 0) for t, rows in zip(pair, ends, strict=True)]
        sizes = [(part.rows.stop - part.rows.start, *part.tensor.shape[1:]) for part in parts]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"{swap}: slices of sizes {sizes[0]} and {sizes[1]}; the fork stops here")
        swapped.append((parts[0], parts[1]))
    return swapped


def fork_weights(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The attention weights that swaps may touch, by the fork's names and in its order: alphas, k, v, q."""
    modules = {}
    for site, layer, _, module in model.attention_modules():
        stack, name = MODULES[site]
        modules[stack, layer, name] = module
    for stack, layer, name in sorted(modules, key=lambda key: (key[0] != "encoder", key[1], key[2] != "self_attn")):
        yield from _of_module(f"{stack}.layers.{layer}.{name}", modules[stack, layer, name])


def _of_module(prefix: str, module: Attention) -> Iterator[tuple[str, Tensor]]:
    if module.mixing is not None and (matrix := module.mixing.matrix) is not None:
        yield f"{prefix}.alphas", matrix
    for name, projection in (("k_proj", module.key), ("v_proj", module.value), ("q_proj", module.query)):
        yield f"{prefix}.{name}.weight", projection.weight
        if projection.bias is not None:
            yield f"{prefix}.{name}.bias", projection.bias


def _picked(weights: dict[str, Tensor], end: ForkHead) -> list[Tensor]:
    return [
        weight for name, weight in weights.items() if all(part in name for part in (end.layer, end.stack, end.module))
    ]


def _check(swap: ForkSwap, heads: int, width: int) -> None:
    counts = {max(min((end.head + 1) * width, heads) - end.head * width, 0) for end in (swap.first, swap.second)}
    if len(counts) > 1:
        raise ConfigError(
            f"{swap}: the fork stops here, because it takes {max(counts)} rows of one mixing matrix for "
            f"{min(counts)} of the other; swap heads of equal number, or take --compat none"
        )


def _bounded(rows: slice, size: int) -> slice:
    return slice(min(rows.start, size), min(rows.stop, size))
