"""Every head on one sentence: a tiny matrix a head, layers × heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from headscope.errors import ConfigError
from headscope.heads import SITES
from headscope.report.charts import Array, hide_frame, number_cells
from headscope.report.figures.attention import SentenceOptions, sentence_maps
from headscope.report.registry import RUN, PlotFigure
from headscope.report.sheet import RULE, Sheet
from headscope.results.study import Study

BETWEEN = 12  # a matrix is so many times as wide as the gap beside it
SIDE = 6.5  # ems of a matrix
Layers = Sequence[NDArray[np.floating]]
"""The matrices [h t s] of each layer of a site."""


def draw_glance(run: Study, sheet: Sheet, options: SentenceOptions) -> None:
    """All heads on one sentence, for which the run's checkpoint is opened once more."""
    checkpoint, line, maps = sentence_maps(run, options)
    sites: dict[str, Layers] = {}
    for site in SITES:
        layers = sorted(layer for (own, layer), heads in checkpoint.layout.items() if own is site and heads)
        if layers and all((site, layer) in maps.captured.calls for layer in layers):
            sites[site.value] = [maps.captured[site, layer]["weights"][0].float().cpu().numpy() for layer in layers]
    draw_matrices(sheet, sites, " → ".join(filter(None, (line.source, line.target))))


def draw_matrices(sheet: Sheet, sites: Mapping[str, Layers], sentence: str) -> None:
    """A grid a site, queries down and keys across in each of its matrices, one scale from 0 to 1."""
    if not sites:
        raise ConfigError("no site was seen on this sentence; give --target TEXT for an encoder-decoder")
    sizes = [(max(map(len, layers)) * SIDE, len(layers) * SIDE) for layers in sites.values()]
    panels = sheet.panels(list(sites), sizes, bar=True, share="")
    for axes, layers in zip(panels, sites.values(), strict=True):
        shades = _draw_site(axes, layers)
    sheet.scale(shades, panels, "weight")
    sheet.headline("Every head on one sentence", sentence)


def mosaic(layers: Layers) -> Array:
    """All matrices as one, a gap of NaN after each: [layers · (t + gap) slots · (s + gap)]."""
    _, t, s = layers[0].shape
    down, across = t + max(1, t // BETWEEN), s + max(1, s // BETWEEN)
    whole = np.full((len(layers) * down, max(map(len, layers)) * across), np.nan)
    for layer, heads in enumerate(layers):
        for head, weights in enumerate(heads):
            whole[layer * down : layer * down + t, head * across : head * across + s] = weights
    return whole


def _draw_site(axes: Axes, layers: Layers) -> AxesImage:
    whole, slots = mosaic(layers), max(map(len, layers))
    looks = {"cmap": "Blues", "norm": Normalize(0, 1), "aspect": "auto", "interpolation": "nearest"}
    shades = axes.imshow(whole, extent=(0, slots, len(layers), 0), **looks)  # type: ignore[arg-type]
    _, t, s = layers[0].shape
    tall, wide = t * len(layers) / len(whole), s * slots / whole.shape[1]
    for layer, heads in enumerate(layers):
        for head in range(len(heads)):
            axes.add_patch(Rectangle((head, layer), wide, tall, fill=False, edgecolor=RULE, linewidth=0.4))
    hide_frame(axes)
    number_cells(axes, x=slots, y=len(layers))
    axes.set(xlabel="head", ylabel="layer")
    return shades


GLANCE = PlotFigure(
    "glance",
    "Every head on one sentence: a tiny matrix a head, layers × heads.",
    draw_glance,
    Options=SentenceOptions,
    source=RUN,
    runs=1,
    order=305,
)
