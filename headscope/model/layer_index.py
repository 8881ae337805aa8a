"""Where the attention of a model sits: in which layer of which stack, and behind which output projection.

Found from the modules that a model has, not from their names: a stack is a ModuleList whose entries hold
the attention of one layer each. Models whose layers share modules (ALBERT), or that have another build,
have no seats; what is asked of them is computed in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from headscope.heads import Site
from headscope.model.discovery import AttentionSite, find_attention
from headscope.model.projections import Slices, projections

Where = tuple[Site, int]
Rank = tuple[int, int, int]
"""When something is computed in a forward pass: stack, layer, attention within the layer."""

END = 9  # after every attention of a layer


@dataclass(frozen=True)
class LayerEntry:
    """One (site, layer): the attention module, the module of its output projection, and the heads' slices of it."""

    rank: Rank
    attention: nn.Module
    output: nn.Module
    slices: Slices

    @cached_property
    def inside(self) -> bool:
        """Whether the output projection is a part of the attention module (as in GPT-2, not as in BERT)."""
        return any(part is self.output for part in self.attention.modules())

    def through(self, context: Tensor, heads: Tensor) -> Tensor:
        """What contexts [b h t k] of `heads` [h] add to the output projection's result [b t d]."""
        units = torch.cat([self.slices.units[head] for head in heads.tolist()])
        weight = self.slices.weight.detach().index_select(self.slices.axis, units)  # [d h·k] or [h·k d]
        found: Tensor = context.transpose(1, 2).flatten(2) @ (weight.T if self.slices.axis else weight)
        return found


@dataclass(frozen=True)
class LayerIndex:
    """Seats of every (site, layer) that has heads, every layer of every stack with its rank, and the embeddings.

    `embeddings` are the parts outside all layers that look up tokens and positions, which no head has a say in.
    """

    of: dict[Where, LayerEntry]
    layers: tuple[tuple[Rank, nn.Module], ...]
    embeddings: tuple[nn.Module, ...]


def index_layers(model: nn.Module) -> LayerIndex | None:
    """The seats of a model, None where its build is another one."""
    attention_sites = find_attention(model)
    if any(len(calls) != 1 for calls in attention_sites.calls.values()):
        return None
    modules = {id(part): part for part in model.modules()}
    mine = [(attention_site, modules[key]) for key, (attention_site,) in attention_sites.calls.items()]
    stacks = _stacks(model, mine)
    if {attention_site.site for attention_site, _ in mine} != set().union(*(sites for sites, _ in stacks)):
        return None
    found = projections(model)
    owners: dict[int, list[nn.Module]] = {}
    for part in model.modules():
        owners.setdefault(id(getattr(part, "weight", None)), []).append(part)
    numbers = {site: number for number, (sites, _) in enumerate(stacks) for site in sites}
    rows = {id(layer): row for _, stack in stacks for row, layer in enumerate(stack)}
    layer_index: dict[Where, LayerEntry] = {}
    for attention_site, module in mine:
        if not attention_site.heads:
            continue
        output = found[attention_site.site, attention_site.layer].output
        owner = [] if output is None else owners[id(output.weight)]
        if output is None or len(owner) != 1:
            return None
        stack = stacks[numbers[attention_site.site]][1]
        row = next(rows[id(layer)] for layer in stack if any(part is module for part in layer.modules()))
        rank = (numbers[attention_site.site], row, list(Site).index(attention_site.site))
        layer_index[attention_site.site, attention_site.layer] = LayerEntry(rank, module, owner[0], output)
    layers = [
        ((number, row, END), layer) for number, (_, stack) in enumerate(stacks) for row, layer in enumerate(stack)
    ]
    return LayerIndex(layer_index, tuple(layers), tuple(_embeddings(model, {id(layer) for _, layer in layers})))


def _embeddings(part: nn.Module, layers: set[int]) -> Iterator[nn.Module]:
    """The largest parts that have embeddings and no layers, found from the whole model down; layers are left out."""
    inside = list(part.modules())
    if not any(isinstance(each, nn.Embedding) for each in inside):
        return
    if not any(id(each) in layers for each in inside):
        yield part
    elif id(part) not in layers:
        for child in part.children():
            yield from _embeddings(child, layers)


def _stacks(model: nn.Module, mine: list[tuple[AttentionSite, nn.Module]]) -> list[tuple[set[Site], nn.ModuleList]]:
    """Outermost lists of layers, each with all attention of its sites; an encoder before its decoder."""
    found: list[tuple[set[Site], nn.ModuleList]] = []
    for part in model.modules():
        if isinstance(part, nn.ModuleList):
            sites = _sites(part, mine)
            if sites and not any(sites & others for others, _ in found):
                found.append((sites, part))
    return sorted(found, key=lambda stack: min(list(Site).index(site) for site in stack[0]))


def _sites(layers: nn.ModuleList, mine: list[tuple[AttentionSite, nn.Module]]) -> set[Site]:
    """The sites of a stack; none where a list is no stack."""
    inside: list[AttentionSite] = []
    last = -1
    for layer in layers:
        parts = {id(part) for part in layer.modules()}
        here = [attention_site for attention_site, module in mine if id(module) in parts]
        numbers = {attention_site.layer for attention_site in here}
        if len(numbers) > 1 or (numbers and min(numbers) <= last):
            return set()
        last = max(numbers, default=last)
        inside += here
    sites = {attention_site.site for attention_site in inside}
    return sites if len(inside) == sum(attention_site.site in sites for attention_site, _ in mine) else set()
