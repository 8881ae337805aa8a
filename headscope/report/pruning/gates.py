"""How open every gate is while gates learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from headscope.report.layout.legend import SITE_COLORS as SITES
from headscope.report.layout.legend import Entry
from headscope.report.layout.page import INK, Swatch
from headscope.report.pruning.panel import PruningPanel, named
from headscope.report.readers.pruning_runs import PruningRun
from headscope.report.readers.run import RunError

MOST = 12  # trajectories in one figure


def gates(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[Entry]]:
    """How open every gate is while gates learn; of a sweep the first seed of each size."""
    panels: list[PruningPanel] = []
    sites: dict[str, None] = {}
    hidden = 0
    for run in runs:
        gated = run.cells[run.cells["cell"].isin(set(run.gates)) & (run.cells["control"] == "")]
        for (method, size), cells in gated.groupby(["method", "size"], sort=False):
            if len(panels) == MOST:
                hidden += 1
                continue
            name = str(cells["cell"].iloc[0])
            table = run.trajectory(name)
            sites |= dict.fromkeys(table["site"])
            title = named(runs, run, f"{method}, {size}")
            panels.append(PruningPanel(title, _gates_panel(table), "update", "probability of being open"))
    if not panels:
        raise RunError("no gates were learnt in these runs; l0 and subset write gates.csv")
    entries: list[Entry] = [(Swatch(width=1.8), SITES[site], f"{site}, mean") for site in SITES if site in sites]
    entries += [(Swatch(width=0.5), INK, "a head")]
    return panels, [*entries, *([("", "", f"{hidden} more sizes are not shown")] if hidden else [])]


def _gates_panel(table: pd.DataFrame) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        wide = table.pivot(index="update", columns=["site", "layer", "head"], values="open")
        for site in [site for site in SITES if site in set(table["site"])]:
            gates = wide[[site]]
            axes.plot(gates.index, gates, color=SITES[site], lw=0.5, alpha=0.45)
            axes.plot(gates.index, gates.mean(axis=1), color=SITES[site], lw=1.8)
        axes.set_ylim(-0.03, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    return draw
