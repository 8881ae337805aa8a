"""Attention sites, names of heads, and the heads that a list of names selects.

Axis legend, used by every shape comment of the project:

| axis | meaning |
| --- | --- |
| `b` | sentence in the batch |
| `h` | head (`g`: key/value group, where several query heads share one) |
| `t` | target position: the query |
| `s` | source position: the key |
| `d` | model width |
| `k` | width of one head |
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from headscope.errors import ConfigError
from headscope.files.reading import read_text


class Site(str, Enum):
    """Where attention happens: inside the encoder, inside the decoder, or from decoder to encoder."""

    ENCODER_SELF = "encoder-self"
    DECODER_SELF = "decoder-self"
    CROSS = "cross"

    def __str__(self) -> str:
        return self.value


SITES = tuple(Site)


@dataclass(frozen=True, order=True)
class HeadId:
    """One head, written `encoder-self.2.5`: site, layer from 0, head from 0."""

    site: Site
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.site}.{self.layer}.{self.head}"

    @classmethod
    def parse(cls, text: str, layout: Layout | None = None) -> HeadId:
        """Read `site.layer.head`, or `layer.head` of a layout with one site; anything else raises ConfigError."""
        match = _NAME.fullmatch(text.strip())
        if match is None or "*" in match[0]:
            raise ConfigError(_bad_name(text, layout))
        return cls(_site(match, layout), int(match[2]), int(match[3]))

    @classmethod
    def of_row(cls, row: Mapping[Any, Any]) -> HeadId:
        """The head of a table's row with the columns site, layer and head."""
        return cls(Site(row["site"]), int(row["layer"]), int(row["head"]))

    def name(self, sites: Collection[object]) -> str:
        """The name among heads of these `sites`: `2.5` if there is one site, else `encoder-self.2.5`."""
        return str(self) if len(sites) > 1 else f"{self.layer}.{self.head}"


SiteLayer = tuple[Site, int]
Layout = Mapping[SiteLayer, int]
"""Number of heads of every (site, layer); layers may have different numbers of heads."""

_NAME = re.compile(rf"(?:({'|'.join(SITES)})\.)?(\*|\d{{1,9}})\.(\*|\d{{1,9}})", re.ASCII)


def select_heads(names: str, layout: Layout) -> list[HeadId]:
    """Heads that a list selects: `encoder-self.2.5,cross.0.*`, or a file with one name a line.

    `*` stands for every layer or every head; a model with one site needs no site in names: `2.5`. ConfigError for a
    name that is malformed or that selects no head of this model.
    """
    heads, prefix = list(all_heads(layout)), ""
    if "," not in names and os.path.isfile(names):
        prefix, names = f"{names}: ", ",".join(read_text(Path(names), error=ConfigError).split())
    selected_heads: dict[HeadId, None] = {}
    for name in dict.fromkeys(filter(None, (part.strip() for part in names.split(",")))):
        if (match := _NAME.fullmatch(name)) is None:
            reason = "it is a directory" if os.path.isdir(name) else "there is no file of that name either"
            no_file = "" if prefix or "," in names else f"; {reason}"
            raise ConfigError(prefix + _bad_name(name, layout, no_file))
        site = _site(match, layout)
        layer, number = (None if field == "*" else int(field) for field in match.groups()[1:])
        matches = [
            head for head in heads if head.site is site and layer in (None, head.layer) and number in (None, head.head)
        ]
        if not matches:
            raise ConfigError(f"{prefix}no head of this model is called {name[:60]!r}; {_existing_heads(layout)}")
        selected_heads.update(dict.fromkeys(matches))
    return list(selected_heads)


def all_heads(layout: Layout) -> Iterable[HeadId]:
    """Every head, in the order of sites, layers, heads."""
    for site, layer in sorted(layout, key=lambda key: (SITES.index(key[0]), key[1])):
        for head in range(layout[site, layer]):
            yield HeadId(site, layer, head)


def by_layer(heads: Iterable[HeadId]) -> dict[SiteLayer, list[int]]:
    """The numbers of heads in each (site, layer) that has any, in their order."""
    numbers: dict[SiteLayer, list[int]] = {}
    for head in heads:
        numbers.setdefault((head.site, head.layer), []).append(head.head)
    return numbers


def refuse_absent(heads: Iterable[HeadId], layout: Layout) -> None:
    """ConfigError for a head that a model of this layout lacks."""
    for head in heads:
        if head.head >= layout.get((head.site, head.layer), 0):
            raise ConfigError(f"this model has no head {head}; it has {describe_heads(layout)}")


def counts_of(layout: Layout, site: Site) -> list[int]:
    """The number of heads of each layer up to the last of a site; 0 for layers without attention (hybrids as Jamba)."""
    layers = [layer for other_site, layer in layout if other_site is site]
    return [layout.get((site, layer), 0) for layer in range(max(layers, default=-1) + 1)]


def describe_heads(layout: Layout) -> str:
    """`encoder-self 6 × 12, cross 6 × 8`; head counts that differ between layers are listed."""
    parts = []
    for site in SITES:
        counts = counts_of(layout, site)
        if counts:
            heads = str(counts[0]) if len(set(counts)) == 1 else "/".join(map(str, counts))
            parts.append(f"{site} {len(counts)} × {heads}")
    return ", ".join(parts)


def _site(match: re.Match[str], layout: Layout | None) -> Site:
    """The site in a name; without one, the model's only site."""
    sites = list(dict.fromkeys(site for site, _ in layout or ()))
    if match[1] is None and len(sites) != 1:
        raise ConfigError(_bad_name(match[0], layout))
    return Site(match[1]) if match[1] else sites[0]


def _bad_name(text: str, layout: Layout | None, more: str = "") -> str:
    sites = ", ".join(site.value for site in SITES)
    advice = f"write SITE.LAYER.HEAD (SITE: {sites}), such as encoder-self.2.5"
    return f"{text[:60]!r} is not the name of a head{more}; {_existing_heads(layout) if layout else advice}"


def _existing_heads(layout: Layout) -> str:
    *_, last = all_heads(layout)
    example = last.name({site for site, _ in layout})
    return f"this model has {describe_heads(layout)}: write {example} for the last head"
