"""Training curves of several runs: loss, BLEU, and what each variant logs of its gates, matrices and swaps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from headscope.config import option
from headscope.config.declarations import measure_of
from headscope.errors import ConfigError
from headscope.report.charts import frame_chart, share_limits
from headscope.report.marks import color_of
from headscope.report.registry import TRAINED, PlotFigure
from headscope.report.sheet import INK, Sheet, stroke
from headscope.report.styles import number_same
from headscope.results.training import AXES, SHARES, Training

ENGINE = {
    *("update", "epoch", "sentences", "tokens", "seconds", "tokens_per_second", "lr", "loss", "gradient_norm"),
    *("valid_perplexity", "best", "window"),
}


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the figure."""

    axis: str = option("update", "What runs from left to right: update, tokens or seconds.", metavar="NAME")


QUANTITIES = {
    "nll": ("Loss of training batches", "nats per token"),
    "valid_nll": ("Loss of the validation text", "nats per token"),
    "bleu": ("BLEU of the validation text", "BLEU"),
    "gate_entropy": ("Gates: entropy", "nats"),
    "nuclear_norm": ("Nuclear norm", "of alphas, over heads"),
    "off_diagonal": ("Off-diagonal share", "of alphas"),
    "swapped": ("Swaps by score: pairs in effect", "pairs of heads"),
    "swaps": ("Swaps: exchanges so far", "pairs of heads"),
    "disagreement": ("Heads' mean cosine", "latest batch"),
    "gate_steps": ("Gates: G steps so far", "steps"),
    "gate_change": ("Gates: distance from their start", "share of its norm"),
}
"""Title and unit of columns of metrics.csv, with `.SITE` behind where they have sites."""
BEHIND = "valid_nll"  # of which a panel shows by how much runs differ from the first
STEPS = {"swapped", "swaps", "gate_steps"}


@dataclass(frozen=True)
class TrainingPanel:
    """A column of metrics.csv of all runs that have it; `less` where the first run's value is taken off."""

    title: str
    unit: str
    quantity: str
    column: str
    less: bool = False

    @property
    def windowed(self) -> bool:
        """Whether it is about matrices that the growth loss may hold back."""
        return self.quantity in ("nuclear_norm", "off_diagonal")


def draw_training(runs: Sequence[Training], sheet: Sheet, options: TrainingOptions) -> None:
    """A panel for every quantity and site that a run has: a colour for each run, the same limits for all sites.

    Runs that differ in nothing but their seed have one colour. Beside the validation loss its difference to the first
    run's, which shows what lies on top of each other.
    """
    if options.axis not in AXES:
        raise ConfigError(f"--axis {options.axis!r} is not known; choose from {', '.join(AXES)}")
    names, groups = number_same([run.name for run in runs]), _groups(runs)
    shown = training_panels(runs, names[0] if len(set(groups)) > 1 else "")
    panels = sheet.panels([panel.title for panel in shown], [(33.0, 18.0)] * len(shown), share="")
    alike: dict[tuple[str, bool], list[Axes]] = {}
    for panel, axes in zip(shown, panels, strict=True):
        frame_chart(axes, AXES[options.axis], panel.unit, whole=(True, panel.quantity in STEPS))
        for run, group in zip(runs, groups, strict=True):
            _draw_run(axes, run, panel, options.axis, color_of(group), runs[0])
        alike.setdefault((panel.quantity, panel.less), []).append(axes)
    share_limits(panels, axis="x", room=0.02)
    for group_of_axes in alike.values():
        share_limits(group_of_axes)
    for group in sorted(set(groups)):
        labels = [name for name, other in zip(names, groups, strict=True) if other == group]
        seeds = f" and {len(labels) - 1} more seed{'s' if len(labels) > 2 else ''}" if len(labels) > 1 else ""
        sheet.key(stroke(color_of(group), labels[0] + seeds))
    if any(panel.windowed for panel in shown):
        sheet.key(stroke(INK, "the window of the growth loss opens", ":"))
    data = {str(run.record.get("data", {}).get("sentences", "?")) for run in runs}
    variants = dict.fromkeys(str(run.record.get("variant", "?")) for run in runs)
    sheet.headline("How training went", f"{', '.join(variants)} · {' or '.join(sorted(data))} training sentences")


def training_panels(runs: Sequence[Training], first: str) -> list[TrainingPanel]:
    """Panels of quantities with titles of their own, then of whatever else the runs note.

    `first` names the first run where others are compared with it.
    """
    named = dict.fromkeys(str(name).partition(".")[0] for run in runs for name in run.metrics if name not in ENGINE)
    panels = []
    for quantity in dict.fromkeys([*QUANTITIES, *named]):
        title, unit = QUANTITIES.get(quantity) or (measure_of(quantity).words, "")
        sites = dict.fromkeys(site for run in runs for site in run.sites(quantity) if quantity not in (*ENGINE, SHARES))
        for site in [site for site in sites if site] or sites:  # sites rather than their mean
            ending = ("", "") if not site else (f" · {site}", f".{site}")
            panels.append(TrainingPanel(title + ending[0], unit, quantity, quantity + ending[1]))
        if quantity == BEHIND and first and _differences(runs):
            panels.append(TrainingPanel(f"The same, less that of {first}", unit, quantity, quantity, less=True))
    return panels


def _differences(runs: Sequence[Training]) -> bool:
    """Whether other runs were validated at updates at which the first was."""
    first, *others = (run.metrics.set_index("update")[BEHIND].dropna() if run.has(BEHIND) else None for run in runs)
    return first is not None and any(other is not None and first.index.isin(other.index).any() for other in others)


def _draw_run(axes: Axes, run: Training, panel: TrainingPanel, axis: str, color: str, first: Training) -> None:
    if not run.has(panel.column):
        return
    x, y = run.line(panel.column, axis)
    if panel.less:
        own = run.metrics.dropna(subset=[BEHIND])
        both = own.merge(first.metrics[["update", BEHIND]].dropna(), on="update", suffixes=("", "_first"))
        x, y = both[axis].to_numpy(float), (both[BEHIND] - both[f"{BEHIND}_first"]).to_numpy(float)
    dense, steps = panel.quantity == "nll", panel.quantity in STEPS
    looks: dict[str, Any] = {"alpha": 0.8, "linewidth": 0.7} if dense else {"alpha": 0.95}
    marker = "o" if len(x) <= 30 and not dense and not steps else ""
    axes.plot(x, y, color=color, marker=marker, drawstyle="steps-post" if steps else "default", **looks)
    opened = run.metrics.get("window")
    if opened is not None and panel.windowed and (opened > 0).any():
        axes.axvline(run.metrics[axis][opened > 0].iloc[0], color=color, linewidth=0.7, linestyle=":")


def _groups(runs: Sequence[Training]) -> list[int]:
    """A number for each run, from 0: the same for runs that differ in seed and place only."""
    groups: dict[str, int] = {}
    numbers = []
    for number, run in enumerate(runs):
        config = run.record.get("config")
        setup = {name: run.record.get(name) for name in ("variant", "options")}
        settings = {k: v for k, v in config.items() if k not in ("seed", "out")} if config else number
        key = json.dumps([setup, settings], sort_keys=True, default=str)
        numbers.append(groups.setdefault(key, len(groups)))
    return numbers


TRAINING = PlotFigure(
    "training",
    "Loss, BLEU, and histories of gates, mixing matrices and swaps, of several training runs together.",
    draw_training,
    Options=TrainingOptions,
    source=TRAINED,
    runs="together",
    order=400,
)
