"""Exchange two heads of a model ("rotation", Azov & Landau, MHR): their query, key and value projections.

The slice of the output projection stays, so that a head meets the other's slice, as published; `output` moves
it along, which makes a swap within one layer change nothing but the order of heads. So do matrices that mix
heads: `output` swaps their rows and columns within a layer; between layers they stay, where entries of
different matrices do not correspond. Adam's moments stay too, unless `optimizer`. Every swap undoes itself.

`swap_heads_like_fork` carries them out as the MHR fork does, which finds weights by parts of their names: the width
of a head is the decoder's for encoders too; a layer "1" is also found in 10, 11, …, and encoder with encoder_attn in
the decoder; a model's mixing matrices pass the same filter, so that a swap of heads 0 of two layers swaps the whole
matrices, while head 0 with another head fails there. Adam's moments stay where they are.

Which heads change places before which epoch is read from files of the MHR fork (JSON), and ours (TOML). JSON: {"3":
[{"s_layer": "0", "s_head": 1, "s_layer_module": "encoder_attn", "s_transformer_module": "decoder", "d_layer": …}]},
epochs from 1, layers and heads from 0. TOML: tables [[swap]] with epoch, first and second, heads written as everywhere
(`cross.1.0`); `cross.1.*` stands for every head of a layer, matched by number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headscope.bounds import WHOLE
from headscope.errors import ConfigError
from headscope.files.reading import read_json
from headscope.files.serialize import read_toml
from headscope.heads import HeadId, Layout, Site, describe_heads, select_heads
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
    """What is wrong with a swap in a model with these heads. Returns None if nothing is."""
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
    model: Transformer, swaps: Iterable[Swap], *, output: bool = False, optimizer: torch.optim.Optimizer | None = None
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
        one_layer = output and sides[0] is sides[1]
        firsts = parts_of(sides[0], swap.first.head, output=output, matrix=one_layer)
        seconds = parts_of(sides[1], swap.second.head, output=output, matrix=one_layer)
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
    first_rows, second_rows = (
        part.tensor.narrow(part.dim, part.rows.start, part.rows.stop - part.rows.start) for part in (first, second)
    )
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
    counts = {max(min((end.head + 1) * width, heads) - end.head * width, 0) for end in (swap.first, swap.second)}
    if len(counts) > 1:
        raise ConfigError(
            f"{swap}: the fork stops here, because it takes {max(counts)} rows of one mixing matrix for "
            f"{min(counts)} of the other; swap heads of equal number, or take --compat none"
        )
    weights = dict(fork_weights(model))
    first, second = (
        [weight for name, weight in weights.items() if all(part in name for part in (end.layer, end.stack, end.module))]
        for end in (swap.first, swap.second)
    )
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


def _bounded(rows: slice, size: int) -> slice:
    return slice(min(rows.start, size), min(rows.stop, size))


FIELDS = tuple(f"{end}_{name}" for end in "sd" for name in ("layer", "head", "layer_module", "transformer_module"))
SITE = {names: site for site, names in MODULES.items()}
Schedule = Mapping[int, list[Swap]]


def read_schedule(path: Path, layout: Layout) -> Schedule:
    """The swaps of every epoch of a file; ConfigError with file, epoch and entry for what does not fit the model."""
    schedule: dict[int, list[Swap]] = {}
    for location, epoch, swap in _toml(path, layout) if path.suffix == ".toml" else _json(path):
        if problem := check_swap(swap, layout):
            raise ConfigError(f"{location}: {problem}")
        schedule.setdefault(epoch, []).append(swap)
    if not schedule:
        raise ConfigError(f"{path} names no swap")
    return schedule


def read_fork_schedule(path: Path) -> Mapping[int, list[ForkSwap]]:
    """The swaps of a JSON file in the fork's words: anything that the fork itself would try."""
    schedule: dict[int, list[ForkSwap]] = {}
    for _, epoch, first, second in fork_entries(path):
        schedule.setdefault(epoch, []).append(ForkSwap(first, second))
    return schedule


def fork_entries(path: Path) -> Iterator[tuple[str, int, ForkHead, ForkHead]]:
    """Place, epoch and both ends of every entry of a JSON file; ConfigError names file, epoch, entry and field."""
    content = read_json(path, error=ConfigError, name=f"--swap-schedule {path}", object_pairs_hook=_unrepeated)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {_kind(content)}; it must be an object of epochs, each with a list of swaps")
    for key, entries in content.items():
        if not (_is_number(key) and int(key) >= 1):
            raise ConfigError(f'{path}: epoch {key!r} is no number from 1 in quotes, such as "3"')
        if not isinstance(entries, list):
            raise ConfigError(f"{path}: epoch {key} holds {_kind(entries)}; it must be a list of swaps")
        for number, entry in enumerate(entries, start=1):
            location = f"{path}: epoch {key}, swap {number}"
            if not isinstance(entry, dict):
                raise ConfigError(f"{location} is {_kind(entry)}; it must be an object with {', '.join(FIELDS)}")
            if missing := [name for name in FIELDS if name not in entry]:
                raise ConfigError(f"{location} lacks {', '.join(missing)}")
            if extra := sorted(set(entry) - set(FIELDS)):
                raise ConfigError(f"{location} has unknown fields {', '.join(extra)}; it must have {', '.join(FIELDS)}")
            yield location, int(key), _end(location, entry, "s"), _end(location, entry, "d")


def _end(location: str, entry: Mapping[str, Any], end: str) -> ForkHead:
    layer, head = entry[f"{end}_layer"], entry[f"{end}_head"]
    layer = str(layer) if type(layer) is int else layer
    if not (isinstance(layer, str) and _is_number(layer)):
        raise ConfigError(f'{location}: {end}_layer is {layer!r}; it must be a layer from 0 in quotes, such as "0"')
    if type(head) is not int or not 0 <= head <= WHOLE:
        raise ConfigError(f"{location}: {end}_head is {head!r}; it must be a number from 0")
    stack, module = entry[f"{end}_transformer_module"], entry[f"{end}_layer_module"]
    for name, value, allowed in (
        ("transformer_module", stack, ("encoder", "decoder")),
        ("layer_module", module, ("self_attn", "encoder_attn")),
    ):
        if value not in allowed:
            raise ConfigError(f"{location}: {end}_{name} is {value!r}; it must be {' or '.join(allowed)}")
    return ForkHead(stack, module, layer, head)


def _json(path: Path) -> Iterator[tuple[str, int, Swap]]:
    for location, epoch, *ends in fork_entries(path):
        heads = []
        for end in ends:
            if (end.stack, end.module) not in SITE:
                raise ConfigError(
                    f"{location}: an encoder has no encoder_attn; cross attention is decoder, encoder_attn"
                )
            heads.append(HeadId(SITE[end.stack, end.module], int(end.layer), end.head))
        yield location, epoch, Swap(*heads)


def _toml(path: Path, layout: Layout) -> Iterator[tuple[str, int, Swap]]:
    content = read_toml(path)
    entries = content.get("swap")
    if set(content) != {"swap"} or not isinstance(entries, list):
        raise ConfigError(f"{path} must hold tables [[swap]] with epoch, first and second, and nothing else")
    for number, entry in enumerate(entries, start=1):
        location = f"{path}: swap {number}"
        if not isinstance(entry, dict) or set(entry) != {"epoch", "first", "second"}:
            raise ConfigError(f"{location} must have epoch, first and second, and nothing else")
        epoch = entry["epoch"]
        if type(epoch) is not int or not 1 <= epoch <= WHOLE:
            raise ConfigError(f"{location}: epoch is {epoch!r}; it must be a number from 1")
        firsts, seconds = (_heads(location, entry[name], layout) for name in ("first", "second"))
        if len(firsts) != len(seconds):
            raise ConfigError(
                f"{location}: {entry['first']} is {len(firsts)} heads and {entry['second']} {len(seconds)}"
            )
        for first, second in zip(firsts, seconds, strict=True):
            yield location, epoch, Swap(first, second)


def _heads(location: str, text: Any, layout: Layout) -> list[HeadId]:
    try:
        if isinstance(text, str) and text.endswith(".*") and text.count("*") == 1:
            return sorted(select_heads(text, layout))
        return [HeadId.parse(str(text), layout)]
    except ConfigError as error:
        raise ConfigError(f"{location}: {error}") from None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d{1,9}", text, re.ASCII) is not None


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Epochs written "3" and "3" again would lose the first."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return unique


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
    return names[type(value)] if type(value) in names else repr(value)
