"""How training went, run beside run: loss, BLEU, and what each variant notes of its gates, matrices and swaps."""

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
class Known:
    """A quantity with a title of its own; `columns` of metrics.csv, by site where they end in `.site`."""

    title: str
    unit: str
    columns: tuple[str, ...]


KNOWN = (
    Known("Loss: training (thin) and validation", "nats per token", ("nll", "valid_nll")),
    Known("BLEU of the validation text", "BLEU", ("bleu",)),
    Known("Gates: entropy", "nats", ("gate_entropy",)),
    Known("Alphas: nuclear norm over heads", "mean over layers", ("nuclear_norm",)),
    Known("Alphas: off-diagonal share", "mean over layers", ("off_diagonal",)),
    Known("Swaps by score: pairs in effect", "pairs of heads", ("swapped",)),
    Known("Swaps: exchanges so far", "pairs of heads", ("swaps",)),
    Known("Heads' mean cosine", "latest batch", ("disagreement",)),
    Known("Gates: G steps so far", "steps", ("gate_steps",)),
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
        order = {name: place for place, name in enumerate(STYLES)}
        there = [name for name in names if self.metrics[name].notna().any()]
        return sorted(there, key=lambda name: order.get(name.partition(".")[2], len(order)))


def load_history(path: Path) -> TrainingHistory:
    """Read the metrics that `headscope train --out DIR` wrote; RunError where the directory has none."""
    for name in ("run.json", "metrics.csv"):
        if not (path / name).is_file():
            raise RunError(f"{path} is no training run: it has no {name}; name what `headscope train --out DIR` wrote")
    where = f"training run {path.name} cannot be read:"
    meta = read_json(path / "run.json", error=RunError, name=f"{where} run.json")
    if not isinstance(meta, dict) or meta.get("kind") != "training":
        raise RunError(f"{path} is no training run: its run.json or metrics.csv is of something else")
    metrics = read_csv(path / "metrics.csv", columns=AXES, error=RunError, name=f"{where} metrics.csv")
    text = [str(name) for name in metrics.columns if not pd.api.types.is_numeric_dtype(metrics[name])]
    if text or not len(metrics):
        what = f"column {text[0]} must hold numbers" if len(metrics) else "it has no line yet"
        raise RunError(f"training run {path.name}: metrics.csv is of no use: {what}")
    return TrainingHistory(path.resolve().name, meta, metrics)


def training_figure(courses: Sequence[TrainingHistory], *, axis: str = "update") -> Figure:
    """A panel for every quantity that a run has: a colour for each run, a dash for each site.

    Runs that differ in nothing but their seed have one colour.
    """
    if axis not in AXES:
        raise ConfigError(f"--axis {axis!r} is not known; choose from {', '.join(AXES)}")
    panels = [
        known for known in quantities(courses) if any(course.columns(c) for course in courses for c in known.columns)
    ]
    laid = flow([(LEFT + WIDTH, ABOVE + HEIGHT + BELOW)] * len(panels), 3 * (LEFT + WIDTH) + 2 * GAP[0], gap=GAP)
    names, groups = _distinct(courses), _groups(courses)
    colors = [COLORS[group % len(COLORS)] for group in groups]
    width = max(laid.width, 4.6)
    legend = Legend.plan(_legend(names, groups), width)
    sites = Legend.plan(_sites(courses, panels), width)
    page = Page(
        laid.width,
        laid.height + legend.height + sites.height,
        title="How training went",
        subtitle=_subtitle(courses),
        footer="\n".join(
            f"{name} {course.meta.get('signature', '')}" for name, course in zip(names, courses, strict=True)
        ),
    )
    for known, (left, top) in zip(panels, laid.places, strict=True):
        axes = page.axes(left + LEFT, top + ABOVE, WIDTH, HEIGHT)
        for course, color in zip(courses, colors, strict=True):
            _draw(axes, course, known, axis, color)
        _label(axes, known, axis)
    legend.draw(page, laid.height)
    sites.draw(page, laid.height + legend.height)
    return page.figure


def quantities(courses: Iterable[TrainingHistory]) -> list[Known]:
    """Those with titles of their own, then whatever else the runs note."""
    titled = {column for known in KNOWN for column in known.columns} | ENGINE
    others = dict.fromkeys(
        str(name).partition(".")[0] for course in courses for name in course.metrics.columns if name not in ENGINE
    )
    more = [Known(name.replace("_", " "), "", (name,)) for name in others if name not in titled]
    return [*KNOWN, *more]


def _draw(axes: Axes, course: TrainingHistory, known: Known, axis: str, color: str) -> None:
    for quantity in known.columns:
        for column in course.columns(quantity):
            x, y = course.line(column, axis)
            thin = quantity in THIN
            axes.plot(
                x,
                y,
                STYLES.get(column.partition(".")[2], "-"),
                color=color,
                alpha=0.45 if thin else 0.95,
                linewidth=0.7 if thin else 1.1,
                marker="o" if len(x) <= 30 and not thin and quantity not in STEPS else "",
                markersize=2.2,
                drawstyle="steps-post" if quantity in STEPS else "default",
            )
    opened = course.metrics.get("window")
    if opened is not None and known.title.startswith("Alphas") and (opened > 0).any():
        axes.axvline(course.metrics[axis][opened > 0].iloc[0], color=color, linewidth=0.5, linestyle=(0, (1, 3)))


def _label(axes: Axes, known: Known, axis: str) -> None:
    axes.set_title(known.title, size=LABEL, loc="left", pad=4, weight="bold", parse_math=False)
    axes.set_xlabel(AXES[axis], size=TICK, labelpad=1.5)
    axes.set_ylabel(known.unit, size=TICK, labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=not STEPS.isdisjoint(known.columns)))
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


def _groups(courses: Sequence[TrainingHistory]) -> list[int]:
    """A number for each run, from 0: the same for runs that differ in seed and place only."""
    found: dict[str, int] = {}
    numbers = []
    for place, course in enumerate(courses):
        config = course.meta.get("config")
        same = {name: course.meta.get(name) for name in ("variant", "options")}
        settings = {k: v for k, v in config.items() if k not in ("seed", "out")} if isinstance(config, dict) else place
        key = json.dumps([same, settings], sort_keys=True, default=str)
        numbers.append(found.setdefault(key, len(found)))
    return numbers


def _legend(names: Sequence[str], groups: Sequence[int]) -> list[tuple[str, str, str]]:
    """A colour and a name for each group: of its first run, and how many more have it."""
    entries = []
    for group in sorted(set(groups)):
        mine = [name for name, its in zip(names, groups, strict=True) if its == group]
        more = f" and {len(mine) - 1} more seed{'s' if len(mine) > 2 else ''}" if len(mine) > 1 else ""
        entries.append(("    ", COLORS[group % len(COLORS)], mine[0] + more))
    return entries


def _sites(courses: Sequence[TrainingHistory], panels: Sequence[Known]) -> list[tuple[str, str, str]]:
    """Dashes of the sites and what the dotted line is, where they occur."""
    there = {column.partition(".")[2] for course in courses for column in course.metrics.columns}
    marks = dict(zip(STYLES, ("——", "– –", "····"), strict=True))
    found = [(marks[site], "", site) for site in STYLES if site in there]
    if any(known.title.startswith("Alphas") for known in panels):
        found.append(("┊", "", "the window of the growth loss opens"))
    return found


def _subtitle(courses: Sequence[TrainingHistory]) -> str:
    sections = [course.meta.get("data") for course in courses]
    data = {str(each.get("sentences", "?")) if isinstance(each, dict) else "?" for each in sections}
    variants = dict.fromkeys(str(course.meta.get("variant", "?")) for course in courses)
    text = f"{', '.join(variants)} · {' or '.join(sorted(data))} training sentences"
    return text if text_width(text, LABEL) < 40 else f"{len(courses)} runs"


def _distinct(courses: Sequence[TrainingHistory]) -> list[str]:
    """Names of the directories, numbered where several have the same."""
    names = [course.name for course in courses]
    return [name if names.count(name) == 1 else f"{name} ({number + 1})" for number, name in enumerate(names)]
