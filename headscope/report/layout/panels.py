"""Small multiples: one equal panel per (site, layer), in even lines, each site starting a line of its own."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from headscope.report.layout.page import LABEL, Flow, even_width, flow, text_width
from headscope.report.readers.run import AnalysisRun

PanelLayer = tuple[str, int, int]
"""site, layer, number of heads"""
TITLE_LEFT = 0.5  # inches left of a panel's title: the labels of its rows


@dataclass(frozen=True)
class Panels:
    """The layers that have heads, and where their panels stand."""

    layers: list[PanelLayer]
    flow: Flow
    sites: int

    @classmethod
    def plan(
        cls,
        run: AnalysisRun,
        size: tuple[float, float],
        *,
        widest: float,
        only: Container[tuple[str, int]] | None = None,
    ) -> Panels:
        """Panels of `size` (labels included) in lines of at most `widest` inches; of `only` these layers, if given."""
        layers = [
            (site, layer, count)
            for site, counts in run.layout.items()
            for layer, count in enumerate(counts)
            if count and (only is None or (site, layer) in only)
        ]
        sites = [site for site, _, _ in layers]
        longest = max((sites.count(site) for site in sites), default=1)
        titles = [_title(layer, sites=len(set(sites))) for layer in layers]
        needed = max((text_width(title, LABEL, weight="bold") for title in titles), default=0) + TITLE_LEFT
        size = (max(size[0], min(needed, widest)), size[1])
        width = even_width(longest, size[0], widest)
        breaks = frozenset(n for n in range(1, len(sites)) if sites[n] != sites[n - 1])
        return cls(layers, flow([size] * len(layers), width, gap=(0.2, 0.12), breaks=breaks), len(set(sites)))

    def title(self, layer: PanelLayer) -> str:
        """`layer 3`, with the site where the figure shows several."""
        return _title(layer, sites=self.sites)


def _title(layer: PanelLayer, *, sites: int) -> str:
    return f"{layer[0]} · layer {layer[1]}" if sites > 1 else f"layer {layer[1]}"
