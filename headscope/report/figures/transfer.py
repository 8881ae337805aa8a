"""Transfer: quality against the share of the data that a trained model was tuned on (Peng et al. 2020, figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from headscope.config import option
from headscope.errors import ConfigError
from headscope.report.figures.training import TrainingHistory
from headscope.report.layout.legend import COLORS, MARKS, Entry, Legend
from headscope.report.layout.output import panel_width, widest
from headscope.report.layout.page import INK, Page, Swatch
from headscope.report.layout.panels import chart
from headscope.report.registry import TRAINED, PlotFigure
from headscope.results.study import model_name

WIDTH, HEIGHT, LEFT, ABOVE, BELOW = 4.0, 2.4, 0.55, 0.06, 0.4
NAMES: Mapping[str, str] = {"gates": "FTG (gates)", "gates+output": "FTG+ (gates and output projections)"}
LABELS = {"bleu": "validation BLEU", "valid_nll": "validation loss (nats per token)"}


@dataclass(frozen=True)
class TransferOptions:
    """Options of the figure."""

    untuned: float | None = option(
        None, "The same number of the model before tuning (NoFT), as `headscope evaluate` says it.", metavar="X"
    )


def transfer_points(runs: Sequence[TrainingHistory]) -> pd.DataFrame:
    """A row a run: what was tuned, share of the data, seed, and the best BLEU, or loss where a run has no BLEU.

    ConfigError for runs that did not begin with a trained model, unless without one (scratch).
    """
    column = "bleu" if all(run.has("bleu") for run in runs) else "valid_nll"
    if not all(run.has(column) for run in runs):
        raise ConfigError("the figure needs runs with validation: give `headscope train` --valid-source FILE")
    rows = []
    for run in runs:
        config, own = run.meta.get("config", {}), run.meta.get("options", {})
        tuned = "all parameters (FTAll)" if config.get("init") else "from scratch"
        values = run.metrics[column].dropna()
        rows.append(
            {
                "tuned": NAMES.get(own.get("tune", ""), tuned),
                "fraction": float(config.get("fraction", 1.0)),
                "seed": config.get("seed"),
                column: float(values.max() if column == "bleu" else values.min()),
            }
        )
    return pd.DataFrame(rows)


def transfer_figure(runs: Sequence[TrainingHistory], *, untuned: float | None = None) -> Figure:
    """A line for each way to tune, its seeds as dots; dashed the model before tuning."""
    table = transfer_points(runs)
    column = str(table.columns[-1])
    entries: list[Entry] = [
        (Swatch(mark=MARKS[n % len(MARKS)]), COLORS[n % len(COLORS)], str(name))
        for n, name in enumerate(table["tuned"].unique())
    ]
    entries += [] if untuned is None else [(Swatch("--"), INK, "no tuning (NoFT)")]
    wide = panel_width(WIDTH, 1, left=LEFT, gap=0, most=LEFT + WIDTH)
    legend = Legend.plan(entries, widest(LEFT + wide))
    page = Page(
        LEFT + wide,
        ABOVE + HEIGHT + BELOW + legend.height,
        title="Transfer",
        subtitle=", ".join(dict.fromkeys(_start(run) for run in runs)),
        footer=str(runs[0].meta.get("signature", "")),
    )
    axes = page.axes(LEFT, ABOVE, wide, HEIGHT)
    chart(axes, title="", xlabel="share of the training data", ylabel=LABELS[column], width=wide)
    for number, (_, rows) in enumerate(table.groupby("tuned", sort=False)):
        color, mark = COLORS[number % len(COLORS)], MARKS[number % len(MARKS)]
        means = rows.groupby("fraction")[column].mean()
        axes.plot(means.index, means, color=color, lw=1.2, marker=mark, ms=3.2)
        axes.scatter(rows["fraction"], rows[column], s=4, color=color, alpha=0.6, lw=0)
    if untuned is not None:
        axes.axhline(untuned, color=INK, lw=1, ls="--")
    axes.set_xlim(0, 1.04)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    legend.draw(page, ABOVE + HEIGHT + BELOW)
    return page.finished()


def _start(run: TrainingHistory) -> str:
    """The model that tuning began with."""
    init = run.meta.get("config", {}).get("init")
    return f"from {model_name(init)}" if init else "from scratch"


TRANSFER = PlotFigure(
    "transfer",
    "Quality of tuned models against the share of the data, by what was tuned: FTG, FTG+, all, from scratch.",
    transfer_figure,
    Options=TransferOptions,
    source=TRAINED,
    runs="together",
    order=440,
)
