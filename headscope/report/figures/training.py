"""Histories of training runs: losses and what variants log, transfer, and confidence from epoch to epoch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from headscope.config import option
from headscope.config.declarations import measure_of
from headscope.errors import ConfigError, flag
from headscope.files.reading import read_record
from headscope.report import charts
from headscope.report.charts import Array, Chart, frame_chart
from headscope.report.fork import confidence_rows, confidence_run
from headscope.report.marks import COLORS, MARKS, color_of
from headscope.report.registry import RANGE, TRAIN_RUN, PlotFigure, Source
from headscope.report.sheet import INK, Sheet, stroke
from headscope.report.styles import number_same
from headscope.results.study import Study, model_name
from headscope.results.study_tables import RunError
from headscope.results.training import AXES, SHARES, Training

TRAINER_COLUMNS = {
    *("update", "epoch", "sentences", "tokens", "seconds", "tokens_per_second", "lr", "loss", "gradient_norm"),
    *("valid_perplexity", "best", "window"),
}
"""Columns of metrics.csv that the trainer itself writes and that no panel shows."""
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
VALIDATION = "valid_nll"  # a further panel shows its differences from the first run
STEPS = {"swapped", "swaps", "gate_steps"}  # counts, drawn as steps
WINDOW_QUANTITIES = {"nuclear_norm", "off_diagonal"}  # matrices under the growth loss, whose window is marked
TUNING: Mapping[str, str] = {"gates": "FTG (gates)", "gates+output": "FTG+ (gates and output projections)"}
LABELS = {"bleu": "validation BLEU", "valid_nll": "validation loss (nats per token)"}
FILE = re.compile(r"epoch-(\d{1,9})\.pkl")
DASHES = ("-", "--", ":")
MAX_MARKERS = 30  # more points than this are lines without points


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the figure."""

    axis: Literal["update", "tokens", "seconds"] = option("update", "What runs from left to right.")


def draw_training(runs: Sequence[Training], sheet: Sheet, options: TrainingOptions) -> None:
    """A panel for every quantity and site that a run has; runs that differ only in their seed share a colour."""
    names, groups = number_same([run.name for run in runs]), _groups(runs)
    panels = list(training_charts(runs, groups, options.axis, names[0]))
    charts.share_limits(charts.draw_charts(sheet, panels, (33.0, 18.0)), axis="x", room=0.02)
    for group in sorted(set(groups)):
        first, *twins = [name for name, other in zip(names, groups, strict=True) if other == group]
        seeds = f" and {len(twins)} more seed{'s' * (len(twins) > 1)}" if twins else ""
        sheet.key(stroke(color_of(group), first + seeds))
    if WINDOW_QUANTITIES & {chart.group for chart in panels}:
        sheet.key(stroke(INK, "the window of the growth loss opens", ":"))
    data = {str(run.record.get("data", {}).get("sentences", "?")) for run in runs}
    variants = dict.fromkeys(str(run.record.get("variant", "?")) for run in runs)
    sheet.headline("How training went", f"{', '.join(variants)} · {' or '.join(sorted(data))} training sentences")


def training_charts(runs: Sequence[Training], groups: Sequence[int], axis: str, first: str) -> Iterator[Chart]:
    """Charts of `QUANTITIES`, then of all other columns of the runs."""
    columns = dict.fromkeys(
        str(name).partition(".")[0] for run in runs for name in run.metrics if name not in TRAINER_COLUMNS
    )
    for quantity in dict.fromkeys([*QUANTITIES, *columns]):
        title, unit = QUANTITIES.get(quantity) or (measure_of(quantity).words, "")
        has_panel = quantity not in (*TRAINER_COLUMNS, SHARES)
        sites = dict.fromkeys(site for run in runs for site in run.sites(quantity) if has_panel)
        integers = True, quantity in STEPS
        for site in [site for site in sites if site] or sites:  # sites rather than their mean
            panel_title = f"{title} · {site}" if site else title
            draw = partial(_draw_runs, runs, groups, f"{quantity}.{site}".strip("."), axis)
            yield Chart(panel_title, draw, AXES[axis], unit, integers, quantity)
        if quantity == VALIDATION and len(set(groups)) > 1:
            updates, *further = [{*run.line(VALIDATION, "update")[0]} if run.has(VALIDATION) else set() for run in runs]
            if any(updates & other for other in further):
                draw = partial(_draw_runs, runs, groups, VALIDATION, axis, minus_first=True)
                yield Chart(f"Difference from {first}", draw, AXES[axis], unit, integers, "difference")


def _draw_runs(
    runs: Sequence[Training], groups: Sequence[int], column: str, axis: str, axes: Axes, *, minus_first: bool = False
) -> None:
    """Draw a line for each run that has the column; `minus_first` subtracts the first run's values at equal updates."""
    quantity = column.partition(".")[0]
    dense, steps = quantity == "nll", quantity in STEPS
    looks: dict[str, Any] = {"alpha": 0.8, "linewidth": 0.7} if dense else {"alpha": 0.95}
    looks["drawstyle"] = "steps-post" if steps else "default"
    base = runs[0].metrics[["update", column]].dropna() if minus_first else None
    for run, color in zip(runs, map(color_of, groups), strict=True):
        if not run.has(column):
            continue
        x, y = run.line(column, axis)
        if base is not None:
            pairs = run.metrics.dropna(subset=[column]).merge(base, on="update", suffixes=("", "_first"))
            x, y = pairs[axis].to_numpy(float), (pairs[column] - pairs[f"{column}_first"]).to_numpy(float)
        axes.plot(x, y, color=color, marker="o" if len(x) <= MAX_MARKERS and not dense and not steps else "", **looks)
        windows = run.metrics.get("window")
        if windows is not None and quantity in WINDOW_QUANTITIES and (windows > 0).any():
            axes.axvline(run.metrics[axis][windows > 0].iloc[0], color=color, linewidth=0.7, linestyle=":")


def _groups(runs: Sequence[Training]) -> list[int]:
    """A number for each run, from 0: the same for runs that differ in seed and place only."""
    setups = []
    for number, run in enumerate(runs):
        config = run.record.get("config")
        settings = {k: v for k, v in config.items() if k not in ("seed", "out")} if config else number
        setup = [run.record.get("variant"), run.record.get("options"), settings]
        setups.append(json.dumps(setup, sort_keys=True, default=str))
    return [list(dict.fromkeys(setups)).index(setup) for setup in setups]


TRAINING = PlotFigure(
    "training",
    "Loss, BLEU, and histories of gates, mixing matrices and swaps, of several training runs together.",
    draw_training,
    Options=TrainingOptions,
    source=TRAIN_RUN,
    runs="together",
    order=400,
)


@dataclass(frozen=True)
class TransferOptions:
    """Options of the figure."""

    untuned: float | None = option(
        None, "The same number of the model before tuning (NoFT), as `headscope evaluate` says it.", metavar="X"
    )


def transfer_points(runs: Sequence[Training]) -> pd.DataFrame:
    """A row a run: what was tuned, share of the data, seed, and the best BLEU; the best loss if a run lacks BLEU."""
    column = "bleu" if all(run.has("bleu") for run in runs) else "valid_nll"
    if not all(run.has(column) for run in runs):
        raise ConfigError(f"the figure needs runs with validation: train with {flag.valid_source} FILE")
    rows = []
    for run in runs:
        config, variant_options = run.record.get("config", {}), run.record.get("options", {})
        part = TUNING.get(variant_options.get("tune", "")) or (
            "all parameters (FTAll)" if config.get("init") else "from scratch"
        )
        values = run.metrics[column].dropna()
        best = float(values.max() if column == "bleu" else values.min())
        rows.append((part, float(config.get("fraction", 1.0)), config.get("seed"), best))
    return pd.DataFrame(rows, columns=["tuned", "fraction", "seed", column])


def draw_transfer(runs: Sequence[Training], sheet: Sheet, options: TransferOptions) -> None:
    """A line for each way to tune, with seeds as dots; dashed: before tuning (Peng et al. 2020, figure 2)."""
    table = transfer_points(runs)
    column = str(table.columns[-1])
    (axes,) = sheet.panels([""], [(42.0, 25.0)])
    frame_chart(axes, "share of the training data", LABELS[column])
    for number, (name, rows) in enumerate(table.groupby("tuned", sort=False)):
        color, means = color_of(number), rows.groupby("fraction")[column].mean()
        charts.draw_curve(axes, means.index, means, color, label=str(name), marker=MARKS[number % len(MARKS)])
        axes.scatter(rows["fraction"], rows[column], s=4, color=color, alpha=0.6, linewidth=0)
    if options.untuned is not None:
        axes.axhline(options.untuned, color=INK, linestyle="--", label="no tuning (NoFT)")
    axes.set_xlim(0, 1.04)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    inits = (run.record.get("config", {}).get("init") for run in runs)
    starts = dict.fromkeys(f"from {model_name(init)}" if init else "from scratch" for init in inits)
    sheet.headline("Transfer", ", ".join(starts))


TRANSFER = PlotFigure(
    "transfer",
    "Quality of tuned models against the share of the data, by what was tuned: FTG, FTG+, all, from scratch.",
    draw_transfer,
    Options=TransferOptions,
    source=TRAIN_RUN,
    runs="together",
    order=440,
)


@dataclass(frozen=True)
class ConfidenceOptions:
    """Options of the figure."""

    by: Literal["epoch", "batch"] = option("epoch", "A point: the mean of an epoch, or a batch of it.")
    range: tuple[float, ...] = option((), RANGE, metavar="LOW,HIGH")


class ConfidenceHistory(Study):
    """The study of the last epoch, with the scores of all `epochs` [e]: by site and layer, `scores` [e h]."""

    epochs: tuple[int, ...]
    scores: Mapping[tuple[str, int], Array]
    pickles_by_epoch: Sequence[Path] = ()  # the file of every epoch


def load_confidence(path: Path) -> ConfidenceHistory:
    """Read epoch-N.pkl of a training run's `confs`, or of the directory itself; RunError where there are none."""
    folder = path / "confs" if (path / "confs").is_dir() else path
    matches = [(FILE.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    files = sorted((int(match[1]), path) for match, path in matches if match)
    if not files:
        raise RunError(
            f"{path} holds no epoch-N.pkl, as `headscope train --save-confidence base` and the MHR fork write"
        )
    runs = [confidence_run(file) for _, file in files]
    for run, (_, file) in zip(runs, files, strict=True):
        if run.layout != runs[0].layout:
            raise RunError(f"{file} has other layers or heads than {files[0][1].name}; these files are of several runs")
    epochs, record = tuple(epoch for epoch, _ in files), read_record(path / "run.json")
    method = record.get("config", {}).get("save_confidence")
    span = f"epochs {epochs[0]} to {epochs[-1]}" if len(epochs) > 1 else f"epoch {epochs[0]}"
    note = f"method {method}, " * bool(method) + f"means over training sentences, {span}"
    signature = record.get("signature") or f"file:{path.name}|format:mhr"
    own_record = {"signature": signature, "layout": runs[0].layout, "data": {"note": note}}
    history = ConfidenceHistory({"heads": runs[-1].heads}, own_record, folder=path)
    history.epochs, history.pickles_by_epoch = epochs, [file for _, file in files]
    history.scores = {
        # a file of means, a vector a module, has them under its own name
        (site, layer): np.array([run.heads_of(site, layer)[run.measures[0]].to_numpy(float) for run in runs])
        for site, counts in history.layout.items()
        for layer, count in enumerate(counts)
        if count
    }
    return history


def draw_confidence(run: ConfidenceHistory, sheet: Sheet, options: ConfidenceOptions) -> None:
    """A panel for every layer of every site, a line for every head, one scale for all."""
    limits = charts.parse_range(options.range) if options.range else None
    points, scores = np.array(run.epochs, float), run.scores
    if options.by == "batch":  # the last batch of epoch 2 is drawn at 2; RunError for files with means only
        rows = [confidence_rows(file) for file in run.pickles_by_epoch]
        counts = [len(next(iter(by_module.values()))) for by_module in rows]
        ends = zip(run.epochs, counts, strict=True)
        points = np.concatenate([epoch - 1 + np.arange(1, count + 1) / count for epoch, count in ends])
        scores = {key: np.concatenate([by_module[key] for by_module in rows]) for key in run.scores}
    panels = charts.layer_panels(sheet, run, (20.0, 12.0), run.scores)
    is_short = len(points) <= MAX_MARKERS
    looks: dict[str, Any] = {"marker": "o" if is_short else "", "markersize": 2, "linewidth": 0.9 if is_short else 0.5}
    for key, axes in panels.items():
        frame_chart(axes, "epoch", "confidence", integers=(True, False))
        for head, line in enumerate(scores[key].T):
            dash = DASHES[head // len(COLORS) % len(DASHES)]  # colours repeat with another dash
            axes.plot(points, line, dash, color=color_of(head), label=f"head {head}", **looks)
    charts.share_limits(list(panels.values()))
    if limits is not None:
        for axes in panels.values():
            axes.set_ylim(limits.vmin, limits.vmax)
    sheet.headline(f"Confidence of heads from {options.by} to {options.by}", f"{run.name} · {run.data}")


CONFIDENCE = PlotFigure(
    "confidence",
    "Confidence of every head on the training batches, from epoch to epoch or batch to batch.",
    draw_confidence,
    Options=ConfidenceOptions,
    source=Source(
        "RUN|DIR",
        "Directories that `headscope train --save-confidence` wrote, or of the MHR fork's epoch-N.pkl.",
        "headscope.report.figures.training:load_confidence",
    ),
    order=420,
)
