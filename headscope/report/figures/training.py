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
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from headscope.errors import ConfigError
from headscope.files.reading import read_json
from headscope.files.tables import read_csv
from headscope.heads import SITES
from headscope.report.layout.families import Legend
from headscope.report.layout.page import LABEL, RULE, TICK, Page, flow, text_width
from headscope.report.readers.run import RunError

WIDTH, HEIGHT = 2.75, 1.7  # inches of the axes of one panel
LEFT, ABOVE, BELOW, GAP = 0.52, 0.24, 0.36, (0.22, 0.2)
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d1f", "#7f3fbf", "#999999")
DASHES = ("-", "--", ":")
STYLES = {str(site): dash for site, dash in zip(SITES, DASHES, strict=True)}
ENGINE = {
    *("update", "epoch", "sentences", "tokens", "seconds", "tokens_per_second", "lr", "loss", "gradient_norm"),
    *("valid_perplexity", "best", "window"),
}
AXES = {"update": "update", "tokens": "target tokens", "seconds": "seconds"}


@dataclass(frozen=True)
class Quantity:
    """A quantity with a title of its own; `columns` of metrics.csv, by site where they end in `.site`."""

    title: str
    unit: str
    columns: tuple[str, ...]


QUANTITIES = (
    Quantity("Loss: training (thin) and validation", "nats per token", ("nll", "valid_nll")),
    Quantity("BLEU of the validation text", "BLEU", ("bleu",)),
    Quantity("Gates: entropy", "nats", ("gate_entropy",)),
    Quantity("Alphas: nuclear norm over heads", "mean over layers", ("nuclear_norm",)),
    Quantity("Alphas: off-diagonal share", "mean over layers", ("off_diagonal",)),
    Quantity("Swaps by score: pairs in effect", "pairs of heads", ("swapped",)),
    Quantity("Swaps: exchanges so far", "pairs of heads", ("swaps",)),
    Quantity("Heads' mean cosine", "latest batch", ("disagreement",)),
    Quantity("Gates: G steps so far", "steps", ("gate_steps",)),
)
THIN = {"nll"}
STEPS = {"swapped", "swaps", "gate_steps"}


@dataclass(frozen=True)
class TrainingHistory:
    """The metrics of one training run."""

    name: str
    meta: Mapping[str, Any]
    metrics: pd.DataFrame

    def line(self, column: str, axis: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Where a column has values, and these."""
        table = self.metrics[[axis, column]].dropna()
        return table[axis].to_numpy(float), table[column].to_numpy(float)

    def columns(self, quantity: str) -> list[str]:
        """The columns of a quantity that have values, by site in the order of sites, others after them."""
        names = [name for name in self.metrics.columns if name == quantity or name.startswith(f"{quantity}.")]
        order = {name: number for number, name in enumerate(STYLES)}
        columns = [name for name in names if self.metrics[name].notna().any()]
        return sorted(columns, key=lambda name: order.get(name.partition(".")[2], len(order)))


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
    text = [str(name) for name in metrics.columns if not pd.api.types.is_numeric_dtype(metrics[name])]
    if text or not len(metrics):
        reason = f"column {text[0]} must hold numbers" if len(metrics) else "it has no line yet"
        raise RunError(f"training run {path.name}: metrics.csv is of no use: {reason}")
    return TrainingHistory(path.resolve().name, meta, metrics)


def training_figure(runs: Sequence[TrainingHistory], *, axis: str = "update") -> Figure:
    """A panel for every quantity that a run has: a colour for each run, a dash for each site.

    Runs that differ in nothing but their seed have one colour.
    """
    if axis not in AXES:
        raise ConfigError(f"--axis {axis!r} is not known; choose from {', '.join(AXES)}")
    panels = [
        quantity for quantity in quantities(runs) if any(run.columns(c) for run in runs for c in quantity.columns)
    ]
    laid = flow([(LEFT + WIDTH, ABOVE + HEIGHT + BELOW)] * len(panels), 3 * (LEFT + WIDTH) + 2 * GAP[0], gap=GAP)
    names, groups = _distinct(runs), _groups(runs)
    colors = [COLORS[group % len(COLORS)] for group in groups]
    width = max(laid.width, 4.6)
    legend = Legend.plan(_legend(names, groups), width)
    sites = Legend.plan(_sites(runs, panels), width)
    page = Page(
        laid.width,
        laid.height + legend.height + sites.height,
        title="How training went",
        subtitle=_subtitle(runs),
        footer="\n".join(f"{name} {run.meta.get('signature', '')}" for name, run in zip(names, runs, strict=True)),
    )
    for quantity, (left, top) in zip(panels, laid.corners, strict=True):
        axes = page.axes(left + LEFT, top + ABOVE, WIDTH, HEIGHT)
        for run, color in zip(runs, colors, strict=True):
            _draw(axes, run, quantity, axis, color)
        _label(axes, quantity, axis)
    legend.draw(page, laid.height)
    sites.draw(page, laid.height + legend.height)
    return page.figure


def quantities(runs: Iterable[TrainingHistory]) -> list[Quantity]:
    """Those with titles of their own, then whatever else the runs note."""
    titled = {column for quantity in QUANTITIES for column in quantity.columns} | ENGINE
    names = dict.fromkeys(
        str(name).partition(".")[0] for run in runs for name in run.metrics.columns if name not in ENGINE
    )
    untitled = [Quantity(name.replace("_", " "), "", (name,)) for name in names if name not in titled]
    return [*QUANTITIES, *untitled]


def _draw(axes: Axes, run: TrainingHistory, quantity: Quantity, axis: str, color: str) -> None:
    for name in quantity.columns:
        for column in run.columns(name):
            x, y = run.line(column, axis)
            thin = name in THIN
            axes.plot(
                x,
                y,
                STYLES.get(column.partition(".")[2], "-"),
                color=color,
                alpha=0.45 if thin else 0.95,
                linewidth=0.7 if thin else 1.1,
                marker="o" if len(x) <= 30 and not thin and name not in STEPS else "",
                markersize=2.2,
                drawstyle="steps-post" if name in STEPS else "default",
            )
    opened = run.metrics.get("window")
    if opened is not None and quantity.title.startswith("Alphas") and (opened > 0).any():
        axes.axvline(run.metrics[axis][opened > 0].iloc[0], color=color, linewidth=0.5, linestyle=(0, (1, 3)))


def _label(axes: Axes, quantity: Quantity, axis: str) -> None:
    axes.set_title(quantity.title, size=LABEL, loc="left", pad=4, weight="bold", parse_math=False)
    axes.set_xlabel(AXES[axis], size=TICK, labelpad=1.5)
    axes.set_ylabel(quantity.unit, size=TICK, labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=not STEPS.isdisjoint(quantity.columns)))
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    axes.tick_params(length=2, width=0.4, color=RULE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(linewidth=0.3, color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.margins(x=0.02)


def _short(value: float, _: object) -> str:
    """12000 as 12k, 3500000 as 3.5M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and value % size == 0):
            return f"{value / size:g}{letter}"
    return f"{value:g}"


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


def _legend(names: Sequence[str], groups: Sequence[int]) -> list[tuple[str, str, str]]:
    """A colour and a name for each group: of its first run, and how many more have it."""
    entries = []
    for group in sorted(set(groups)):
        labels = [name for name, other in zip(names, groups, strict=True) if other == group]
        seeds = f" and {len(labels) - 1} more seed{'s' if len(labels) > 2 else ''}" if len(labels) > 1 else ""
        entries.append(("    ", COLORS[group % len(COLORS)], labels[0] + seeds))
    return entries


def _sites(runs: Sequence[TrainingHistory], panels: Sequence[Quantity]) -> list[tuple[str, str, str]]:
    """Dashes of the sites and what the dotted line is, where they occur."""
    sites = {column.partition(".")[2] for run in runs for column in run.metrics.columns}
    marks = dict(zip(STYLES, ("——", "– –", "····"), strict=True))
    entries = [(marks[site], "", site) for site in STYLES if site in sites]
    if any(panel.title.startswith("Alphas") for panel in panels):
        entries.append(("┊", "", "the window of the growth loss opens"))
    return entries


def _subtitle(runs: Sequence[TrainingHistory]) -> str:
    sections = [run.meta.get("data") for run in runs]
    data = {str(section.get("sentences", "?")) if isinstance(section, dict) else "?" for section in sections}
    variants = dict.fromkeys(str(run.meta.get("variant", "?")) for run in runs)
    text = f"{', '.join(variants)} · {' or '.join(sorted(data))} training sentences"
    return text if text_width(text, LABEL) < 40 else f"{len(runs)} runs"


def _distinct(runs: Sequence[TrainingHistory]) -> list[str]:
    """Names of the directories, numbered where several have the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number + 1})" for number, name in enumerate(names)]
