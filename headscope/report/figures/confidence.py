"""Confidence of every head from epoch to epoch: files of `headscope train --save-confidence` or of the MHR fork."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.config import option
from headscope.errors import DataError
from headscope.files.reading import read_object
from headscope.report.layout.grid import parse_range
from headscope.report.layout.legend import COLORS, Entry, Legend
from headscope.report.layout.output import cell_pitch, widest
from headscope.report.layout.page import Dashes, Page, Swatch
from headscope.report.layout.panels import chart, share_limits
from headscope.report.readers.fork import confidence_rows, confidence_run
from headscope.report.registry import PlotFigure, Source
from headscope.results.study import Study
from headscope.results.study_tables import RunError

WIDTH, HEIGHT = 1.9, 1.15  # inches of the axes of one panel
LEFT, ABOVE, BELOW = 0.46, 0.22, 0.32
FILE = re.compile(r"epoch-(\d{1,9})\.pkl")
DASHES: tuple[Dashes, ...] = ("-", "--", ":")
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
    scores: Mapping[tuple[str, int], NDArray[np.float64]]
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.last.name

    def batches(self) -> tuple[NDArray[np.float64], Mapping[tuple[str, int], NDArray[np.float64]]]:
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
    epochs = tuple(epoch for epoch, _ in files)
    about = {"signature": f"file:{path.name}|format:mhr", **_about(path)}
    method = [f"method {about['method']}"] if "method" in about else []
    shown = f"epochs {epochs[0]} to {epochs[-1]}" if len(epochs) > 1 else f"epoch {epochs[0]}"
    note = ", ".join([*method, "means over training sentences", shown])
    record = {**about, "layout": runs[0].layout, "data": {"note": note}}
    last = Study({"heads": runs[-1].heads}, record, folder=path)
    scores: dict[tuple[str, int], NDArray[np.float64]] = {}
    for site, counts in runs[0].layout.items():
        for layer, count in enumerate(counts):
            if count:
                tables = [run.heads_of(site, layer) for run in runs]
                # A file of means, a vector a module, has them under its own name.
                means = [table.drop(columns=["site", "layer", "head", "functions"]) for table in tables]
                scores[site, layer] = np.array([each.to_numpy(float)[:, 0] for each in means])
    return ConfidenceHistory(last, epochs, scores, tuple(file for _, file in files))


def _about(path: Path) -> dict[str, Any]:
    """What run.json says of a training that is there: its signature and which confidence it kept."""
    try:
        about = read_object(path / "run.json")
        return {"signature": str(about["signature"]), "method": str(about["config"]["save_confidence"])}
    except (DataError, KeyError, TypeError):
        return {}


def confidence_figure(
    run: ConfidenceHistory, by: Literal["epoch", "batch"] = "epoch", *, range: Sequence[float] = ()
) -> Figure:
    """A panel for every layer (rows) of every site (columns), a line for every head, one scale for all.

    The scale is that of all values, or `range`. `by` "batch" draws every batch, not the means of epochs.
    """
    limits = parse_range(range)
    points, scores = (np.array(run.epochs, dtype=float), run.scores) if by == "epoch" else run.batches()
    layout = run.last.layout
    sites = [site for site in layout if any(key[0] == site for key in run.scores)]
    layers = max(map(len, layout.values()))
    wide = cell_pitch(WIDTH, len(sites), besides=len(sites) * LEFT, least=0.4)
    width = len(sites) * (LEFT + wide)
    legend = Legend.plan(_entries(run), widest(max(width, 4.6)))
    page = Page(
        width,
        layers * (ABOVE + HEIGHT + BELOW) + legend.height,
        title=f"Confidence of heads from {by} to {by}",
        subtitle=f"{run.last.name} · {run.last.data}",
        footer=run.last.signature,
    )
    panels = []
    for column, site in enumerate(sites):
        for layer, _ in enumerate(layout[site]):
            if (site, layer) in run.scores:
                left, top = column * (LEFT + wide) + LEFT, layer * (ABOVE + HEIGHT + BELOW) + ABOVE
                axes = page.axes(left, top, wide, HEIGHT)
                label = "confidence" if column == 0 else ""
                chart(axes, title=f"{site}.{layer}", xlabel="epoch", ylabel=label, width=wide, whole=(True, False))
                _draw(axes, points, scores[site, layer])
                panels.append(axes)
    share_limits(panels)
    if limits is not None:
        for axes in panels:
            axes.set_ylim(limits.vmin, limits.vmax)
    legend.draw(page, layers * (ABOVE + HEIGHT + BELOW))
    return page.finished()


def _draw(axes: Axes, epochs: NDArray[np.float64], scores: NDArray[np.float64]) -> None:
    for head, line in enumerate(scores.T):
        axes.plot(
            epochs,
            line,
            DASHES[head // len(COLORS) % len(DASHES)],
            color=COLORS[head % len(COLORS)],
            linewidth=0.9 if len(epochs) <= MANY else 0.5,
            marker="o" if len(epochs) <= MANY else "",
            markersize=2,
        )


def _entries(run: ConfidenceHistory) -> list[Entry]:
    """A line for each head; heads beyond the colours have the same ones again, dashed, then dotted."""
    heads = max(values.shape[1] for values in run.scores.values())
    return [
        (Swatch(DASHES[head // len(COLORS) % len(DASHES)]), COLORS[head % len(COLORS)], f"head {head}")
        for head in range(heads)
    ]


CONFIDENCE = PlotFigure(
    "confidence",
    "Confidence of every head on the training batches, from epoch to epoch or batch to batch.",
    confidence_figure,
    Options=ConfidenceOptions,
    source=Source(
        "RUN|DIR",
        "Directories that `headscope train --save-confidence` wrote, or of the MHR fork's epoch-N.pkl.",
        "headscope.report.figures.confidence:load_confidence",
    ),
    order=420,
)
