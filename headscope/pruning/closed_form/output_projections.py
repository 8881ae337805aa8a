"""The linear layers that write into the residual stream: W_O of every attention module, and of feed-forward blocks.

What an output is added to is read off the tensor operations, so no architecture is known by name. An output y that is
added to other values before anything else reads it gives these values: in post-norm and pre-norm blocks the stream, in
parallel blocks the stream and the output of the feed-forward layer. Where y is first multiplied by a constant c, they
are divided by c. Where something else reads y first (a norm of y, say) nothing is given: no change of y alone could
make up for a change of the stream.

Of W_O also which of its columns go together. The output of a feed-forward block is in no table of architectures either:
after an attention module, a linear layer whose output is added to the residual stream before anything else reads it
(`residual_stream`), once a pass and for all positions. Experts, which see some of the positions, and layers that share
a matrix have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site
from headscope.model.discovery import eval_mode
from headscope.model.interface import is_linear, watch_modules
from headscope.model.mixing.base import Mixing, mixings_of
from headscope.model.projections import Slices, WeightOwners, columns_of
from headscope.model.stored_weights import is_plain
from headscope.pruning.gate_layout import GateLayout, Unit

_ATEN = torch.ops.aten
ADDITIONS = {_ATEN.add.Tensor, _ATEN.add_.Tensor}
PRODUCTS = {_ATEN.mul.Tensor, _ATEN.mul.Scalar, _ATEN.mul_.Tensor, _ATEN.mul_.Scalar}
COPIES = {_ATEN.clone.default, _ATEN._to_copy.default}


@dataclass(eq=False)
class _Sum:
    """An output y on its way through the model: `value` holds c · y + `stream`, where `scale` is c."""

    value: Tensor
    stream: Tensor | None = None
    scale: float = 1.0
    read: bool = False

    def is_in(self, argument: Any) -> bool:
        """Whether an argument of an operation has its memory."""
        memory = self.value.untyped_storage().data_ptr()
        return isinstance(argument, Tensor) and argument.untyped_storage().data_ptr() == memory

    def follow(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Record an operation that reads the value; returns whether its result is to be followed from now on."""
        other_arguments = [argument for argument in arguments if not self.is_in(argument)]
        if operation in COPIES:
            return True
        if len(arguments) != 2 or len(other_arguments) != 1 or options:
            return False
        (other,) = other_arguments
        if operation in PRODUCTS and self.stream is None and (factor := _number(other)):
            self.scale *= factor
            return True
        if operation in ADDITIONS and isinstance(other, Tensor) and other.numel() == self.value.numel():
            self.stream = other.clone() if self.stream is None else self.stream + other
            return True
        return False


class AllRead(Exception):
    """Ends a pass: every output that was to be followed has been read."""


class StreamTap(TorchDispatchMode):
    """Follows the outputs of some modules during a pass, which ends after so many `calls` of them."""

    def __init__(self, *, calls: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sums: list[_Sum] = []
        self.calls = calls

    @contextmanager
    def observing(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        with watch_modules(set(modules), lambda _, __, output: self.sums.append(_Sum(output))), self:
            yield

    def streams(self) -> list[Tensor | None]:
        """The streams [b t d] that the outputs of all calls were added to, in the order of calls; empties the tap."""
        sums, self.sums = self.sums, []
        return [None if call.stream is None else call.stream / call.scale for call in sums]

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and look whether it reads an output that is followed."""
        options = options or {}
        values = (*arguments, *options.values())
        leaves = [part for value in values for part in (value if isinstance(value, (list, tuple)) else (value,))]
        readers = [call for call in self.sums if not call.read and any(map(call.is_in, leaves))]
        calls_read = [call for call in readers if call.follow(operation, arguments, options)]
        result = operation(*arguments, **options)
        for call in readers:
            if call in calls_read:
                call.value = result
            elif not call.is_in(result):
                call.read = True
        if readers and len(self.sums) == self.calls and all(call.read for call in self.sums):
            raise AllRead
        return result


def _number(value: Any) -> float | None:
    """A constant factor, given as a number or a tensor of one; else None."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


@dataclass(frozen=True)
class OutputProjection:
    """W_O of one attention module, which is at work in the layers `places` (several where layers share it).

    Or the last linear layer of a feed-forward block after that module, without units.
    `weight` [d m] is in float64, head after head, made of `slices` whenever it is read. `units` are the heads that can
    only go together, `blocks` [u n] their columns, `owner` the module's name. `mixing`: the weight is for contexts
    before a fixed linear mixing of heads, as removal folds it.
    """

    places: tuple[tuple[Site, int], ...]
    slices: Slices
    units: tuple[Unit, ...]
    blocks: Tensor
    owner: str
    has_bias: bool
    mixing: Mixing | None = None

    @property
    def weight(self) -> Tensor:
        if self.mixing is not None:
            return self.mixing.fold(self.slices.weight).detach().cpu().double()
        return self.slices.matrices().permute(2, 0, 1).flatten(1).cpu().double()  # [d h·k]

    @property
    def heads(self) -> int:
        """Heads of one layer."""
        return sum(head.layer == self.places[0][1] for unit in self.units for head in unit)

    @property
    def width(self) -> int:
        """Columns of one head."""
        return self.blocks.numel() // max(self.heads, 1)

    def columns(self, heads: Collection[HeadId]) -> Tensor:
        """The columns [n] of this module's heads among `heads`."""
        numbers, *other_numbers = (
            sorted(head.head for head in heads if (head.site, head.layer) == place) for place in self.places
        )
        if any(other != numbers for other in other_numbers):
            names = ", ".join(f"{site}.{layer}" for site, layer in self.places)
            raise ConfigError(f"{names} are one module, so the same heads must go from all of them")
        return torch.arange(self.blocks.numel()).view(-1, self.width)[numbers].flatten()


def output_projections(checkpoint: Checkpoint, *, whole_groups: bool = True) -> list[OutputProjection]:
    """Every attention module whose columns can be told (contexts that are gated or normalised have none).

    Units are whole key/value groups, or (`whole_groups` False) their heads.
    """
    owners = WeightOwners(checkpoint.model)
    mixings = {(site, layer): mixing for site, layer, mixing in mixings_of(checkpoint.model) if mixing.foldable}
    gates, result = GateLayout(checkpoint.attention_sites, whole_groups=whole_groups), []
    for module, members in gates.members.items():
        units, projections = [gates.units[number] for number in members.tolist()], checkpoint.projections.get(module)
        if projections is None or projections.output is None:
            continue
        slices = projections.output
        owner_entry = owners.of(slices)
        assert owner_entry is not None, "an output projection is a module's weight"
        name, owner = owner_entry
        columns = torch.arange(sum(map(len, slices.units))).view(len(slices.units), -1)  # [h k]
        numbers = [[head.head for head in unit if (head.site, head.layer) == module] for unit in units]
        result.append(
            OutputProjection(
                places=tuple(dict.fromkeys((head.site, head.layer) for head in units[0])),
                slices=slices,
                units=tuple(units),
                blocks=torch.stack([columns[of_unit].flatten() for of_unit in numbers]),
                owner=name,
                has_bias=isinstance(getattr(owner, "bias", None), Tensor),
                mixing=mixings.get(module),
            )
        )
    return result


def feed_forward_outputs(checkpoint: Checkpoint, batch: Batch) -> list[OutputProjection]:
    """The feed-forward outputs that a pass over a batch reaches, in the order of calls."""
    owners = WeightOwners(checkpoint.model).modules()
    attention = {owners[projection.owner]: projection.places for projection in output_projections(checkpoint)}
    names = {module: name for name, module in checkpoint.model.named_modules()}
    linear = [
        part for part in names if is_linear(part) and is_plain(part) and part not in attention and part.weight.numel()
    ]
    calls: list[tuple[nn.Module, int]] = []
    modules = (*attention, *linear)
    calls_watched = watch_modules(modules, lambda module, _, y: calls.append((module, y.shape[:-1].numel())))
    tap, batch = StreamTap(), batch.to(checkpoint.device)
    with eval_mode(checkpoint.model), torch.no_grad(), calls_watched, tap.observing(linear):
        checkpoint.forward(batch)
    streams = iter(tap.streams())
    outputs: list[OutputProjection] = []
    place: tuple[tuple[Site, int], ...] = ()
    counts = [module for module, _ in calls]
    for module, positions in calls:
        if module in attention:
            place = attention[module]
            continue
        adds_to_stream = next(streams) is not None and place and counts.count(module) == 1
        if adds_to_stream and positions == batch.sides(place[0][0])[0].real.numel():
            columns = module.get_parameter("weight").shape[int(isinstance(module, nn.Linear))]
            slices, has_bias = columns_of(module, 1, columns), isinstance(getattr(module, "bias", None), Tensor)
            outputs.append(OutputProjection(place, slices, (), torch.arange(columns)[None], names[module], has_bias))
    return outputs
