"""Figures of pruning runs: quality, heads kept per site and layer, functions of the heads kept, gates in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headscope.config import option
from headscope.errors import ConfigError
from headscope.report.layout.legend import Entry, Legend
from headscope.report.layout.output import panel_width, widest
from headscope.report.layout.page import Page, even_width, flow
from headscope.report.layout.panels import chart, share_limits
from headscope.report.pruning.heads import Made, PruningPanel, gates, layers, sites
from headscope.report.pruning.quality import functions_kept, quality
from headscope.report.readers.pruning_runs import PruningRun, with_labels
from headscope.report.registry import PlotFigure, Source

WIDTH, HEIGHT = 2.6, 1.75  # inches of the axes of one panel
LEFT, ABOVE, BELOW, GAP = 0.52, 0.24, 0.36, (0.25, 0.12)
WIDEST = 10.0


@dataclass(frozen=True)
class PruningFigureOptions:
    """Options of the figure."""

    figure: str | None = option(
        None,
        "quality: metric against heads kept; sites: heads kept at each site; layers: in its layers; functions: of the "
        "survivors; gates: while they learn. Default: quality for sweeps, sites for other runs.",
        metavar="quality|sites|layers|functions|gates",
    )
    functions: Path | None = option(None, "A run of `headscope analyze` that labels the heads.", metavar="RUN")


def pruning_figure(runs: Sequence[PruningRun], figure: str | None = None, *, functions: Path | None = None) -> Figure:
    """One of the figures: quality, sites, layers, functions or gates; None is quality for sweeps, sites for other runs.

    `functions` is a run of `analyze` that labels heads. ConfigError for an unknown name; RunError where the runs lack
    what the figure shows.
    """
    kind = figure or ("quality" if any(run.measured for run in runs) else "sites")
    if kind not in FIGURES:
        raise ConfigError(f"--figure {kind!r} is not known; choose from {', '.join(FIGURES)}")
    title, make = FIGURES[kind]
    runs = with_labels(runs, functions) if functions else runs
    panels, legend = make(runs)
    return _page(runs, title, panels, legend)


def _page(runs: Sequence[PruningRun], title: str, panels: Sequence[PruningPanel], entries: Sequence[Entry]) -> Figure:
    wide = panel_width(WIDTH, len(panels), left=LEFT, gap=GAP[0], most=WIDEST)
    box = (LEFT + wide, ABOVE + HEIGHT + BELOW)
    laid = flow([box] * len(panels), even_width(len(panels), box[0], widest(WIDEST), gap=GAP[0]), gap=GAP)
    legend = Legend.plan(entries, widest(max(laid.width, 4.6)))
    models = ", ".join(dict.fromkeys(run.model for run in runs))
    counts = ", ".join(dict.fromkeys(f"{run.cells['of'].iloc[0]:.0f} heads ({' + '.join(run.sites)})" for run in runs))
    page = Page(
        laid.width,
        laid.height + legend.height,
        title=title,
        subtitle=f"{models} · {counts}",
        footer="\n".join(str(run.meta.get("signature", "")) for run in runs),
    )
    drawn: dict[str, list[Axes]] = {}
    for panel, (left, top) in zip(panels, laid.corners, strict=True):
        axes = page.axes(left + LEFT, top + ABOVE, wide, HEIGHT)
        chart(axes, title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, width=wide)
        panel.draw(axes)
        drawn.setdefault(panel.ylabel, []).append(axes)
    for alike in drawn.values():
        if alike[0].get_autoscaley_on():
            share_limits(alike)
    legend.draw(page, laid.height)
    return page.finished()


FIGURES: Mapping[str, tuple[str, Callable[[Sequence[PruningRun]], Made]]] = {
    "quality": ("What pruning costs", quality),
    "sites": ("Where the heads that stay are", sites),
    "layers": ("In which layers the heads that stay are", layers),
    "functions": ("Which functions survive", functions_kept),
    "gates": ("Gates while they learn", gates),
}


PRUNING = PlotFigure(
    "pruning",
    "What pruning costs, where the heads that stay are, which functions survive, and how gates learnt.",
    pruning_figure,
    Options=PruningFigureOptions,
    source=Source(
        "SWEEP|RUN",
        "Directories that `headscope prune sweep`, `l0`, `subset` or `rank` wrote.",
        "headscope.report.readers.pruning_runs:load_pruned",
        at_once=True,
    ),
    runs="together",
    order=500,
)
