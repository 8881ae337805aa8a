"""Exchange two heads of a model ("rotation", Azov & Landau, MHR): their query, key and value projections.

The slice of the output projection stays, so that a head meets the other's slice, as published; `output` moves
it along, which makes a swap within one layer change nothing but the order of heads. So do matrices that mix
heads: `output` swaps their rows and columns within a layer; between layers they stay, where entries of
different matrices do not correspond. Adam's moments stay too, unless `optimizer`. Every swap undoes itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError
from headscope.heads import HeadId, Layout, describe_heads
from headscope.model.native.layers import Attention
from headscope.model.native.transformer import Transformer


@dataclass(frozen=True)
class Swap:
    """Two heads that change places."""

    first: HeadId
    second: HeadId

    def __str__(self) -> str:
        return f"{self.first} ↔ {self.second}"


class ParameterSlice(NamedTuple):
    """Where a head has its weights: units `rows` of dimension `dim` of a parameter or buffer."""

    tensor: Tensor
    rows: slice
    dim: int


def check_swap(swap: Swap, layout: Layout) -> str | None:
    """What is wrong with a swap in a model with these heads, None where nothing is."""
    for head in (swap.first, swap.second):
        if (head.site, head.layer) not in layout:
            return f"{head} is in a layer that is not there; the model has {describe_heads(layout)}"
        if head.head >= layout[head.site, head.layer]:
            return f"{head} is a head that is not there; the model has {describe_heads(layout)}"
    if swap.first.site is not swap.second.site:
        return f"{swap} are heads of two sites; heads change places within one site only"
    if swap.first == swap.second:
        return f"{swap} are the same head"
    return None


def swap_heads(
    model: Transformer,
    swaps: Iterable[Swap],
    *,
    output: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Carry out swaps in their order; `optimizer`: its moments of the same weights change places too.

    ConfigError for a swap that does not fit the model (`check_swap`), before anything is moved.
    """
    layout = model.declared_attention().layout
    planned = list(swaps)
    for swap in planned:
        if problem := check_swap(swap, layout):
            raise ConfigError(problem)
    modules = {(site, layer): module for site, layer, _, module in model.attention_modules()}
    for swap in planned:
        sides = [modules[head.site, head.layer] for head in (swap.first, swap.second)]
        check_separate(*sides)
        within = output and sides[0] is sides[1]
        firsts = parts_of(sides[0], swap.first.head, output=output, matrix=within)
        seconds = parts_of(sides[1], swap.second.head, output=output, matrix=within)
        for first, second in zip(firsts, seconds, strict=True):
            swap_parameters(first, second)
            if optimizer is not None:
                swap_optimizer_state(first, second, optimizer)


def check_separate(*modules: Attention) -> None:
    """ConfigError where heads of a module have no projections of their own."""
    if any(module.shared for module in modules):
        raise ConfigError("all heads of this model share one projection; there is nothing to exchange")


def parts_of(module: Attention, head: int, *, output: bool, matrix: bool = False) -> Iterator[ParameterSlice]:
    """The slices of a module that make one of its heads; `matrix`: its row and column of the mixing matrix too."""
    for projection, width in module.inputs():
        rows = slice(head * width, (head + 1) * width)
        yield ParameterSlice(projection.weight, rows, 0)
        if projection.bias is not None:
            yield ParameterSlice(projection.bias, rows, 0)
    if module.sliced:
        yield ParameterSlice(module.slice_of_head, slice(head, head + 1), 0)
    if output:
        width = module.d_value
        yield ParameterSlice(module.output.weight, slice(head * width, (head + 1) * width), 1)
    if matrix and module.mixing is not None and (alpha := module.mixing.matrix) is not None:
        yield from (ParameterSlice(alpha, slice(head, head + 1), dim) for dim in (0, 1))


@torch.no_grad()
def swap_parameters(first: ParameterSlice, second: ParameterSlice) -> None:
    """Swap two slices in place; also of one tensor."""
    first_rows, second_rows = (part.tensor.narrow(part.dim, *_reach(part)) for part in (first, second))
    copy = first_rows.clone()
    first_rows.copy_(second_rows)
    second_rows.copy_(copy)


def swap_optimizer_state(first: ParameterSlice, second: ParameterSlice, optimizer: torch.optim.Optimizer) -> None:
    """Swap the slices of every optimizer state that has the size of the two weights."""
    if not isinstance(first.tensor, nn.Parameter):
        return
    first_state, second_state = (optimizer.state.get(part.tensor, {}) for part in (first, second))
    for name, value in first_state.items():
        if isinstance(value, Tensor) and value.shape == first.tensor.shape and name in second_state:
            swap_parameters(first._replace(tensor=value), second._replace(tensor=second_state[name]))


def _reach(part: ParameterSlice) -> tuple[int, int]:
    return part.rows.start, part.rows.stop - part.rows.start
