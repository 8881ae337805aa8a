"""Swap two heads of a model ("rotation", Azov & Landau, MHR): their query, key and value projections.

As published, slices of the output projection stay, so each head then uses the other's slice. With `output` they are
swapped too, and so are rows and columns of a mixing matrix within a layer (entries of different layers' matrices do
not correspond); then a swap within one layer changes only the order of heads. Adam's moments stay, unless `optimizer`
is given. A swap is its own inverse.

`swap_heads_like_fork` swaps as the MHR fork does, which finds weights by parts of their names. There the width of a
head is the decoder's for encoders too; layer "1" also matches 10, 11, …; and "encoder" also matches encoder_attn in the
decoder. Mixing matrices pass the same filter: a swap of heads 0 of two layers swaps the whole matrices, and a swap of
head 0 with another head fails. Adam's moments stay.

Schedules of swaps by epoch are read from files of the MHR fork: {"3": [{"s_layer": "0", "s_head": 1,
"s_layer_module": "encoder_attn", "s_transformer_module": "decoder", "d_layer": …}]}, epochs from 1, layers and heads
from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Le
from pydantic import BaseModel, Strict, TypeAdapter, ValidationError
from torch import Tensor, nn

from headscope.config.option import WHOLE
from headscope.errors import ConfigError, flag, raise_first, restate
from headscope.files.reading import read_json
from headscope.heads import HeadId, Layout, Site, refuse_absent
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
    """A head's part of a parameter or buffer: indices `rows` of dimension `dim`."""

    tensor: Tensor
    rows: slice
    dim: int


def check_swap(swap: Swap, layout: Layout) -> None:
    """Raise ConfigError for a swap of absent heads, of one head with itself, or of heads of two sites."""
    refuse_absent((swap.first, swap.second), layout)
    problems = {
        f"{swap} are heads of two sites; heads change places within one site only": (
            swap.first.site is not swap.second.site
        ),
        f"{swap} are the same head": swap.first == swap.second,
    }
    raise_first(ConfigError, problems)


def swap_heads(
    model: Transformer, swaps: Iterable[Swap], *, output: bool = False, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Make swaps in their order; `optimizer`: its moments of the same weights are swapped too.

    ConfigError for a swap that does not fit the model (`check_swap`), before anything is changed.
    """
    layout, swaps = model.declared_attention().layout, list(swaps)
    for swap in swaps:
        check_swap(swap, layout)
    modules = {(site, layer): module for site, layer, _, module in model.attention_modules()}
    for swap in swaps:
        sides = [modules[head.site, head.layer] for head in (swap.first, swap.second)]
        check_separate(*sides)
        one_layer = output and sides[0] is sides[1]
        firsts = parts_of(sides[0], swap.first.head, output=output, matrix=one_layer)
        seconds = parts_of(sides[1], swap.second.head, output=output, matrix=one_layer)
        for first, second in zip(firsts, seconds, strict=True):
            swap_parameters(first, second)
            if optimizer is None or not isinstance(first.tensor, nn.Parameter):
                continue
            state, other_state = (optimizer.state.get(part.tensor, {}) for part in (first, second))
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == first.tensor.shape and name in other_state:
                    swap_parameters(first._replace(tensor=value), second._replace(tensor=other_state[name]))


def check_separate(*modules: Attention) -> None:
    """Raise ConfigError where all heads of a module share one projection."""
    if any(module.shared for module in modules):
        raise ConfigError("all heads of this model share one projection; there is nothing to exchange")


def parts_of(module: Attention, head: int, *, output: bool, matrix: bool = False) -> Iterator[ParameterSlice]:
    """The slices of a module that belong to a head; `matrix`: with its row and column of the mixing matrix."""
    for projection, width in module.inputs():
        rows = slice(head * width, (head + 1) * width)
        yield ParameterSlice(projection.weight, rows, 0)
        if projection.bias is not None:
            yield ParameterSlice(projection.bias, rows, 0)
    if module.reads_slices:
        yield ParameterSlice(module.slice_of_head, slice(head, head + 1), 0)
    if output:
        yield ParameterSlice(module.output.weight, slice(head * module.d_value, (head + 1) * module.d_value), 1)
    if matrix and module.mixing is not None and (alpha := module.mixing.matrix) is not None:
        yield from (ParameterSlice(alpha, slice(head, head + 1), dim) for dim in (0, 1))


@torch.no_grad()
def swap_parameters(first: ParameterSlice, second: ParameterSlice) -> None:
    """Swap two slices in place; they may be of the same tensor."""
    rows = [part.tensor.movedim(part.dim, 0)[part.rows] for part in (first, second)]
    copy = rows[0].clone()
    rows[0].copy_(rows[1])
    rows[1].copy_(copy)


MODULES = {
    Site.ENCODER_SELF: ("encoder", "self_attn"),
    Site.DECODER_SELF: ("decoder", "self_attn"),
    Site.CROSS: ("decoder", "encoder_attn"),
}


def swap_heads_like_fork(model: Transformer, swaps: Sequence[Swap]) -> None:
    """Make swaps in their order, on the weights that the fork would select.

    ConfigError where the fork stops with an error of sizes: in a swap of head 0 with another head, which selects a
    whole mixing matrix for one and none of it for the other (in the fork every model has such matrices).
    """
    for pairs in [fork_parts(model, swap) for swap in swaps]:
        for first, second in pairs:
            swap_parameters(first, second)


def check_fork_width(model: Transformer) -> None:
    """Raise ConfigError where heads of the decoder are not d_model / heads wide: the fork would swap parts of heads."""
    config = model.config.decoder
    width = config.d_model // max(config.most_heads, 1)
    if config.d_head != width:
        raise ConfigError(
            f"{flag.compat} fork swaps heads of width {width}, and these have {config.d_head}; take {flag.compat} none"
        )


def fork_parts(model: Transformer, swap: Swap) -> list[tuple[ParameterSlice, ParameterSlice]]:
    """The pairs of slices that the fork swaps for one entry; ConfigError as in `swap_heads_like_fork`."""
    config, heads = model.config.decoder, (swap.first, swap.second)
    rows_of_alphas = config.self_heads[0] if config.self_heads else 0
    width = config.d_model // max(rows_of_alphas, 1)
    counts = {max(min((end.head + 1) * width, rows_of_alphas) - end.head * width, 0) for end in heads}
    if len(counts) > 1:
        raise ConfigError(
            f"{swap}: the fork stops here, because it takes {max(counts)} rows of one mixing matrix for "
            f"{min(counts)} of the other; swap heads of equal number, or take {flag.compat} none"
        )
    weights = dict(fork_weights(model))
    ends = []
    for head in heads:
        parts = (*MODULES[head.site], str(head.layer))
        tensors = [weight for name, weight in weights.items() if all(part in name for part in parts)]
        if not tensors:
            raise ConfigError(f"{swap}: the fork finds no weights of that name; name a layer and module that is there")
        first, last = head.head * width, (head.head + 1) * width
        ends.append([ParameterSlice(t, slice(min(first, len(t)), min(last, len(t))), 0) for t in tensors])
    slice_pairs = list(zip(*ends, strict=False))
    for pair in slice_pairs:
        sizes = [(part.rows.stop - part.rows.start, *part.tensor.shape[1:]) for part in pair]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"{swap}: slices of sizes {sizes[0]} and {sizes[1]}; the fork stops here")
    return slice_pairs


def fork_weights(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The attention weights that swaps may touch, by the fork's names and in its order: alphas, k, v, q."""
    parts = [(*MODULES[site], layer, module) for site, layer, _, module in model.attention_modules()]
    parts.sort(key=lambda part: (part[0] != "encoder", part[2], part[1] != "self_attn"))
    for stack, name, layer, module in parts:
        prefix = f"{stack}.layers.{layer}.{name}"
        if module.mixing is not None and (matrix := module.mixing.matrix) is not None:
            yield f"{prefix}.alphas", matrix
        for part, projection in (("k_proj", module.key), ("v_proj", module.value), ("q_proj", module.query)):
            yield f"{prefix}.{part}.weight", projection.weight
            if projection.bias is not None:
                yield f"{prefix}.{part}.bias", projection.bias


Schedule = Mapping[int, list[Swap]]
Number = Annotated[int, Ge(0), Le(WHOLE)]
Epoch = Annotated[int, Ge(1), Le(WHOLE)]
SITE = {names: site for site, names in MODULES.items()}


class ForkEntry(BaseModel, extra="forbid"):
    """A swap as the fork's JSON has it: source and destination."""

    s_layer: Number
    s_head: Annotated[Number, Strict()]
    s_layer_module: Literal["self_attn", "encoder_attn"]
    s_transformer_module: Literal["encoder", "decoder"]
    d_layer: Number
    d_head: Annotated[Number, Strict()]
    d_layer_module: Literal["self_attn", "encoder_attn"]
    d_transformer_module: Literal["encoder", "decoder"]

    def swap(self) -> Swap:
        """The entry as a swap."""
        names = (self.s_transformer_module, self.s_layer_module), (self.d_transformer_module, self.d_layer_module)
        if ("encoder", "encoder_attn") in names:
            raise ConfigError("an encoder has no encoder_attn; cross attention is decoder, encoder_attn")
        ends = zip(names, (self.s_layer, self.d_layer), (self.s_head, self.d_head), strict=True)
        return Swap(*(HeadId(SITE[name], layer, head) for name, layer, head in ends))


def read_schedule(path: Path, layout: Layout | None) -> Schedule:
    """The swaps of every epoch in a file; ConfigError, with file, epoch and entry, for a swap that does not fit.

    Without a `layout` swaps are not checked against a model.
    """
    name = f"{flag.swap_schedule} {path}"
    content = read_json(path, error=ConfigError, name=name, object_pairs_hook=_refuse_repeats)
    try:
        epochs = TypeAdapter(dict[Epoch, list[ForkEntry]]).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part + 1 if isinstance(part, int) else part) for part in first["loc"])
        raise ConfigError(f"{path}: {location}: {first['msg']} (given: {str(first['input'])[:60]})") from None
    schedule: dict[int, list[Swap]] = {}
    for epoch, entries in epochs.items():
        for number, entry in enumerate(entries, start=1):
            with restate(ConfigError, f"{path}: epoch {epoch}, swap {number}: {{why}}"):
                swap = entry.swap()
                if layout is not None:
                    check_swap(swap, layout)
            schedule.setdefault(epoch, []).append(swap)
    if not schedule:
        raise ConfigError(f"{path} names no swap")
    return schedule


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dictionary; ValueError where a name is repeated, whose first value would be lost."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return unique
