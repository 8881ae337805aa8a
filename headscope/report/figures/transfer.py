"""Transfer: quality against the share of the data that a trained model was tuned on (Peng et al. 2020, figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.ticker import PercentFormatter

from headscope.config import option
from headscope.errors import ConfigError
from headscope.report.charts import draw_course, frame_chart
from headscope.report.marks import MARKS, color_of
from headscope.report.registry import TRAINED, PlotFigure
from headscope.report.sheet import INK, Sheet
from headscope.results.study import model_name
from headscope.results.training import Training

NAMES: Mapping[str, str] = {"gates": "FTG (gates)", "gates+output": "FTG+ (gates and output projections)"}
LABELS = {"bleu": "validation BLEU", "valid_nll": "validation loss (nats per token)"}


@dataclass(frozen=True)
class TransferOptions:
    """Options of the figure."""

    untuned: float | None = option(
        None, "The same number of the model before tuning (NoFT), as `headscope evaluate` says it.", metavar="X"
    )


def transfer_points(runs: Sequence[Training]) -> pd.DataFrame:
    """A row a run: what was tuned, share of the data, seed, and the best BLEU, or loss where a run has no BLEU.

    ConfigError for runs that did not begin with a trained model, unless without one (scratch).
    """
    column = "bleu" if all(run.has("bleu") for run in runs) else "valid_nll"
    if not all(run.has(column) for run in runs):
        raise ConfigError("the figure needs runs with validation: give `headscope train` --valid-source FILE")
    rows = []
    for run in runs:
        config, own = run.record.get("config", {}), run.record.get("options", {})
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


def draw_transfer(runs: Sequence[Training], sheet: Sheet, options: TransferOptions) -> None:
    """A line for each way to tune, its seeds as dots; dashed the model before tuning."""
    table = transfer_points(runs)
    column = str(table.columns[-1])
    (axes,) = sheet.panels([""], [(42.0, 25.0)])
    frame_chart(axes, "share of the training data", LABELS[column])
    for number, (name, rows) in enumerate(table.groupby("tuned", sort=False)):
        color, means = color_of(number), rows.groupby("fraction")[column].mean()
        draw_course(axes, means.index, means, color, label=str(name), marker=MARKS[number % len(MARKS)])
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
    source=TRAINED,
    runs="together",
    order=440,
)
