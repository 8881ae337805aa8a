"""The layout of gates: which heads each gate opens and closes.

A gate is for a unit, the heads that can only be removed together: usually one head, or the query heads of a key/value
group, or the same heads of layers that share a module. So every decision of the gates can be carried out. If all groups
of a layer are to keep the same number of heads (`headscope.pruning.ranking.ranking`), each head has its own gate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.errors import ConfigError, flag
from headscope.heads import SITES, HeadId, Site, SiteLayer, all_heads
from headscope.model.discovery import AttentionSite, AttentionSites

Unit = tuple[HeadId, ...]


class GateLayout:
    """The gates of `sites` of a model (empty: all sites), without heads to `protect`.

    Query heads that share keys and values have one gate, or one each (`whole_groups` False).

    - `units[i]`: the heads of gate i, `sizes[i]` of them; `modules[i]`: its (site, layer), of several the first.
    - `members`: the numbers [n] of the gates of each module.
    - `heads`: the number of heads of the gated sites; `counts`: of each gated (site, layer).
    - `gated_heads` may be removed; `protected_heads` have no gate and stay.
    - `groups`: the number of key/value groups of each module; empty if `whole_groups`.

    ConfigError for sites that the model lacks; and without `whole_groups`, if no heads share keys and values.
    """

    def __init__(
        self,
        attention_sites: AttentionSites,
        *,
        sites: Sequence[str] = (),
        protect: Collection[HeadId] = (),
        whole_groups: bool = True,
    ) -> None:
        present = [site for site in SITES if any(layer.site is site for layer in attention_sites.order)]
        for name in sites:
            if name not in {site.value for site in present}:
                raise ConfigError(f"{flag.sites} {name}: this model has {', '.join(site.value for site in present)}")
        gated_sites = set(map(Site, sites)) or set(present)
        self.counts = {
            site_layer: count for site_layer, count in attention_sites.layout.items() if site_layer[0] in gated_sites
        }
        self.groups: dict[SiteLayer, int] = {}
        gated: list[tuple[Unit, SiteLayer]] = []
        protected: set[HeadId] = set()
        for layers in (calls for calls in attention_sites.modules if calls[0].site in gated_sites and calls[0].heads):
            if not whole_groups:
                self.groups[layers[0].site_layer] = layers[0].groups
            for unit in _units(layers, whole_groups=whole_groups):
                if set(unit) & set(protect):
                    protected |= set(unit)
                else:
                    gated.append((unit, layers[0].site_layer))
        gated.sort(key=lambda gate: (SITES.index(gate[1][0]), gate[1][1], gate[0][0].head))
        if self.groups and all(count == self.counts[site_layer] for site_layer, count in self.groups.items()):
            raise ConfigError(f"{flag.allocate} per-group: no query heads share keys and values here; choose another")
        if not gated:
            raise ConfigError(
                f"there is no head to choose from: these sites have none, or {flag.protect} names them all; "
                "name other sites, or fewer heads to protect"
            )
        self.units, self.modules = tuple(unit for unit, _ in gated), tuple(module for _, module in gated)
        self.heads, self.protected_heads = sum(self.counts.values()), tuple(sorted(protected))
        self.gated_heads = frozenset(head for unit in self.units for head in unit)
        self.sizes = torch.tensor([len(unit) for unit in self.units], dtype=torch.float64)
        self.members = {
            module: torch.tensor([number for number, site_layer in enumerate(self.modules) if site_layer == module])
            for module in dict.fromkeys(self.modules)
        }

    @property
    def whole_layers(self) -> bool:
        """Whether every gate is for all of several heads of its layers, so that only whole layers can be removed."""
        layers = [Counter((head.site, head.layer) for head in unit) for unit in self.units]
        return all(heads > 1 and heads == self.counts[layer] for unit in layers for layer, heads in unit.items())

    @cached_property
    def index(self) -> Mapping[SiteLayer, Tensor]:
        """For every gated (site, layer) the number of each head's gate [h], or the number of gates if it has none."""
        gates = {layer: torch.full((count,), len(self.units)) for layer, count in self.counts.items()}
        for number, unit in enumerate(self.units):
            for head in unit:
                gates[head.site, head.layer][head.head] = number
        return gates

    def remaining_heads(self, heads_gone: Iterable[HeadId]) -> list[HeadId]:
        """The heads of the gated sites without `heads_gone`."""
        removed_heads = set(heads_gone)
        return [head for head in all_heads(self.counts) if head not in removed_heads]

    def per_site(self) -> dict[str, int]:
        """The number of heads of each gated site."""
        sites = [site for site in SITES if any(layer[0] is site for layer in self.counts)]
        return {site.value: sum(count for layer, count in self.counts.items() if layer[0] is site) for site in sites}

    def spread(self, gates: Tensor) -> dict[SiteLayer, Tensor]:
        """The gates [n] as gates of heads [h] of every gated (site, layer); 1 for heads without a gate."""
        padded = torch.cat([gates, gates.new_ones(1)])
        return {layer: padded[index.to(gates.device)] for layer, index in self.index.items()}

    def closed_heads(self, stays_open: Tensor) -> list[HeadId]:
        """The heads whose units do not stay (`stays_open` [n]), in the order of sites, layers, heads."""
        closed = {
            head for unit, stays in zip(self.units, stays_open.tolist(), strict=True) if not stays for head in unit
        }
        return [head for head in all_heads(self.counts) if head in closed]

    def table(self, **columns: Any) -> pd.DataFrame:
        """A row for each gated head; `columns` have a value for each gate [n], or one for all."""
        heads = [(head.site.value, head.layer, head.head) for unit in self.units for head in unit]
        gates = np.arange(len(self.units)).repeat(list(map(len, self.units)))
        values = {name: np.broadcast_to(column, len(self.units))[gates] for name, column in columns.items()}
        return pd.DataFrame(heads, columns=["site", "layer", "head"]).assign(**values)

    def ranking(self, order: Sequence[int], *, score: Tensor, stays_open: Tensor, **more: Any) -> pd.DataFrame:
        """A row for each gated head, in the `order` of their gates, best first; `more` are columns as of `table`."""
        rank = np.argsort(order) + 1
        table = self.table(score=score, rank=rank, kept=stays_open.long(), **more)
        return table.sort_values("rank", kind="stable", ignore_index=True)

    def kept_units(self, keep: int) -> int:
        """The number of units to keep so that `keep` heads stay; ConfigError if no number does that."""
        if not len(self.protected_heads) <= keep <= self.heads:
            sites = ", ".join(dict.fromkeys(site.value for site, _ in self.counts))
            note = f", at least the {len(self.protected_heads)} of {flag.protect}" * bool(self.protected_heads)
            raise ConfigError(f"{flag.keep} {keep}: keep at most the {self.heads} heads there are ({sites}){note}")
        sizes = set(self.sizes.int().tolist())
        if len(sizes) > 1:
            raise ConfigError(
                f"groups here have {' and '.join(map(str, sorted(sizes)))} heads; choose {flag.sites} with one size"
            )
        size = sizes.pop() if sizes else 1
        n_gated = keep - len(self.protected_heads)
        if n_gated % size:
            fewer = keep - n_gated % size
            raise ConfigError(
                f"{flag.keep} {keep} is not whole groups: heads go {size} at a time; "
                f"keep {' or '.join(str(number) for number in (fewer, fewer + size) if number)}"
            )
        return n_gated // size


def _units(layers: Sequence[AttentionSite], *, whole_groups: bool) -> list[Unit]:
    """The units of a module that these layers share: its key/value groups, or its heads."""
    first = layers[0]
    groups = [first.group_heads(group) for group in range(max(first.groups, 1))]
    units = groups if whole_groups else [range(head, head + 1) for head in range(first.heads)]
    return [tuple(HeadId(*layer.site_layer, head) for layer in layers for head in unit) for unit in units]


def top_k(scores: Tensor, k: int) -> Tensor:
    """A mask [n] of the K largest entries: exactly K, the earlier ones where scores tie."""
    order = torch.argsort(scores.detach(), descending=True, stable=True)
    is_top = torch.zeros(len(scores), dtype=torch.bool)
    is_top[order[:k]] = True
    return is_top


def tied_at(scores: Tensor, k: int) -> Tensor:
    """A mask [n] of entries with the K-th largest score, if not all of them are among the K largest."""
    if not 0 < k < len(scores):
        return torch.zeros(len(scores), dtype=torch.bool)
    ranked_scores = scores.detach().sort(descending=True).values
    return (scores.detach() == ranked_scores[k]) & (ranked_scores[k - 1] == ranked_scores[k])


def unit_remarks(gating: GateLayout) -> list[str]:
    """A remark where only the attention of whole layers can be removed."""
    why = f"heads of a layer share one key and value head and go with it; {flag.allocate} per-group takes single heads"
    return [why] if gating.whole_layers else []


def tie_remarks(gating: GateLayout, tied: Tensor) -> list[str]:
    """A remark where some but not all units [n] of the same score stay."""
    heads = int(gating.sizes[tied].sum())
    tie = f"{heads} heads have the same score, and not all of them stay: chosen by site, layer and head"
    return [tie] if heads else []
