"""The layer of a model that each attention module belongs to, and its output projection.

Found from the structure of a model, not from names: a stack is a ModuleList whose entries hold the attention of one
layer each. Models whose layers share modules (ALBERT), or with another structure, have no index; their passes are
computed in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from headscope.heads import Site
from headscope.model.discovery import AttentionSite, find_attention
from headscope.model.projections import Slices, WeightOwners, projections

SiteLayer = tuple[Site, int]
Rank = tuple[int, int, int]
"""When something is computed in a forward pass: stack, layer, attention within the layer."""

END = 9  # after every attention of a layer


@dataclass(frozen=True)
class LayerEntry:
    """One (site, layer): its attention module, the module of the output projection, and the heads' slices of that."""

    rank: Rank
    attention: nn.Module
    output: nn.Module
    slices: Slices

    @cached_property
    def output_is_inside(self) -> bool:
        """Whether the output projection is a part of the attention module (as in GPT-2, not as in BERT)."""
        return any(part is self.output for part in self.attention.modules())

    def project(self, context: Tensor, heads: Tensor) -> Tensor:
        """The sum over `heads` [h] of contexts [b h t k] · W_O[head]: [b t d]."""
        units = torch.cat([self.slices.units[head] for head in heads.tolist()])
        matrix = self.slices.weight.detach().to(context.dtype)
        weight = matrix.index_select(self.slices.axis, units.to(matrix.device))  # [d h·k] or [h·k d]
        added: Tensor = context.transpose(1, 2).flatten(2) @ (weight.T if self.slices.axis else weight)
        return added


@dataclass(frozen=True)
class LayerIndex:
    """Entries of every (site, layer) that has heads, all layers of all stacks with their ranks, and the embeddings.

    `embeddings` are the modules outside all layers that embed tokens and positions; no head influences their output.
    """

    of: dict[SiteLayer, LayerEntry]
    layers: tuple[tuple[Rank, nn.Module], ...]
    embeddings: tuple[nn.Module, ...]


def index_layers(model: nn.Module) -> LayerIndex | None:
    """The index of a model; None for an unsupported structure."""
    attention_sites = find_attention(model)
    if any(len(calls) != 1 for calls in attention_sites.calls.values()):
        return None
    modules = {id(part): part for part in model.modules()}
    attention_modules = [(attention_site, modules[key]) for key, (attention_site,) in attention_sites.calls.items()]
    stacks = _stacks(model, attention_modules)
    if {attention_site.site for attention_site, _ in attention_modules} != set().union(*(sites for sites, _ in stacks)):
        return None
    projected = projections(model)
    owners = WeightOwners(model)
    numbers = {site: number for number, (sites, _) in enumerate(stacks) for site in sites}
    rows = {id(layer): row for _, stack in stacks for row, layer in enumerate(stack)}
    layer_index: dict[SiteLayer, LayerEntry] = {}
    for attention_site, module in attention_modules:
        if not attention_site.heads:
            continue
        output = projected[attention_site.site, attention_site.layer].output
        owner = owners.all(output)
        if output is None or len(owner) != 1:
            return None
        stack = stacks[numbers[attention_site.site]][1]
        row = next(rows[id(layer)] for layer in stack if any(part is module for part in layer.modules()))
        rank = (numbers[attention_site.site], row, list(Site).index(attention_site.site))
        layer_index[attention_site.site, attention_site.layer] = LayerEntry(rank, module, owner[0][1], output)
    layers = [
        ((number, row, END), layer) for number, (_, stack) in enumerate(stacks) for row, layer in enumerate(stack)
    ]
    return LayerIndex(layer_index, tuple(layers), tuple(_embeddings(model, {id(layer) for _, layer in layers})))


def _embeddings(part: nn.Module, layers: set[int]) -> Iterator[nn.Module]:
    """The largest modules that contain embeddings and no layers, searched from the whole model down."""
    inside = list(part.modules())
    if not any(isinstance(module, nn.Embedding) for module in inside):
        return
    if not any(id(module) in layers for module in inside):
        yield part
    elif id(part) not in layers:
        for child in part.children():
            yield from _embeddings(child, layers)


def _stacks(
    model: nn.Module, attention_modules: list[tuple[AttentionSite, nn.Module]]
) -> list[tuple[set[Site], nn.ModuleList]]:
    """The outermost ModuleLists that hold all attention of their sites; the encoder before the decoder."""
    stacks: list[tuple[set[Site], nn.ModuleList]] = []
    for part in model.modules():
        if isinstance(part, nn.ModuleList):
            sites = _sites(part, attention_modules)
            if sites and not any(sites & other_sites for other_sites, _ in stacks):
                stacks.append((sites, part))
    return sorted(stacks, key=lambda stack: min(list(Site).index(site) for site in stack[0]))


def _sites(layers: nn.ModuleList, attention_modules: list[tuple[AttentionSite, nn.Module]]) -> set[Site]:
    """The sites whose attention a ModuleList holds, one layer per entry; none where it is no stack of layers."""
    inside: list[AttentionSite] = []
    last = -1
    for layer in layers:
        parts = {id(part) for part in layer.modules()}
        in_layer = [attention_site for attention_site, module in attention_modules if id(module) in parts]
        numbers = {attention_site.layer for attention_site in in_layer}
        if len(numbers) > 1 or (numbers and min(numbers) <= last):
            return set()
        last = max(numbers, default=last)
        inside += in_layer
    sites = {attention_site.site for attention_site in inside}
    return (
        sites if len(inside) == sum(attention_site.site in sites for attention_site, _ in attention_modules) else set()
    )
