"""Multiply heads' contexts by gates: `with gated(model, gates): …`.

A gate acts between weights·V (after mixing, if the model mixes heads) and the output projection, as in
Voita et al. 2019, §5 and Michel et al. 2019, §2.3: gate one is exactly the unmodified model, gate zero
equals zeroing the head's slice of the output projection. The output projection's bias is not gated.
A *mask* (`masked`) closes heads before mixing: the head attends to nothing, as the MHR fork masks heads.
Where heads are not mixed, both are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError
from headscope.heads import HeadId, Layout, Site, describe_heads
from headscope.model.attention import AttentionCall, tapped
from headscope.model.discovery import find_attention, track_calls

Gates = Mapping[tuple[Site, int], Tensor]
"""Gates of every gated (site, layer): [h], or [b h] for a gate per sentence."""


def closed(heads: Iterable[HeadId], layout: Layout) -> dict[tuple[Site, int], Tensor]:
    """Gates [h] of zero for `heads` and of one for the others of their layers.

    ConfigError for a head that `layout` lacks.
    """
    gates: dict[tuple[Site, int], Tensor] = {}
    for head in heads:
        place = (head.site, head.layer)
        if head.head >= layout.get(place, 0):
            raise ConfigError(f"this model has no head {head}; it has {describe_heads(layout)}")
        gates.setdefault(place, torch.ones(layout[place]))[head.head] = 0.0
    return gates


@contextmanager
def masked(model: nn.Module, heads: Iterable[HeadId]) -> Iterator[None]:
    """Within the block these heads attend to nothing: their context is zero, before any mixing."""
    with gated(model, heads, before_mixing=True):
        yield


@contextmanager
def gated(model: nn.Module, gates: Gates | Iterable[HeadId], *, before_mixing: bool = False) -> Iterator[None]:
    """Within the block every head's context [b h t k] is multiplied by its gate, after mixing or before it.

    `gates` maps (site, layer) to [h] or [b h]; layers that are not named keep their heads. An iterable of
    heads closes these. Gradients flow into the gates. ConfigError where a gate's size is not the number
    of heads.
    """
    layout = find_attention(model).layout
    chosen = gates if isinstance(gates, Mapping) else closed(gates, layout)
    for place, gate in chosen.items():
        if gate.shape[-1] != layout.get(place, 0):
            site, layer = place
            raise ConfigError(
                f"{gate.shape[-1]} gates for {site}.{layer}, which has {layout.get(place, 0)} heads; "
                f"the model has {describe_heads(layout)}"
            )
    with track_calls(model) as tracker:

        def tap(call: AttentionCall, context: Tensor) -> Tensor | None:
            place = tracker.attention_site(call.module)
            gate = None if place is None else chosen.get((place.site, place.layer))
            return None if gate is None else context * gate.to(context)[..., :, None, None]

        with tapped(tap, before_mixing=before_mixing):
            yield
