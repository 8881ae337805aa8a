"""Mixtures of attentive experts (MAE): how much each expert counts, for which tokens, and how gates learnt that."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import MaxNLocator

from headscope.data.offsets import display_subword
from headscope.heads import SITES
from headscope.report import charts
from headscope.report.charts import Array, frame_chart
from headscope.report.marks import SITE_COLORS
from headscope.report.registry import TRAIN_RUN, PlotFigure
from headscope.report.sheet import GREY, Sheet, em, shorten, stroke, text_width
from headscope.results.study import Study
from headscope.results.study_tables import RunError
from headscope.results.training import SHARES, Training

BARS, TOKENS, ROW = 10.0, 24.0, 1.6  # ems of bars, of the tokens beside them, and of an expert
EVEN = "all experts alike"
COLUMN = re.compile(rf"{SHARES}\.({'|'.join(SITE_COLORS)})\.(\d+)\.(\d+)", re.ASCII)
Module = tuple[str, int]


def draw_experts(run: Study, sheet: Sheet, _: object) -> None:
    """A panel for every module: each expert's mean responsibility with its interval, and its typical tokens."""
    table = run.table("experts", "expert", "lacks", "responsibility", "responsibility_low", "responsibility_high")
    gates = run.table("experts_gates", "entropy", "even").set_index(["site", "layer"])
    tokens = run.table("experts_tokens", "expert", "token", "pmi") if run.has_table("experts_tokens") else table[:0]
    words = TOKENS * bool(len(tokens))
    groups: Any = table.groupby(["site", "layer"])
    by_module = {(str(site), int(layer)): rows for (site, layer), rows in groups}
    longest = max(map(len, by_module.values()))
    largest = float(table["responsibility_high"].max()) * 1.05
    panels = charts.layer_panels(sheet, run, (BARS + words, longest * ROW), by_module, share="")
    for module, axes in panels.items():
        rows = by_module[module].reset_index(drop=True)
        gate: Any = gates.loc[module]
        entropy = f"entropy {gate['entropy']:.2f} of {gate['even']:.2f} nats"
        sheet.name_panel(axes, f"{module[0]} · layer {module[1]} · {entropy}")
        value, numbers = rows["responsibility"], range(len(rows))
        axes.barh(numbers, value, height=0.68, color=SITE_COLORS[module[0]])
        charts.draw_intervals(axes, value, numbers, rows["responsibility_low"], rows["responsibility_high"])
        axes.vlines(1 / len(rows), -0.5, len(rows) - 0.5, color=GREY, linestyle=":")
        axes.set_yticks(numbers, [_lacks(lacks) for lacks in rows["lacks"]])
        axes.xaxis.set_major_formatter(charts.short_number)
        axes.set(
            xlim=(0, largest * (1 + words / BARS)), ylim=(longest - 0.5, -0.5), xlabel="responsibility", ylabel="expert"
        )
        axes.set_xticks([tick for tick in MaxNLocator(3).tick_values(0, largest) if tick <= largest])
        of_module = tokens[(tokens["site"] == module[0]) & (tokens["layer"] == module[1])] if words else tokens
        sheet.after_layout.append(partial(_write_tokens, axes, rows, of_module, largest))
    sheet.key(
        stroke(GREY, EVEN, ":"),
        "−3  an expert: all heads but head 3",
        "bar: mean responsibility; whisker: 95 % interval; beside it: its tokens by mutual information",
    )
    sheet.headline("What experts are used for", f"{run.model} · {run.data}")


def _write_tokens(axes: Axes, rows: pd.DataFrame, tokens: pd.DataFrame, start: float) -> None:
    """Write the tokens of each expert beside its bar, from `start` on, the most informative first."""
    size = rcParams["ytick.labelsize"]
    room = axes.get_window_extent().width / axes.figure.dpi * (1 - start / axes.get_xlim()[1]) - 2 * em()
    for number, expert in enumerate(rows["expert"]):
        of_expert = tokens[tokens["expert"] == expert].sort_values("pmi", ascending=False)
        text = shorten("  ".join(display_subword(str(token), "▁") for token in of_expert["token"]), room, size)
        axes.text(start, number, text, size=size, va="center", parse_math=False)


def _lacks(heads: object) -> str:
    """The label of an expert by the heads that it lacks: −1,3 for `1;3`; of many heads the first."""
    parts = str(heads).removesuffix(".0").split(";")
    text = "−" + ",".join(parts)
    return text if text_width(text, rcParams["ytick.labelsize"]) < 4 * em() else f"−{parts[0]},…"


def draw_gates(run: Training, sheet: Sheet, _: object) -> None:
    """The entropy of the gates of each site and the responsibility of each expert during training."""
    modules = module_shares(run)
    if not modules:
        raise RunError(f"training run {run.name} has no gates of experts; name a run of `headscope train mae`")
    updates = run.metrics["update"].to_numpy(float)
    longest = max(len(shares) for shares in modules.values())
    titles = ["entropy of gates", *(f"{site} · layer {layer}" for site, layer in modules)]
    entropy, *panels = sheet.panels(titles, [(24.0, max(longest * 1.4, 10.0))] * len(titles), bar=True, share="")
    frame_chart(entropy, "update", "nats", integers=(True, False))
    for site in [site for site in map(str, SITES) if run.has(f"gate_entropy.{site}")]:
        entropy.plot(*run.line(f"gate_entropy.{site}", "update"), color=SITE_COLORS[site], label=f"gates of {site}")
    entropy.axhline(np.log(longest), color=GREY, linestyle=":", label=EVEN)
    charts.share_limits([entropy])
    largest = max(float(np.nanmax(shares * len(shares))) for shares in modules.values())
    norm = TwoSlopeNorm(1, 0, max(largest, 1.1))
    step = updates[1] - updates[0] if len(updates) > 1 else 1.0
    edges = np.concatenate([[updates[0] - step], updates])  # a row of metrics.csv is of the updates since the last row
    for axes, shares in zip(panels, modules.values(), strict=True):
        rows = np.arange(len(shares) + 1)
        shades = axes.pcolormesh(edges, rows, shares * len(shares), cmap="RdBu_r", norm=norm)
        frame_chart(axes, "update", "expert", integers=(True, False))
        axes.set_ylim(len(shares), 0)
        charts.number_cells(axes, y=len(shares))
        axes.grid(visible=False)
    for axes in (entropy, *panels):
        axes.set_xlim(updates[0], updates[-1] if updates[-1] > updates[0] else updates[0] + 1)
    sheet.scale(shades, [entropy, *panels], "responsibility, × even")
    sheet.headline("Gates and experts while they learn", f"{run.name} · {run.record.get('variant', '')}")


def module_shares(run: Training) -> dict[Module, Array]:
    """By module [e u]: the mean responsibility of every expert in every row of metrics.csv."""
    experts: dict[Module, dict[int, Array]] = {}
    for name in filter(run.has, map(str, run.metrics.columns)):
        if match := COLUMN.fullmatch(name):
            site, layer, expert = match[1], int(match[2]), int(match[3])
            experts.setdefault((site, layer), {})[expert] = run.metrics[name].to_numpy(float)
    return {module: np.stack([shares[expert] for expert in sorted(shares)]) for module, shares in experts.items()}


GATES = PlotFigure(
    "gates",
    "Gates and experts of a mixture (`train mae`) while they learn: entropies, and how much each expert counts.",
    draw_gates,
    source=TRAIN_RUN,
    order=410,
)
