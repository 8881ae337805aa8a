"""The linear layers that write into the residual stream: W_O of every attention module, outputs of feed-forward blocks.

`StreamTap` finds the stream from tensor operations, so it needs no table of architectures. If an output y is added to
other values before any other operation reads it, these values are its stream: in post-norm and pre-norm blocks the
residual stream, in parallel blocks also the output of the feed-forward layer. If y is first multiplied by a constant c,
they are divided by c. If another operation reads y first (a norm, say), y has no stream: no change of y alone could
make up for a change of the stream.

The output of a feed-forward block is found likewise: a linear layer after an attention module, whose output is added to
the stream once a pass and for all positions. Experts, which read some of the positions, and layers that share a matrix
do not count.
"""

from __future__ import annotations

from collections import Counter
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
from headscope.heads import HeadId, SiteLayer
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
class _FollowedOutput:
    """An output y on its way through the model: `value` is c · y + `stream`, where `scale` is c.

    `is_read`: another operation has read the value, so nothing more is added to it.
    """

    value: Tensor
    stream: Tensor | None = None
    scale: float = 1.0
    is_read: bool = False

    def is_in(self, argument: Any) -> bool:
        """Whether an argument of an operation shares the memory of the value."""
        memory = self.value.untyped_storage().data_ptr()
        return isinstance(argument, Tensor) and argument.untyped_storage().data_ptr() == memory

    def follow(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Update stream and scale by an operation on the value; returns whether its result is the new value."""
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
    """Raised to end a pass when all followed outputs have been read."""


class StreamTap(TorchDispatchMode):
    """Follows the outputs of some modules during a pass, which ends after this number of `calls` (0: it does not)."""

    def __init__(self, *, calls: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.followed: list[_FollowedOutput] = []
        self.calls = calls

    @contextmanager
    def observing(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Within the block outputs of `modules` are followed."""

        def follow(_: Any, __: Any, output: Tensor) -> None:
            self.followed.append(_FollowedOutput(output))

        with watch_modules(set(modules), follow), self:
            yield

    def streams(self) -> list[Tensor | None]:
        """The streams [b t d] of the outputs of all calls (None: no stream), in order; empties the tap."""
        followed, self.followed = self.followed, []
        return [None if output.stream is None else output.stream / output.scale for output in followed]

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and update the followed outputs that it reads."""
        options = options or {}
        values = (*arguments, *options.values())
        leaves = [part for value in values for part in (value if isinstance(value, (list, tuple)) else (value,))]
        inputs = [output for output in self.followed if not output.is_read and any(map(output.is_in, leaves))]
        continued = [output for output in inputs if output.follow(operation, arguments, options)]
        result = operation(*arguments, **options)
        for output in inputs:
            if output in continued:
                output.value = result
            elif not output.is_in(result):
                output.is_read = True
        if inputs and len(self.followed) == self.calls and all(output.is_read for output in self.followed):
            raise AllRead
        return result


def _number(value: Any) -> float | None:
    """A constant factor, which is a number or a tensor of one element; None for anything else."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


@dataclass(frozen=True)
class OutputProjection:
    """W_O of one attention module in `site_layers` (several share it in some models).

    Or the last linear layer of a feed-forward block after that module; then it has no units.

    - `weight` [d m]: in float64, head after head, computed from `slices` whenever it is read.
    - `units`: heads that can only be removed together; `blocks` [u n]: their columns.
    - `owner`: the name of the linear layer.
    - `mixing`: a fixed linear mixing of heads that is folded into the weight, which is for contexts before it.
    """

    site_layers: tuple[SiteLayer, ...]
    slices: Slices
    units: tuple[Unit, ...]
    blocks: Tensor
    owner: str
    has_bias: bool
    mixing: Mixing | None = None

    @property
    def weight(self) -> Tensor:
        """The matrix [d m] in float64, on the CPU."""
        if self.mixing is not None:
            return self.mixing.fold(self.slices.weight).detach().cpu().double()
        return self.slices.matrices().permute(2, 0, 1).flatten(1).cpu().double()  # [d h·k]

    @property
    def heads(self) -> int:
        """The number of heads of one layer."""
        return sum(head.layer == self.site_layers[0][1] for unit in self.units for head in unit)

    @property
    def width(self) -> int:
        """The number of columns of one head."""
        return self.blocks.numel() // max(self.heads, 1)

    def columns(self, heads: Collection[HeadId]) -> Tensor:
        """The columns [n] of this module's heads among `heads`."""
        numbers, *other_numbers = (
            sorted(head.head for head in heads if (head.site, head.layer) == site_layer)
            for site_layer in self.site_layers
        )
        if any(other != numbers for other in other_numbers):
            names = ", ".join(f"{site}.{layer}" for site, layer in self.site_layers)
            raise ConfigError(f"{names} are one module; remove the same heads from all of them")
        return torch.arange(self.blocks.numel()).view(-1, self.width)[numbers].flatten()


def output_projections(checkpoint: Checkpoint, *, whole_groups: bool = True) -> list[OutputProjection]:
    """W_O of every attention module whose columns belong to heads; not where contexts are gated or normalised first.

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
                site_layers=tuple(dict.fromkeys((head.site, head.layer) for head in units[0])),
                slices=slices,
                units=tuple(units),
                blocks=torch.stack([columns[unit_heads].flatten() for unit_heads in numbers]),
                owner=name,
                has_bias=isinstance(getattr(owner, "bias", None), Tensor),
                mixing=mixings.get(module),
            )
        )
    return result


def feed_forward_outputs(checkpoint: Checkpoint, batch: Batch) -> list[OutputProjection]:
    """The last linear layers of the feed-forward blocks that a pass over a batch reaches, in the order of calls."""
    owners = WeightOwners(checkpoint.model).modules()
    attention = {owners[projection.owner]: projection.site_layers for projection in output_projections(checkpoint)}
    names = {module: name for name, module in checkpoint.model.named_modules()}
    linear = [
        part for part in names if is_linear(part) and is_plain(part) and part not in attention and part.weight.numel()
    ]
    calls: list[tuple[nn.Module, int]] = []
    modules = (*attention, *linear)
    recording = watch_modules(modules, lambda module, _, y: calls.append((module, y.shape[:-1].numel())))
    tap, batch = StreamTap(), batch.to(checkpoint.device)
    with eval_mode(checkpoint.model), torch.no_grad(), recording, tap.observing(linear):
        checkpoint.forward(batch)
    streams = iter(tap.streams())
    outputs: list[OutputProjection] = []
    site_layers: tuple[SiteLayer, ...] = ()  # of the last attention module
    n_calls = Counter(module for module, _ in calls)
    for module, positions in calls:
        if module in attention:
            site_layers = attention[module]
            continue
        adds_to_stream = next(streams) is not None and site_layers and n_calls[module] == 1
        if adds_to_stream and positions == batch.sides(site_layers[0][0])[0].real.numel():
            columns = module.get_parameter("weight").shape[int(isinstance(module, nn.Linear))]
            slices, has_bias = columns_of(module, 1, columns), isinstance(getattr(module, "bias", None), Tensor)
            outputs.append(
                OutputProjection(site_layers, slices, (), torch.arange(columns)[None], names[module], has_bias)
            )
    return outputs
