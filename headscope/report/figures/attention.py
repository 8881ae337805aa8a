"""Attention maps of chosen heads over one sentence, with its subwords on both axes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.errors import ConfigError
from headscope.report.layout.page import BAR, LABEL, TICK, Page, even_width, flow, shorten, text_width
from headscope.report.layout.style import cell_pitch, widest
from headscope.report.readers.run import AnalysisRun

LONGEST = 0.9  # inches of a subword's label; longer ones end in an ellipsis
ABOVE = 0.2
WIDEST = 14.0
SMALLEST = 99  # subwords that make cells as small as they get
MANY = 4096  # cells: more are an image in vector graphics too


def attention_figure(
    weights: NDArray[np.floating],
    subwords_t: Sequence[str],
    subwords_s: Sequence[str],
    names: Sequence[str],
    *,
    run: AnalysisRun | None = None,
) -> Figure:
    """`weights` [n t s] of the heads `names`: queries down, keys across, one scale from 0 to 1."""
    weights = np.asarray(weights, dtype=np.float64)
    expected = (len(names), len(subwords_t), len(subwords_s))
    if weights.shape != expected or not weights.size:
        raise ConfigError(
            f"attention maps need weights [heads queries keys] of shape {expected}, none of them 0; got {weights.shape}"
        )
    rows, columns = ([shorten(_shown(subword), LONGEST, TICK) for subword in side] for side in (subwords_t, subwords_s))
    label_width, label_height = (max(text_width(subword, TICK) for subword in side) + 0.08 for side in (rows, columns))
    usual = _pitch(max(expected[1:]))
    pitch = cell_pitch(usual, len(columns), besides=label_width + 0.1 + BAR, least=_pitch(SMALLEST))
    wide, tall = len(columns) * pitch, len(rows) * pitch
    most = widest(WIDEST, besides=BAR)
    title = min(max(text_width(name, LABEL, weight="bold") for name in names), most - label_width - 0.1)
    size = (label_width + max(wide, title) + 0.1, ABOVE + tall + label_height)
    laid = flow(list(repeat(size, len(names))), even_width(len(names), size[0], most))
    page = Page(
        laid.width + BAR,
        laid.height + 0.14,
        title="Attention weights",
        subtitle="rows: queries, columns: keys" + (f" · {run.model}" if run else ""),
        footer=run.signature if run else "",
    )
    norm = Normalize(0, 1)
    for name, matrix, (x, y) in zip(names, weights, laid.corners, strict=True):
        axes = page.axes(x + label_width, y + ABOVE, wide, tall)
        _draw(axes, matrix, norm, rows, columns)
        axes.set_title(name, size=LABEL, loc="left", pad=3, weight="bold", parse_math=False)
    bar = ScalarMappable(norm, "Blues")
    page.color_bar(laid.width + 0.05, ABOVE, min(tall, 2.0), bar, label="weight")
    return page.finished()


def _draw(axes: Axes, weights: NDArray[np.float64], norm: Normalize, rows: list[str], columns: list[str]) -> None:
    queries, keys = weights.shape
    edges = np.arange(keys + 1), np.arange(queries + 1)
    axes.pcolormesh(*edges, weights, cmap="Blues", norm=norm, rasterized=weights.size > MANY)
    axes.set(xlim=(0, keys), ylim=(queries, 0))
    axes.set_yticks(np.arange(queries) + 0.5, rows, parse_math=False)
    axes.set_xticks(np.arange(keys) + 0.5, columns, parse_math=False, rotation=90)
    for line in range(1, max(queries, keys)):  # faint rules lead the eye from a cell to its subwords
        if line < queries:
            axes.axhline(line, color="#eeeeee", linewidth=0.25)
        if line < keys:
            axes.axvline(line, color="#eeeeee", linewidth=0.25)


def _pitch(subwords: int) -> float:
    """Inches of a cell; never below what a label of 6.5 points needs."""
    return 0.18 if subwords <= 14 else 0.14 if subwords <= 30 else 0.105


def _shown(subword: str) -> str:
    """Line breaks and blanks made visible: a label must stay one line and never be empty."""
    return subword.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"
