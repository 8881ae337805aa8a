"""Multiply heads' contexts by gates: `with gated(model, gates): …`.

A gate acts between weights·V (after mixing, if the model mixes heads) and the output projection, as in
Voita et al. 2019, §5 and Michel et al. 2019, §2.3: gate one is exactly the unmodified model, gate zero
equals zeroing the head's slice of the output projection. The output projection's bias is not gated.
A *mask* (`masked`) closes heads before mixing, as the MHR fork masks heads. Without mixing both are the same.
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
from headscope.model.stored_weights import computing_dtype

Gates = Mapping[tuple[Site, int], Tensor]
"""Gates of every gated (site, layer): [h], or [b h] for a gate per sentence."""


def closed(heads: Iterable[HeadId], layout: Layout) -> dict[tuple[Site, int], Tensor]:
    """Gates [h] of zero for `heads` and of one for the others of their layers.

    ConfigError for a head that `layout` lacks.
    """
    gates: dict[tuple[Site, int], Tensor] = {}
    for head in heads:
        site_layer = (head.site, head.layer)
        if head.head >= layout.get(site_layer, 0):
            raise ConfigError(f"this model has no head {head}; it has {describe_heads(layout)}")
        gates.setdefault(site_layer, torch.ones(layout[site_layer]))[head.head] = 0.0
    return gates


@contextmanager
def masked(model: nn.Module, heads: Iterable[HeadId]) -> Iterator[None]:
    """Within the block the context of these heads is zero, before any mixing."""
    with gated(model, heads, before_mixing=True):
        yield


@contextmanager
def gated(model: nn.Module, gates: Gates | Iterable[HeadId], *, before_mixing: bool = False) -> Iterator[None]:
    """Within the block every head's context [b h t k] is multiplied by its gate, after mixing or before it.

    `gates` maps (site, layer) to [h] or [b h]; layers that are not named are not gated. An iterable of
    heads closes these. Gradients flow into the gates. ConfigError where the size of a gate is not the number
    of heads, and for one that is NaN or infinite.
    """
    layout = find_attention(model).layout
    by_layer = gates if isinstance(gates, Mapping) else closed(gates, layout)
    _check(by_layer, layout, computing_dtype(model))
    with track_calls(model) as tracker:

        def tap(call: AttentionCall, context: Tensor) -> Tensor | None:
            attention_site = tracker.attention_site(call.module)
            gate = None if attention_site is None else by_layer.get((attention_site.site, attention_site.layer))
            return None if gate is None else context * gate.to(context)[..., :, None, None]

        with tapped(tap, before_mixing=before_mixing):
            yield


def _check(gates: Gates, layout: Layout, dtype: torch.dtype) -> None:
    """ConfigError for gates of another size than there are heads, and for those that are not finite in `dtype`."""
    for (site, layer), gate in gates.items():
        heads = layout.get((site, layer), 0)
        if gate.ndim not in (1, 2) or gate.is_complex():
            kind = "complex numbers" if gate.is_complex() else f"a tensor of shape {list(gate.shape)}"
            raise ConfigError(f"gates for {site}.{layer} are {kind}; give a number for each head [h] or [b h]")
        if gate.shape[-1] != heads:
            raise ConfigError(
                f"{gate.shape[-1]} gates for {site}.{layer}, which has {heads} heads; "
                f"the model has {describe_heads(layout)}"
            )
    finite = [gate.detach().to(dtype).isfinite().all() for gate in gates.values()]
    if not finite or bool(torch.stack([each.to(finite[0].device) for each in finite]).all()):  # a GPU waits once
        return
    (site, layer), gate = next(entry for entry, each in zip(gates.items(), finite, strict=True) if not each)
    rows = gate.detach().reshape(-1, gate.shape[-1])  # [b h]
    row, head = (~rows.to(dtype).isfinite()).nonzero()[0].tolist()
    raise ConfigError(
        f"the gate of {site}.{layer}.{head} is {float(rows[row, head])}; gates are finite numbers (of "
        f"{str(dtype).removeprefix('torch.')}): 1 leaves a head as it is, 0 closes it"
    )
