"""The linear layers that write into the residual stream: W_O of every attention module, and of feed-forward blocks.

Of W_O also which of its columns go together. The output of a feed-forward block is in no table of architectures either:
after an attention module, a linear layer whose output is added to the residual stream before anything else reads it
(`residual_stream`), once a pass and for all positions. Experts, which see some of the positions, and layers that share
a matrix have none.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site
from headscope.model.discovery import eval_mode
from headscope.model.mixing.base import Mixing, mixings_of
from headscope.model.projections import Slices, WeightOwners
from headscope.model.stored_weights import is_plain, matrix_of
from headscope.pruning.closed_form.residual_stream import StreamTap
from headscope.pruning.gate_layout import Unit, gate_layout


@dataclass(frozen=True)
class OutputProjection:
    """W_O of one attention module, which is at work in the layers `places` (several where layers share it).

    `weight` [d m] is in float64, its columns head after head; it is made of `slices` whenever it is read, so that one
    module's is in memory. `units` are the heads that can only go together,
    `blocks` [u n] their columns. `owner` is the module's name in the model, `has_bias` whether it has a bias.
    `mixing`: the weight is that for contexts before a fixed linear mixing of heads, as removal folds it.
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
        """W_O [d m]."""
        if self.mixing is not None:
            return self.mixing.fold(self.slices.weight).detach().cpu().double()
        return self.slices.matrices().permute(2, 0, 1).flatten(1).cpu().double()  # [d h·k]

    @property
    def inputs(self) -> int:
        """Columns of the weight."""
        return sum(len(unit) for unit in self.slices.units)

    @property
    def gate(self) -> float:
        """The constant in the weight that the stored matrix lacks."""
        return self.slices.gate

    @property
    def mixing_folded(self) -> bool:
        """Whether a mixing is folded in."""
        return self.mixing is not None

    @property
    def heads(self) -> int:
        """Heads of one layer."""
        return sum(head.layer == self.places[0][1] for unit in self.units for head in unit)

    @property
    def width(self) -> int:
        """Columns of one head."""
        return self.inputs // self.heads

    def columns(self, heads: Collection[HeadId]) -> Tensor:
        """The columns [n] of those of `heads` that are of this module.

        ConfigError where layers that share the module would lose different heads.
        """
        of_layers = {
            tuple(sorted(head.head for head in heads if (head.site, head.layer) == place)) for place in self.places
        }
        if len(of_layers) > 1:
            names = ", ".join(f"{site}.{layer}" for site, layer in self.places)
            raise ConfigError(f"{names} are one module, so the same heads must go from all of them")
        (numbers,) = of_layers
        return torch.arange(self.inputs).view(-1, self.width)[list(numbers)].flatten()


def output_projections(checkpoint: Checkpoint, *, whole_groups: bool = True) -> list[OutputProjection]:
    """Every attention module whose columns can be told (contexts that are gated or normalised have none).

    Units are whole key/value groups, or (`whole_groups` False) their heads.
    """
    owners = WeightOwners(checkpoint.model)
    mixings = {(site, layer): mixing for site, layer, mixing in mixings_of(checkpoint.model) if mixing.foldable}
    units: dict[tuple[Site, int], list[Unit]] = {}
    gates = gate_layout(checkpoint.attention_sites, whole_groups=whole_groups)
    for module, unit in zip(gates.modules, gates.units, strict=True):
        units.setdefault(module, []).append(unit)
    result = []
    for module, members in units.items():
        projections = checkpoint.projections.get(module)
        if projections is None or projections.output is None:
            continue
        slices = projections.output
        owned = owners.of(slices)
        assert owned is not None, "an output projection is a module's weight"
        name, owner = owned
        columns = torch.arange(sum(map(len, slices.units))).view(len(slices.units), -1)  # [h k]
        numbers = [[head.head for head in unit if (head.site, head.layer) == module] for unit in members]
        result.append(
            OutputProjection(
                places=tuple(dict.fromkeys((head.site, head.layer) for head in members[0])),
                slices=slices,
                units=tuple(members),
                blocks=torch.stack([columns[of_unit].flatten() for of_unit in numbers]),
                owner=name,
                has_bias=isinstance(getattr(owner, "bias", None), Tensor),
                mixing=mixings.get(module),
            )
        )
    return result


@dataclass(frozen=True)
class FeedForwardOutput:
    """The last linear layer of a feed-forward block, `owner` in the model; `places` has the attention before it."""

    places: tuple[tuple[Site, int], ...]
    owner: str
    module: nn.Module
    mixing_folded: bool = False
    gate: float = 1.0

    @property
    def weight(self) -> Tensor:
        """W [d m] in float64."""
        matrix = matrix_of(self.module)
        return (matrix if isinstance(self.module, nn.Linear) else matrix.T).cpu().double()

    @property
    def has_bias(self) -> bool:
        """Whether it has a bias."""
        return isinstance(getattr(self.module, "bias", None), Tensor)

    def columns(self, heads: Collection[HeadId]) -> Tensor:
        """No columns are those of heads."""
        return torch.empty(0, dtype=torch.long)


def feed_forward_outputs(checkpoint: Checkpoint, batch: Batch) -> list[FeedForwardOutput]:
    """Those that a pass over a batch reaches, in the order in which they are called."""
    owners = WeightOwners(checkpoint.model).named()
    attention = {owners[projection.owner]: projection.places for projection in output_projections(checkpoint)}
    names = {module: name for name, module in checkpoint.model.named_modules()}
    linear = [
        part
        for part in names
        if isinstance(part, nn.Linear | Conv1D) and is_plain(part) and part not in attention and part.weight.numel()
    ]
    calls: list[tuple[nn.Module, tuple[int, ...]]] = []

    def called(module: nn.Module, _: object, output: Tensor) -> None:
        calls.append((module, tuple(output.shape[:-1])))

    tap, batch = StreamTap(), batch.to(checkpoint.device)
    with eval_mode(checkpoint.model), torch.no_grad(), ExitStack() as stack:
        for module in (*attention, *linear):
            stack.callback(module.register_forward_hook(called).remove)
        with tap.observing(linear):
            checkpoint.forward(batch)
    streams = iter(tap.streams())
    found: list[FeedForwardOutput] = []
    place: tuple[tuple[Site, int], ...] = ()
    counts = [module for module, _ in calls]
    for module, shape in calls:
        if module in attention:
            place = attention[module]
            continue
        added = next(streams) is not None
        if added and place and counts.count(module) == 1 and torch.Size(shape).numel() == positions(batch, place[0][0]):
            found.append(FeedForwardOutput(place, names[module], module))
    return found


def positions(batch: Batch, site: Site) -> int:
    """Positions of the side of a batch that a site reads, padding too."""
    text = batch.source if batch.target is None or site is Site.ENCODER_SELF else batch.target
    return text.real.numel()
