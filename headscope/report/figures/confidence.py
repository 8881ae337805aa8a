"""Confidence of every head from epoch to epoch: files of `headscope train --save-confidence` or of the MHR fork."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headscope.config import option
from headscope.files.reading import read_record
from headscope.report.charts import Array, frame_chart, parse_range, share_limits
from headscope.report.fork import confidence_rows, confidence_run
from headscope.report.grid import layer_panels
from headscope.report.marks import COLORS, color_of
from headscope.report.registry import PlotFigure, Source
from headscope.report.sheet import Sheet
from headscope.results.study import Study
from headscope.results.study_tables import RunError

FILE = re.compile(r"epoch-(\d{1,9})\.pkl")
DASHES = ("-", "--", ":")
MANY = 30  # more points than this are lines without points


@dataclass(frozen=True)
class ConfidenceOptions:
    """Options of the figure."""

    by: Literal["epoch", "batch"] = option("epoch", "A point: the mean of an epoch, or a batch of it.")
    range: tuple[float, ...] = option(
        (), "Range of the scale, such as 0,1; default: that of the measure.", metavar="LOW,HIGH"
    )


@dataclass(frozen=True, eq=False)
class ConfidenceHistory:
    """The means of every epoch, from its file: `epochs` [e] and, by site and layer, `scores` [e h].

    `last` is a study of the last epoch.
    """

    last: Study
    epochs: tuple[int, ...]
    scores: Mapping[tuple[str, int], Array]
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.last.name

    @property
    def signature(self) -> str:
        """That of the training."""
        return self.last.signature

    def batches(self) -> tuple[Array, Mapping[tuple[str, int], Array]]:
        """Where every batch stands, in epochs [n], and its scores by site and layer [n h].

        The last batch of epoch 2 stands at 2. RunError for files of means alone.
        """
        rows = [confidence_rows(file) for file in self.files]
        counts = [len(next(iter(its.values()))) for its in rows]
        at = [epoch - 1 + np.arange(1, count + 1) / count for epoch, count in zip(self.epochs, counts, strict=True)]
        return np.concatenate(at), {key: np.concatenate([its[key] for its in rows]) for key in self.scores}


def load_confidence(path: Path) -> ConfidenceHistory:
    """Read epoch-N.pkl of a training run's `confs`, or of the directory itself; RunError where there are none."""
    folder = path / "confs" if (path / "confs").is_dir() else path
    matches = [(FILE.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    files = sorted((int(match[1]), path) for match, path in matches if match)
    if not files:
        raise RunError(
            f"{path} holds no epoch-N.pkl; name a run of `headscope train … --save-confidence base`, or the directory "
            "of such files that the MHR fork wrote"
        )
    runs = [confidence_run(file) for _, file in files]
    for run, (_, file) in zip(runs, files, strict=True):
        if run.layout != runs[0].layout:
            raise RunError(f"{file} has other layers or heads than {files[0][1].name}; these files are of several runs")
    epochs, record = tuple(epoch for epoch, _ in files), read_record(path / "run.json")
    method = record.get("config", {}).get("save_confidence")
    shown = f"epochs {epochs[0]} to {epochs[-1]}" if len(epochs) > 1 else f"epoch {epochs[0]}"
    note = f"method {method}, " * bool(method) + f"means over training sentences, {shown}"
    about = {"signature": record.get("signature") or f"file:{path.name}|format:mhr", "layout": runs[0].layout}
    last = Study({"heads": runs[-1].heads}, {**about, "data": {"note": note}}, folder=path)
    scores = {
        # a file of means, a vector a module, has them under its own name
        (site, layer): np.array([run.heads_of(site, layer)[run.measures[0]].to_numpy(float) for run in runs])
        for site, counts in runs[0].layout.items()
        for layer, count in enumerate(counts)
        if count
    }
    return ConfidenceHistory(last, epochs, scores, tuple(file for _, file in files))


def draw_confidence(run: ConfidenceHistory, sheet: Sheet, options: ConfidenceOptions) -> None:
    """A panel for every layer of every site, a line for every head, one scale for all.

    The scale is that of all values, or `range`. `by` "batch" draws every batch, not the means of epochs.
    """
    limits = parse_range(options.range) if options.range else None
    points, scores = (np.array(run.epochs, float), run.scores) if options.by == "epoch" else run.batches()
    panels = layer_panels(sheet, run.last, (20.0, 12.0), run.scores)
    few = len(points) <= MANY
    for key, axes in panels.items():
        frame_chart(axes, "epoch", "confidence", whole=(True, False))
        for head, line in enumerate(scores[key].T):
            dash = DASHES[head // len(COLORS) % len(DASHES)]  # beyond the colours the same ones again
            looks: dict[str, Any] = {"marker": "o" if few else "", "markersize": 2, "linewidth": 0.9 if few else 0.5}
            axes.plot(points, line, dash, color=color_of(head), label=f"head {head}", **looks)
    share_limits(list(panels.values()))
    if limits is not None:
        for axes in panels.values():
            axes.set_ylim(limits.vmin, limits.vmax)
    sheet.headline(f"Confidence of heads from {options.by} to {options.by}", f"{run.last.name} · {run.last.data}")


CONFIDENCE = PlotFigure(
    "confidence",
    "Confidence of every head on the training batches, from epoch to epoch or batch to batch.",
    draw_confidence,
    Options=ConfidenceOptions,
    source=Source(
        "RUN|DIR",
        "Directories that `headscope train --save-confidence` wrote, or of the MHR fork's epoch-N.pkl.",
        "headscope.report.figures.confidence:load_confidence",
    ),
    order=420,
)
