"""Every head on one sentence: a tiny matrix a head, layers × heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from headscope.errors import ConfigError
from headscope.heads import SITES
from headscope.report.figures.attention import SentenceOptions, sentence_maps
from headscope.report.layout.grid import ABOVE, BELOW, LEFT, tick_step
from headscope.report.layout.output import cell_pitch, widest
from headscope.report.layout.page import BAR, LABEL, RULE, Page, flow, shorten
from headscope.report.registry import RUN, PlotFigure
from headscope.results.study import Study

WIDEST = 14.0
BETWEEN = 12  # a matrix is so many times as wide as the gap beside it


@dataclass(frozen=True)
class SiteMatrices:
    """The matrices of a site: `layers` has an array [h t s] for each layer."""

    site: str
    layers: Sequence[NDArray[np.floating]]

    @property
    def slots(self) -> int:
        """Heads of the largest layer."""
        return max(len(layer) for layer in self.layers)

    @property
    def pitch(self) -> tuple[int, int]:
        """Rows and columns of a matrix with the gap after it."""
        _, t, s = self.layers[0].shape
        return t + max(1, t // BETWEEN), s + max(1, s // BETWEEN)

    @property
    def filled(self) -> tuple[float, float]:
        """The shares of them that are the matrix."""
        _, t, s = self.layers[0].shape
        return t / self.pitch[0], s / self.pitch[1]

    def mosaic(self) -> NDArray[np.float64]:
        """All matrices as one, a gap of NaN after each: [layers · (t + gap) slots · (s + gap)]."""
        _, t, s = self.layers[0].shape
        down, across = self.pitch
        whole = np.full((len(self.layers) * down, self.slots * across), np.nan)
        for layer, heads in enumerate(self.layers):
            for head, weights in enumerate(heads):
                whole[layer * down : layer * down + t, head * across : head * across + s] = weights
        return whole


def sentence_glance(
    run: Study, *, sentence: str | None = None, index: int | None = None, target: str | None = None
) -> Figure:
    """All heads on one sentence, for which the run's checkpoint is opened once more."""
    checkpoint, line, maps = sentence_maps(run, sentence=sentence, index=index, target=target)
    sites = []
    for site in SITES:
        layers = sorted(layer for (own, layer), heads in checkpoint.layout.items() if own is site and heads)
        if layers and all((site, layer) in maps.captured.calls for layer in layers):
            weights = [maps.captured[site, layer]["weights"][0].float().cpu().numpy() for layer in layers]
            sites.append(SiteMatrices(site.value, weights))
    return glance_figure(sites, " → ".join(filter(None, (line.source, line.target))), run=run)


def glance_figure(sites: Sequence[SiteMatrices], sentence: str, *, run: Study | None = None) -> Figure:
    """A grid a site, queries down and keys across in each of its matrices, one scale from 0 to 1."""
    if not sites:
        raise ConfigError("no site was seen on this sentence; give --target TEXT for an encoder-decoder")
    pitch = {site.site: cell_pitch(0.62, site.slots, besides=LEFT + BAR + 0.1) for site in sites}
    sizes = [
        (LEFT + site.slots * pitch[site.site], ABOVE + len(site.layers) * pitch[site.site] + BELOW) for site in sites
    ]
    laid = flow(sizes, widest(WIDEST, besides=BAR), gap=(0.2, 0.12))
    wide = laid.width + BAR
    page = Page(
        wide,
        laid.height,
        title="Every head on one sentence",
        subtitle=shorten(sentence, widest(max(wide, 4.6)), LABEL),
        footer=run.signature if run else "",
    )
    norm = Normalize(0, 1)
    for site, (left, top) in zip(sites, laid.corners, strict=True):
        _draw(page, site, (left + LEFT, top + ABOVE), pitch[site.site], norm)
    page.color_bar(
        laid.width + 0.05, ABOVE, min(laid.height - ABOVE - BELOW, 2.0), ScalarMappable(norm, "Blues"), label="weight"
    )
    return page.finished()


def _draw(page: Page, site: SiteMatrices, corner: tuple[float, float], pitch: float, norm: Normalize) -> None:
    slots, layers = site.slots, len(site.layers)
    axes = page.axes(*corner, slots * pitch, layers * pitch)
    axes.imshow(
        site.mosaic(), cmap="Blues", norm=norm, aspect="auto", interpolation="nearest", extent=(0, slots, layers, 0)
    )
    tall, wide = site.filled
    for layer, heads in enumerate(site.layers):
        for head in range(len(heads)):
            axes.add_patch(Rectangle((head, layer), wide, tall, fill=False, edgecolor=RULE, linewidth=0.4))
    shown = range(0, slots, tick_step(slots, pitch))
    axes.set_xticks([slot + wide / 2 for slot in shown], [str(slot) for slot in shown])
    axes.set_yticks(np.arange(layers) + tall / 2, [str(layer) for layer in range(layers)])
    axes.set(xlim=(0, slots), ylim=(layers, 0), frame_on=False)
    axes.set_xlabel("head", size=LABEL, labelpad=2)
    axes.set_ylabel("layer", size=LABEL, labelpad=3)
    axes.set_title(site.site, size=LABEL, loc="left", pad=3, weight="bold", parse_math=False)


GLANCE = PlotFigure(
    "glance",
    "Every head on one sentence: a tiny matrix a head, layers × heads.",
    sentence_glance,
    Options=SentenceOptions,
    source=RUN,
    runs=1,
    order=305,
)
