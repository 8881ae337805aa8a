"""Where the argmax of every head falls relative to the query: heads × offsets, one panel a layer."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from headscope.config.declarations import head_functions
from headscope.report.layout.grid import draw_cells
from headscope.report.layout.legend import Function, Legend, functions_of
from headscope.report.layout.output import widest
from headscope.report.layout.page import BAR, LABEL, TICK, Page, text_width
from headscope.report.layout.panels import PanelLayer, Panels, shared_pitch
from headscope.results.study import Study

REACH = 10  # offsets shown one by one at most; what is beyond goes into a tail on either side
SEEN = 0.01  # share of all queries of a head from which on an offset is shown by itself
LEAST = 1.15  # inches of a panel: room for its title and ticks
PITCH = 0.105  # inches of a cell: room for a head number of 6.5 points
LEFT, ABOVE, RIGHT, BELOW = 0.36, 0.2, 0.4, 0.3


def offset_histograms(run: Study) -> Figure:
    """Share of queries whose most attended key lies at each offset; positional heads are framed."""
    rows = run.most_heads
    pitch = PITCH if rows > 8 else 0.13
    shares = offset_shares(run)  # before the page: a missing table must not cost a layout
    columns = next(iter(shares.values())).shape[1]
    reach = (columns - 3) // 2
    counted = {layer for layer, histogram in shares.items() if histogram.any()} or set(shares)
    cell = shared_pitch(PITCH, columns, run, left=LEFT + RIGHT, most=13.4, besides=BAR, only=counted)
    width = max(columns * cell, LEAST)
    size = (LEFT + width + RIGHT, ABOVE + rows * pitch + BELOW)
    panels = Panels.plan(run, size, widest=widest(13.4, besides=BAR), only=counted)
    family = head_functions()["positional"]
    meaning = "positional head, with the offset that holds at least 90 %"
    entries = [(family.glyph + family.letter, "", meaning), ("<  >", "", f"offsets beyond −{reach} and +{reach}")]
    legend = Legend.plan(entries, widest(panels.flow.width + BAR))
    page = Page(
        panels.flow.width + BAR,
        panels.flow.height + legend.height,
        title="Offset of the most attended token",
        subtitle=f"{run.model} · {run.data}",
        footer=run.signature,
    )
    norm = Normalize(0, 1)
    for panel, (left, top) in panels:
        axes = panels.axes(page, panel, left + LEFT, top + ABOVE, width, panel[2] * pitch)
        _draw(axes, shares[panel[:2]], norm, first=left == 0)
        _frame(axes, run, panel, reach)
    bar = ScalarMappable(norm, "Blues")
    page.color_bar(panels.flow.width + 0.08, ABOVE, min(rows * pitch, 2.0), bar, label="share of queries")
    legend.draw(page, panels.flow.height)
    return page.finished()


def offset_shares(run: Study) -> dict[tuple[str, int], NDArray[np.float64]]:
    """Per site and layer [h offset]: the lower tail, as far as any head looks (at most −10 … 10), the upper tail.

    Tails are shares of all queries, the others of those that have a key there.
    """
    table = run.table("positional", "offset", "count", "share")
    of_all = table["count"] / table.groupby(["site", "layer", "head"])["count"].transform("sum")
    seen = table["offset"][of_all >= SEEN].abs()
    reach = int(min(max(seen.max() if len(seen) else 1, 1), REACH))
    shares = {
        (site, layer): np.zeros((count, 2 * reach + 3))
        for site, counts in run.layout.items()
        for layer, count in enumerate(counts)
    }
    columns = table["offset"].clip(-reach - 1, reach + 1) + reach + 1
    shown = table["share"].where(table["offset"].abs() <= reach, of_all)
    rows = zip(table["site"], table["layer"], table["head"], columns, shown, strict=True)
    for site, layer, head, column, share in rows:
        shares[site, layer][head, int(column)] += share
    return shares


def _draw(axes: Axes, shares: NDArray[np.float64], norm: Normalize, *, first: bool) -> None:
    draw_cells(axes, shares, cmap="Blues", norm=norm, edge=0.3)
    heads, columns = shares.shape
    reach = (columns - 3) // 2
    step = 4 if reach >= 8 else 2 if reach >= 2 else 1
    ticks = range(-(reach // step) * step, reach + 1, step)
    axes.set_yticks(np.arange(heads) + 0.5, [str(head) for head in range(heads)])
    axes.set_xticks(
        [0.5, *(tick + reach + 1.5 for tick in ticks), columns - 0.5],
        ["<", *(f"{tick:+d}".replace("-", "−").replace("+0", "0") for tick in ticks), ">"],
    )
    for tail in (1, columns - 1):
        axes.axvline(tail, color="#888888", linewidth=0.5)
    axes.set_xlabel("offset: key − query", size=LABEL, labelpad=1.5)
    if first:
        axes.set_ylabel("head", size=LABEL, labelpad=2)


def _frame(axes: Axes, run: Study, panel: PanelLayer, reach: int) -> None:
    """Frame the modal cell of positional heads and write the offset beside their row."""
    site, layer, _ = panel
    heads = run.heads_of(site, layer)
    for head, labels in zip(heads["head"], heads["functions"], strict=True):
        for function in functions_of(labels):
            if function.family.name == "positional" and _offset(function) is not None:
                column = int(np.clip(_offset(function) or 0, -reach - 1, reach + 1)) + reach + 1
                frame = Rectangle((column, head), 1, 1, fill=False, edgecolor="#d55e00", linewidth=0.9, zorder=3)
                axes.add_patch(frame)
                mark = function.mark if text_width(function.mark, TICK) < RIGHT else function.short
                axes.text(2 * reach + 3.4, head + 0.5, mark, size=TICK, ha="left", va="center_baseline")


def _offset(function: Function) -> int | None:
    try:
        return int(function.detail)
    except ValueError:
        return None
