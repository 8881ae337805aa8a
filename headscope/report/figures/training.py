"""Training curves of several runs: loss, BLEU, and what each variant logs of its gates, matrices and swaps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.config import option
from headscope.config.declarations import measure_of
from headscope.errors import ConfigError
from headscope.files.reading import read_json
from headscope.files.tables import read_csv
from headscope.heads import SITES
from headscope.report.layout.legend import COLORS, Entry, Legend
from headscope.report.layout.output import panel_width, widest
from headscope.report.layout.page import INK, LABEL, Page, Swatch, flow, text_width
from headscope.report.layout.panels import chart, share_limits
from headscope.report.registry import TRAINED, PlotFigure
from headscope.results.study_tables import RunError

WIDTH, HEIGHT = 2.75, 1.7  # inches of the axes of one panel
LEFT, ABOVE, BELOW, GAP = 0.52, 0.24, 0.36, (0.22, 0.1)
WIDEST = 3 * (LEFT + WIDTH) + 2 * GAP[0]
ENGINE = {
    *("update", "epoch", "sentences", "tokens", "seconds", "tokens_per_second", "lr", "loss", "gradient_norm"),
    *("valid_perplexity", "best", "window"),
}
AXES = {"update": "update", "tokens": "target tokens", "seconds": "seconds"}


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the figure."""

    axis: str = option("update", "What runs from left to right: update, tokens or seconds.", metavar="NAME")


@dataclass(frozen=True)
class Quantity:
    """A quantity with a title of its own: `column` of metrics.csv, or columns by site where they end in `.site`."""

    title: str
    unit: str
    column: str


QUANTITIES = (
    Quantity("Loss of training batches", "nats per token", "nll"),
    Quantity("Loss of the validation text", "nats per token", "valid_nll"),
    Quantity("BLEU of the validation text", "BLEU", "bleu"),
    Quantity("Gates: entropy", "nats", "gate_entropy"),
    Quantity("Alphas: nuclear norm over heads", "mean over layers", "nuclear_norm"),
    Quantity("Alphas: off-diagonal share", "mean over layers", "off_diagonal"),
    Quantity("Swaps by score: pairs in effect", "pairs of heads", "swapped"),
    Quantity("Swaps: exchanges so far", "pairs of heads", "swaps"),
    Quantity("Heads' mean cosine", "latest batch", "disagreement"),
    Quantity("Gates: G steps so far", "steps", "gate_steps"),
    Quantity("Gates: distance from their start", "share of its norm", "gate_change"),
)
BEHIND = "valid_nll"  # of which a panel shows by how much runs differ from the first
STEPS = {"swapped", "swaps", "gate_steps"}
SHARES = "expert_share"  # columns that a figure of their own shows


@dataclass(frozen=True)
class TrainingPanel:
    """One panel: a quantity of all runs that have it, at one site where it has sites."""

    quantity: Quantity
    site: str = ""
    less: bool = False
    """Whether the first run's value is taken off."""

    @property
    def column(self) -> str:
        """Of metrics.csv."""
        return f"{self.quantity.column}.{self.site}" if self.site else self.quantity.column


@dataclass(frozen=True)
class TrainingHistory:
    """The metrics of one training run."""

    path: Path
    meta: Mapping[str, Any]
    metrics: pd.DataFrame

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.resolve().name

    def line(self, column: str, axis: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Where a column has values, and these."""
        table = self.metrics[[axis, column]].dropna()
        return table[axis].to_numpy(float), table[column].to_numpy(float)

    def has(self, column: str) -> bool:
        """Whether the run noted it."""
        return column in self.metrics.columns and bool(self.metrics[column].notna().any())

    def sites(self, quantity: str) -> list[str]:
        """The sites for which the run noted a quantity, in the order of sites; "" where it did so for the whole."""
        names = [name for name in self.metrics.columns if name.partition(".")[0] == quantity and self.has(name)]
        order = ["", *map(str, SITES)]
        sites = [name.partition(".")[2] for name in names]
        return sorted(sites, key=lambda site: order.index(site) if site in order else len(order))


def load_history(path: Path) -> TrainingHistory:
    """Read the metrics that `headscope train --out DIR` wrote; RunError where the directory has none."""
    for name in ("run.json", "metrics.csv"):
        if not (path / name).is_file():
            raise RunError(f"{path} is no training run: it has no {name}; name what `headscope train --out DIR` wrote")
    failure = f"training run {path.name} cannot be read:"
    meta = read_json(path / "run.json", error=RunError, name=f"{failure} run.json")
    if not isinstance(meta, dict) or meta.get("kind") != "training":
        raise RunError(f"{path} is no training run: its run.json or metrics.csv is of something else")
    metrics = read_csv(path / "metrics.csv", columns=AXES, error=RunError, name=f"{failure} metrics.csv")
    if not len(metrics):
        raise RunError(f"training run {path.name}: metrics.csv has no line yet")
    return TrainingHistory(path, meta, metrics)


def training_figure(runs: Sequence[TrainingHistory], *, axis: str = "update") -> Figure:
    """A panel for every quantity and site that a run has: a colour for each run, the same limits for all sites.

    Runs that differ in nothing but their seed have one colour. Beside the validation loss its difference to the first
    run's, which shows what lies on top of each other.
    """
    if axis not in AXES:
        raise ConfigError(f"--axis {axis!r} is not known; choose from {', '.join(AXES)}")
    names, groups = _distinct(runs), _groups(runs)
    panels = training_panels(runs, several=len(set(groups)) > 1)
    wide = panel_width(WIDTH, len(panels), left=LEFT, gap=GAP[0], most=WIDEST)
    laid = flow([(LEFT + wide, ABOVE + HEIGHT + BELOW)] * len(panels), widest(WIDEST), gap=GAP)
    legend = Legend.plan(_legend(names, groups, panels), widest(max(laid.width, 4.6)))
    sections = [run.meta.get("data") for run in runs]
    data = {str(section.get("sentences", "?")) if isinstance(section, dict) else "?" for section in sections}
    variants = dict.fromkeys(str(run.meta.get("variant", "?")) for run in runs)
    subtitle = f"{', '.join(variants)} · {' or '.join(sorted(data))} training sentences"
    page = Page(
        laid.width,
        laid.height + legend.height,
        title="How training went",
        subtitle=subtitle if text_width(subtitle, LABEL) < 40 else f"{len(runs)} runs",
        footer="\n".join(f"{name} {run.meta.get('signature', '')}" for name, run in zip(names, runs, strict=True)),
    )
    drawn: dict[tuple[str, bool], list[Axes]] = {}
    for panel, (left, top) in zip(panels, laid.corners, strict=True):
        axes = page.axes(left + LEFT, top + ABOVE, wide, HEIGHT)
        counts = panel.quantity.column in STEPS
        chart(
            axes,
            title=_title(panel, names),
            xlabel=AXES[axis],
            ylabel=panel.quantity.unit,
            width=wide,
            whole=(True, counts),
        )
        for run, group in zip(runs, groups, strict=True):
            _draw(axes, run, panel, axis, COLORS[group % len(COLORS)], first=runs[0])
        drawn.setdefault((panel.quantity.column, panel.less), []).append(axes)
    share_limits([axes for alike in drawn.values() for axes in alike], axis="x", room=0.02)
    for alike in drawn.values():
        share_limits(alike)
    legend.draw(page, laid.height)
    return page.finished()


def training_panels(runs: Sequence[TrainingHistory], *, several: bool) -> list[TrainingPanel]:
    """Those of quantities with titles of their own, then of whatever else the runs note."""
    panels = []
    for quantity in quantities(runs):
        sites = dict.fromkeys(site for run in runs for site in run.sites(quantity.column))
        shown = [site for site in sites if site] or list(sites)  # sites rather than their mean
        panels += [TrainingPanel(quantity, site) for site in shown]
        if quantity.column == BEHIND and several and _differences(runs):
            panels.append(TrainingPanel(quantity, less=True))
    return panels


def quantities(runs: Iterable[TrainingHistory]) -> list[Quantity]:
    """Those with titles of their own, then whatever else the runs note."""
    titled = {quantity.column for quantity in QUANTITIES} | ENGINE | {SHARES}
    names = dict.fromkeys(
        str(name).partition(".")[0] for run in runs for name in run.metrics.columns if name not in ENGINE
    )
    return [*QUANTITIES, *(Quantity(measure_of(name).words, "", name) for name in names if name not in titled)]


def _differences(runs: Sequence[TrainingHistory]) -> bool:
    """Whether other runs were validated at updates at which the first was."""
    first, *others = (run.metrics.set_index("update")[BEHIND].dropna() if run.has(BEHIND) else None for run in runs)
    return first is not None and any(other is not None and first.index.isin(other.index).any() for other in others)


def _draw(
    axes: Axes, run: TrainingHistory, panel: TrainingPanel, axis: str, color: str, *, first: TrainingHistory
) -> None:
    if not run.has(panel.column):
        return
    x, y = run.line(panel.column, axis)
    if panel.less:
        table = run.metrics.dropna(subset=[BEHIND]).set_index("update")
        others = first.metrics.dropna(subset=[BEHIND]).set_index("update")[BEHIND]
        both = table[table.index.isin(others.index)]
        y = (both[BEHIND] - others.reindex(both.index)).to_numpy(float)
        x = both.index.to_numpy(float) if axis == "update" else both[axis].to_numpy(float)
    dense = panel.quantity.column == "nll"
    axes.plot(
        x,
        y,
        color=color,
        alpha=0.8 if dense else 0.95,
        linewidth=0.7 if dense else 1.1,
        marker="o" if len(x) <= 30 and not dense and panel.quantity.column not in STEPS else "",
        markersize=2.4,
        drawstyle="steps-post" if panel.quantity.column in STEPS else "default",
    )
    opened = run.metrics.get("window")
    if opened is not None and panel.quantity.title.startswith("Alphas") and (opened > 0).any():
        axes.axvline(run.metrics[axis][opened > 0].iloc[0], color=color, linewidth=0.7, linestyle=":")


def _title(panel: TrainingPanel, names: Sequence[str]) -> str:
    if panel.less:
        return f"The same, less that of {names[0]}"
    return f"{panel.quantity.title} · {panel.site}" if panel.site else panel.quantity.title


def _groups(runs: Sequence[TrainingHistory]) -> list[int]:
    """A number for each run, from 0: the same for runs that differ in seed and place only."""
    groups: dict[str, int] = {}
    numbers = []
    for number, run in enumerate(runs):
        config = run.meta.get("config")
        setup = {name: run.meta.get(name) for name in ("variant", "options")}
        settings = {k: v for k, v in config.items() if k not in ("seed", "out")} if isinstance(config, dict) else number
        key = json.dumps([setup, settings], sort_keys=True, default=str)
        numbers.append(groups.setdefault(key, len(groups)))
    return numbers


def _legend(names: Sequence[str], groups: Sequence[int], panels: Sequence[TrainingPanel]) -> list[Entry]:
    """A colour and a name for each group: of its first run, and how many more have it."""
    entries: list[Entry] = []
    for group in sorted(set(groups)):
        labels = [name for name, other in zip(names, groups, strict=True) if other == group]
        seeds = f" and {len(labels) - 1} more seed{'s' if len(labels) > 2 else ''}" if len(labels) > 1 else ""
        entries.append((Swatch(), COLORS[group % len(COLORS)], labels[0] + seeds))
    if any(panel.quantity.title.startswith("Alphas") for panel in panels):
        entries.append((Swatch(":", width=0.7), INK, "the window of the growth loss opens"))
    return entries


def _distinct(runs: Sequence[TrainingHistory]) -> list[str]:
    """Names of the directories, numbered where several have the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number + 1})" for number, name in enumerate(names)]


TRAINING = PlotFigure(
    "training",
    "Loss, BLEU, and histories of gates, mixing matrices and swaps, of several training runs together.",
    training_figure,
    Options=TrainingOptions,
    source=TRAINED,
    runs="together",
    order=400,
)
