"""Where the argmax of every head falls relative to the query: heads × offsets, one panel a layer."""

from __future__ import annotations

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from headscope.config.declarations import head_functions
from headscope.report.charts import Array, draw_cells, number_cells
from headscope.report.grid import layer_panels
from headscope.report.marks import functions_of
from headscope.report.sheet import Sheet, letters
from headscope.results.study import Study

REACH = 10  # offsets shown one by one at most; what is beyond goes into a tail on either side
SEEN = 0.01  # share of all queries of a head from which on an offset is shown by itself


def draw_offsets(run: Study, sheet: Sheet, _: object) -> None:
    """Share of queries whose most attended key lies at each offset; positional heads are framed."""
    shares = offset_shares(run)
    heads, columns = run.most_heads, next(iter(shares.values())).shape[1]
    reach = (columns - 3) // 2
    counted = {layer for layer, histogram in shares.items() if histogram.any()} or set(shares)
    size = (max(1.1 * columns, 12.0), heads * (1.25 if heads > 8 else 1.5))
    panels = layer_panels(sheet, run, size, counted, bar=True, beside=7.5)
    step = 4 if reach >= 8 else 2 if reach >= 2 else 1
    ticks = range(-(reach // step) * step, reach + 1, step)
    for (site, layer), axes in panels.items():
        shades = draw_cells(axes, shares[site, layer], cmap="Blues", norm=Normalize(0, 1))
        axes.vlines((1, columns - 1), 0, len(shares[site, layer]), color="#888888", linewidth=0.5)
        axes.set(ylim=(heads, 0), xlabel="offset: key − query", ylabel="head")
        number_cells(axes, y=heads)
        axes.set_xticks(
            [0.5, *(tick + reach + 1.5 for tick in ticks), columns - 0.5],
            ["<", *(f"{tick:+d}".replace("-", "−").replace("+0", "0") for tick in ticks), ">"],
        )
        _frame_positional(axes, run, site, layer, reach)
    sheet.scale(shades, list(panels.values()), "share of queries")
    family = head_functions()["positional"]
    meaning = "positional head, with the offset that holds at least 90 %"
    beyond = letters("<  >", f"offsets beyond −{reach} and +{reach}")
    sheet.key(letters(family.glyph + family.letter, meaning), beyond)
    sheet.headline("Offset of the most attended token", f"{run.model} · {run.data}")


def offset_shares(run: Study) -> dict[tuple[str, int], Array]:
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


def _frame_positional(axes: Axes, run: Study, site: str, layer: int, reach: int) -> None:
    """Frame the modal cell of positional heads and write the offset beside their row."""
    heads = run.heads_of(site, layer)
    for head, labels in zip(heads["head"], heads["functions"], strict=True):
        for function in functions_of(labels):
            if function.family.name == "positional" and function.detail.lstrip("+-").isdigit():
                column = int(np.clip(int(function.detail), -reach - 1, reach + 1)) + reach + 1
                axes.add_patch(Rectangle((column, head), 1, 1, fill=False, edgecolor="#d55e00", zorder=3))
                place = 2 * reach + 3.4, head + 0.5
                axes.text(*place, function.texts[0], size=rcParams["ytick.labelsize"], ha="left", va="center_baseline")
