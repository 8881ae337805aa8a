"""The output projections of a model: W_O of every attention module, and which of its columns go together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site
from headscope.pruning.learning.gate_layout import Unit, gate_layout


@dataclass(frozen=True)
class OutputProjection:
    """W_O of one attention module, which is at work in the layers `places` (several where layers share it).

    `weight` [d m] is in float64, its columns head after head. `units` are the heads that can only go together,
    `blocks` [u n] their columns. `owner` is the module's name in the model, `has_bias` whether it has a bias.
    `mixing_folded`: the weight is that for contexts before a fixed linear mixing of heads, as removal folds it.
    """

    places: tuple[tuple[Site, int], ...]
    weight: Tensor
    units: tuple[Unit, ...]
    blocks: Tensor
    owner: str
    has_bias: bool
    mixing_folded: bool = False

    @property
    def heads(self) -> int:
        """Heads of one layer."""
        return sum(head.layer == self.places[0][1] for unit in self.units for head in unit)

    def columns(self, heads: set[HeadId]) -> Tensor:
        """The columns [n] of units all of whose heads are among `heads`."""
        gone = [block for unit, block in zip(self.units, self.blocks, strict=True) if heads.issuperset(unit)]
        return torch.cat(gone) if gone else torch.empty(0, dtype=torch.long)


def output_projections(checkpoint: Checkpoint) -> list[OutputProjection]:
    """Every attention module whose columns can be told (contexts that are gated or normalised have none)."""
    owners = weight_owners(checkpoint.model)
    mixings = dict(fixed_mixings(checkpoint.model))
    units: dict[tuple[Site, int], list[Unit]] = {}
    gates = gate_layout(checkpoint.attention_sites)
    for module, unit in zip(gates.modules, gates.units, strict=True):
        units.setdefault(module, []).append(unit)
    found = []
    for module, members in units.items():
        projections = checkpoint.projections.get(module)
        if projections is None or projections.output is None:
            continue
        slices = projections.output
        name, owner = owners[id(slices.weight)]
        weight = slices.matrices().permute(2, 0, 1).flatten(1)  # [d h·k]
        if module in mixings:
            weight = mixings[module].fold(slices.weight).detach()
        columns = torch.arange(weight.shape[1]).view(len(slices.units), -1)  # [h k]
        blocks = [columns[_heads_at(unit, module)].flatten() for unit in members]
        found.append(
            OutputProjection(
                places=tuple(dict.fromkeys((head.site, head.layer) for head in members[0])),
                weight=weight.cpu().double(),
                units=tuple(members),
                blocks=torch.stack(blocks),
                owner=name,
                has_bias=isinstance(getattr(owner, "bias", None), Tensor),
                mixing_folded=module in mixings,
            )
        )
    return found


def weight_owners(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """The name and the module of every weight, by the weight's id."""
    return {id(part.weight): (name, part) for name, part in model.named_modules() if hasattr(part, "weight")}


def fixed_mixings(model: nn.Module) -> Iterator[tuple[tuple[Site, int], Any]]:
    """The mixings of a native model that fold into W_O, by (site, layer)."""
    for site, layer, _, module in getattr(model, "attention_modules", tuple)():
        if module.mixing is not None and module.heads and module.mixing.fold(module.output.weight) is not None:
            yield (site, layer), module.mixing


def _heads_at(unit: Unit, place: tuple[Site, int]) -> list[int]:
    return [head.head for head in unit if (head.site, head.layer) == place]
