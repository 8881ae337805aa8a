"""Which function each head has, and how many heads of a layer have each function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from headscope.config import option
from headscope.config.declarations import HeadFunction, head_functions
from headscope.description.sentences import leading_group
from headscope.report.figures.explained import PARTS
from headscope.report.layout.grid import ABOVE, BELOW, LEFT, MISSING, Grid, cell_size, grids_of, label_grid
from headscope.report.layout.legend import Function, Legend, contrast, fit, legend_entries
from headscope.report.layout.output import widest
from headscope.report.layout.page import LABEL, PALE, RULE, TICK, Page, flow, text_width
from headscope.report.registry import PlotFigure
from headscope.results.study import Study

COUNTS, NARROW = 1.5, 0.8  # inches of the bars beside a map, and where the width is scarce
BAND = 0.125  # inches a function needs in its cell
SHADE = 0.38  # of the colour of what explains a head without a function
MOST = 4  # functions of one head that are all written; more are counted


@dataclass(frozen=True)
class FunctionsOptions:
    """Options of the figure."""

    unsupported: bool = option(False, "Also draw functions that lack evidence, hollow; they count in no bar.")


def functions_figure(run: Study, *, unsupported: bool = False) -> Figure:
    """A cell per head, a coloured band per function; beside it the heads per layer by function.

    Of a run with `explained` heads without a function have the shade of what explains most of them. With `unsupported`
    functions that lack evidence have hollow bands; the bars do not count them. Sites without heads are left out.
    """
    every = grids_of(run, unsupported=unsupported)
    grids = [grid for grid in every if grid.heads.size] or every
    busiest = max((grid.busiest for grid in grids), default=0)
    slots = max(grid.heads.shape[1] for grid in grids) if grids else 0
    tall = max(_cell(slots)[1], BAND * min(busiest, MOST))
    sizes = [_panel_size(grid, tall) for grid in grids]
    laid = flow(sizes, widest(14.0), gap=(0.35, 0.12))
    entries = legend_entries((mark for grid in grids for mark in grid.marks), boxed=True)
    grounds = [_grounds(run, grid) for grid in grids]
    shades = dict(found for of_site in grounds for found in of_site.values())
    entries += [
        ("    ", shades[word], f"no function found; mostly explained by {word}")
        for word, _ in PARTS.values()
        if word in shades
    ]
    entries.append(("    ", PALE, "no function found" + ", less than half explained" * bool(shades)))
    if any(grid.ragged for grid in grids):
        entries.append(("///", "", "no such head in this layer"))
    legend = Legend.plan(entries, widest(max(laid.width, 4.6)))
    page = Page(
        laid.width,
        laid.height + legend.height,
        title="Functions of attention heads",
        subtitle=f"{run.model} · {run.data}",
        footer=run.signature,
    )
    longest = max((sum(row.values()) for grid in grids for row in _families(grid)), default=0)
    for grid, corner, of_site in zip(grids, laid.corners, grounds, strict=True):
        _draw_panel(page, grid, corner, tall, longest=max(longest, 1), grounds=of_site)
    legend.draw(page, laid.height)
    return page.finished()


def _reach(grid: Grid) -> float:
    """Inches of the map, or of its title where that is longer: the bars stand beyond both."""
    slots: int = grid.heads.shape[1]
    return float(max(slots * _cell(slots)[0], text_width(grid.site, LABEL, weight="bold")))


def _bars() -> float:
    return COUNTS if widest(10.0) >= 6 else NARROW


def _cell(slots: int) -> tuple[float, float]:
    return cell_size(slots, besides=LEFT + 0.15 + _bars() + 0.1)


def _panel_size(grid: Grid, tall: float) -> tuple[float, float]:
    layers = len(grid.heads)
    return LEFT + _reach(grid) + 0.15 + _bars(), ABOVE + layers * tall + BELOW


def _grounds(run: Study, grid: Grid) -> dict[tuple[int, int], tuple[str, str]]:
    """By layer and head what explains most of a head, in words, and a pale shade of its colour in `explained`.

    Only of heads of which a description says at least half, and which have no function with evidence.
    """
    found = {}
    for row in run.heads[run.heads["site"] == grid.site].to_dict("records"):
        layer, head = int(row["layer"]), int(row["head"])
        if (group := leading_group(row)) and all(function.hollow for function in grid.functions[layer][head]):
            word, color = PARTS[group]
            red, green, blue = (SHADE * part + 1 - SHADE for part in to_rgb(color))
            found[layer, head] = word, to_hex((red, green, blue))
    return found


def _draw_panel(
    page: Page,
    grid: Grid,
    corner: tuple[float, float],
    tall: float,
    *,
    longest: int,
    grounds: Mapping[tuple[int, int], tuple[str, str]],
) -> None:
    layers, slots = grid.heads.shape
    wide = _cell(slots)[0]
    left, top = corner[0] + LEFT, corner[1] + ABOVE
    axes = page.axes(left, top, slots * wide, layers * tall)
    if grid.ragged:
        axes.patch.set(hatch=MISSING, edgecolor=RULE, facecolor="white", linewidth=0)
    for layer, row in enumerate(grid.functions):
        for slot, functions in enumerate(row):
            if grid.heads[layer, slot] >= 0:
                _, ground = grounds.get((layer, slot), ("", PALE))
                _draw_head(axes, slot, layer, functions, wide, ground=ground)
    axes.set(xlim=(0, slots), ylim=(layers, 0))
    label_grid(axes, grid, title=grid.site, cell=wide)
    bars = page.axes(left + _reach(grid) + 0.15, top, _bars(), layers * tall)
    _draw_counts(bars, grid, longest=longest)


def _draw_head(axes: Axes, x: int, y: int, functions: Sequence[Function], wide: float, *, ground: str) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=ground, edgecolor="white", linewidth=0.8))
    shown = functions if len(functions) <= MOST else functions[: MOST - 1]
    bands = max(len(shown) + (len(shown) < len(functions)), 1)
    for number, function in enumerate(shown):
        color = function.family.color
        top = y + number / bands
        if function.hollow:
            inside = (x + 0.06, top + 0.06 / bands), 0.88, 0.88 / bands
            axes.add_patch(Rectangle(*inside, facecolor="white", edgecolor=color, linewidth=1))
        else:
            axes.add_patch(Rectangle((x, top), 1, 1 / bands, facecolor=color, edgecolor="white", linewidth=0.8))
        ink = "black" if function.hollow else contrast(color)
        _write(axes, x, top + 0.5 / bands, fit(function, wide - 0.03, TICK), ink)
    if len(shown) < len(functions):
        _write(axes, x, y + 1 - 0.5 / bands, f"+{len(functions) - len(shown)}", "black")


def _write(axes: Axes, x: int, y: float, text: str, ink: str) -> None:
    axes.text(x + 0.5, y, text, size=TICK, color=ink, ha="center", va="center_baseline")


def _families(grid: Grid) -> list[dict[HeadFunction, int]]:
    """Per layer: how many heads have at least one function of each family."""
    rows = []
    for row in grid.functions:
        counts: dict[HeadFunction, int] = {}
        for cell in row:
            for family in dict.fromkeys(function.family for function in cell if not function.hollow):
                counts[family] = counts.get(family, 0) + 1
        rows.append(counts)
    return rows


def _draw_counts(axes: Axes, grid: Grid, *, longest: int) -> None:
    """Stacked bars in line with the rows of the map; a head with two families counts in both."""
    order = list(head_functions().values())
    for layer, counts in enumerate(_families(grid)):
        start = 0
        for family in sorted(counts, key=lambda f: order.index(f) if f in order else len(order)):
            axes.barh(
                layer + 0.5,
                counts[family],
                left=start,
                height=0.62,
                color=family.color,
                edgecolor="white",
                linewidth=0.6,
            )
            start += counts[family]
    axes.set(xlim=(0, longest), ylim=(len(grid.functions), 0), yticks=[])
    axes.set_xticks(sorted({0, longest // 2, longest}))
    axes.set_xlabel("heads with the function", size=LABEL, labelpad=2)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


FUNCTIONS = PlotFigure(
    "functions",
    "Which function each head has, and how many heads of each layer have it.",
    functions_figure,
    Options=FunctionsOptions,
    every_run=True,
    order=20,
)
