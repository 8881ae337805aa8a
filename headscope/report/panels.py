"""Small multiples: one equal panel per (site, layer), in even lines, each site starting a line of its own."""

from __future__ import annotations

from dataclasses import dataclass

from headscope.report.page import Flow, even_width, flow
from headscope.report.run import Run

Place = tuple[str, int, int]
"""site, layer, number of heads"""


@dataclass(frozen=True)
class Panels:
    """The layers that have heads, and where their panels stand."""

    layers: list[Place]
    flow: Flow
    sites: int

    @classmethod
    def plan(cls, run: Run, size: tuple[float, float], *, widest: float) -> Panels:
        """Panels of `size` (labels included) in lines of at most `widest` inches."""
        layers = [
            (site, layer, count)
            for site, counts in run.layout.items()
            for layer, count in enumerate(counts)
            if count
        ]
        sites = [site for site, _, _ in layers]
        longest = max((sites.count(site) for site in sites), default=1)
        width = even_width(longest, size[0], widest)
        breaks = frozenset(n for n in range(1, len(sites)) if sites[n] != sites[n - 1])
        return cls(layers, flow([size] * len(layers), width, gap=(0.2, 0.12), breaks=breaks), len(set(sites)))

    def title(self, place: Place) -> str:
        """`layer 3`, with the site where the figure shows several."""
        return f"{place[0]} · layer {place[1]}" if self.sites > 1 else f"layer {place[1]}"
