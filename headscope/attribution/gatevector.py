"""An objective as a function of the gates of all heads: what captum takes apart.

The vector [b N] has a gate for every head, in the order of `headscope.heads.all_heads`; gate one leaves a head
as it is, gate zero takes its context away (or puts another one in its place).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError
from headscope.heads import SITES, Layout, Site
from headscope.model.discovery import find_attention
from headscope.model.gating import gated
from headscope.model.gradients import frozen_parameters
from headscope.model.layer_index import LayerIndex
from headscope.model.prefix_cache import PrefixCache

Keep = Literal["first", "last"]
Contexts = Mapping[tuple[Site, int], list[Tensor]]
"""Contexts [b h t k] of every (site, layer), call by call."""


def split_gates(vector: Tensor, layout: Layout) -> dict[tuple[Site, int], Tensor]:
    """Values [… N] of all heads, cut into those of every (site, layer) [… h], in the order of `all_heads`."""
    places = sorted(layout, key=lambda place: (SITES.index(place[0]), place[1]))
    return dict(zip(places, torch.split(vector, [layout[place] for place in places], dim=-1), strict=True))


def join_gates(parts: Mapping[tuple[Site, int], Tensor]) -> Tensor:
    """The other way round: values [… h] of every (site, layer) as one vector [… N]."""
    places = sorted(parts, key=lambda place: (SITES.index(place[0]), place[1]))
    return torch.cat([parts[place] for place in places], dim=-1)


class GateFunction:
    """f(gates): what `worth` [b] gives for a batch under head gates [b N].

    `worth` runs the model and looks at the batch only, and is the same computation each time. Gates that are the
    same for all sentences, as captum's perturbations are, take the short way of `headscope.model.prefix_cache`: what is
    below the first head that differs from an earlier pass is not computed again. `keep` says which pass that
    is: the "first" one (all heads open, and later vectors close one), or the "last" one (vectors that differ in
    one head from the one before). Gates that require gradients, or differ between sentences, take a whole pass.
    `sites` are those that `worth` runs (default: all); `layer_index` those of the model, None for whole passes only.
    `instead` makes, of the contexts of a pass with all heads open, what closed heads give (default: nothing).
    """

    def __init__(
        self,
        model: nn.Module,
        worth: Callable[[], Tensor],
        *,
        layer_index: LayerIndex | None,
        keep: Keep = "first",
        sites: frozenset[Site] = frozenset(Site),
        instead: Callable[[Contexts], Contexts] = lambda contexts: {},
    ) -> None:
        self.model, self.worth, self.keep, self.instead = model, worth, keep, instead
        self.layout = {
            place: heads for place, heads in find_attention(model).layout.items() if heads and place[0] in sites
        }
        self.size = sum(self.layout.values())
        self.rerun = PrefixCache(model, worth, layer_index)

    @contextmanager
    def entered(self) -> Iterator[GateFunction]:
        """Within the block the function can be called; it begins with a pass with all heads open."""
        with self.rerun.entered():
            with torch.no_grad():
                self.rerun.value(split_gates(torch.ones(self.size), self.layout), keep=True)
            self.rerun.instead = self.instead(self.rerun.kept.contexts)
            yield self

    def __call__(self, gates: Tensor) -> Tensor:
        """What each sentence is worth [b] under gates [b N]; ConfigError where N is not the number of heads."""
        if gates.shape[-1] != self.size:
            raise ConfigError(f"{gates.shape[-1]} gates for a model of {self.size} heads")
        if gates.requires_grad and torch.is_grad_enabled():
            return self._wholly(gates).to(gates.device)
        with torch.no_grad():
            if not bool((gates == gates[:1]).all()):
                return self._wholly(gates).to(gates.device)
            alike = split_gates(gates[0].detach().cpu(), self.layout)
            return self.rerun.value(alike, keep=self.keep == "last").to(gates.device)

    def _wholly(self, gates: Tensor) -> Tensor:
        if self.rerun.instead:
            raise ConfigError("closed heads that give something else take gates that are the same for all sentences")
        with frozen_parameters(self.model), gated(self.model, split_gates(gates, self.layout)):
            return self.worth()
