"""Heads and gates by name, as Python gives them: which heads, gates by layer, and how a signature has them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from headscope.config.option import format_value
from headscope.errors import ConfigError
from headscope.heads import HeadId, Layout, Site, all_heads, select_heads
from headscope.model.taps import Gates, close_gates

LISTED = 8  # heads that a signature lists by name
Heads: TypeAlias = "str | HeadId | Iterable[str | HeadId]"
"""`"encoder-self.2.5"`, with `*` for every layer or head and commas between names, a file with a name a line, a
`HeadId`, or several of these."""
GateValues: TypeAlias = "Mapping[str | HeadId, float | Tensor] | Mapping[tuple[Site | str, int], Tensor]"
"""A number for each head, by its name, or gates [h] or [b h] for each (site, layer)."""


def head_ids_of(heads: Heads, layout: Layout, *, name: str = "heads") -> list[HeadId]:
    """The selected heads of a model, without duplicates; ConfigError for a name that selects none.

    `name` is the argument's, for messages.
    """
    example = next(iter(all_heads(layout))).name({site for site, _ in layout})
    entries = [heads] if isinstance(heads, (str, HeadId)) else heads
    if isinstance(entries, (bytes, Mapping)) or not isinstance(entries, Iterable):
        is_ranking = hasattr(heads, "lowest")
        instead = "its heads, ranking.lowest(12)" if is_ranking else f"names such as {example!r}, or a list"
        raise ConfigError(f"{name}: a {type(heads).__name__} names no heads; give {instead}")
    head_ids: dict[HeadId, None] = {}
    for entry in entries:
        if not isinstance(entry, (str, HeadId)):
            raise ConfigError(f"{name}: {format_value(entry)} is no head; write it as {example!r}")
        head_ids.update(dict.fromkeys(select_heads(str(entry), layout)))
    return list(head_ids)


def gates_of(gates: Heads | GateValues, layout: Layout) -> Gates:
    """Gates [h] or [b h] by (site, layer): heads in a list are closed, heads in a mapping get its number.

    ConfigError for heads and layers that the model does not have, and for gates that are no numbers.
    """
    if not isinstance(gates, Mapping):
        return close_gates(head_ids_of(gates, layout, name="gates"), layout)
    by_layer: dict[tuple[Site, int], Tensor] = {}
    for key, value in gates.items():
        if isinstance(key, tuple):
            names = {(site.value, layer): (site, layer) for site, layer in layout}
            name = (getattr(key[0], "value", key[0]), *key[1:])
            if name not in names:
                layers = ", ".join(f"({site!r}, {layer})" for site, layer in names)
                raise ConfigError(f"this model has no layer {name!r}; it has {layers}")
            by_layer[names[name]] = _numbers(key, value)
            continue
        number = _numbers(key, value, single=True)
        for head in head_ids_of(key, layout, name="gates"):
            site_layer = (head.site, head.layer)
            row = by_layer.setdefault(site_layer, torch.ones(layout[site_layer]))
            by_layer[site_layer] = torch.where(torch.arange(len(row)) == head.head, number.to(row), row)
    return by_layer


def _numbers(key: Any, value: Any, *, single: bool = False) -> Tensor:
    """Gates as a tensor, `single` of one number; ConfigError where they are none."""
    try:
        numbers = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        numbers = torch.empty(0)
    if not numbers.numel() or (single and (numbers.numel() > 1 or numbers.is_complex())):
        requirement = "a number" if single else "a number for each head, a tensor [h] or [b h]"
        raise ConfigError(f"the gate of {key!r} is {format_value(value)}; give {requirement}")
    return numbers.reshape(()) if single else numbers


def gates_name(gates: Gates) -> str:
    """Gates in a signature: the heads whose gates are not one, or a digest of many gates."""
    rows = {site_layer: gate.detach().cpu() for site_layer, gate in gates.items()}
    single = {site_layer: gate for site_layer, gate in rows.items() if gate.ndim == 1}
    names = [
        f"{HeadId(*site_layer, head)}={value:g}"
        for site_layer, gate in single.items()
        for head, value in enumerate(gate.tolist())
        if value != 1
    ]
    if len(single) == len(rows) and len(names) <= LISTED:
        return ",".join(names)
    entries = sorted(f"{site}.{layer} {gate.double().tolist()}" for (site, layer), gate in rows.items())
    return f"sha1={hashlib.sha1(''.join(entries).encode()).hexdigest()[:8]}"
