"""The tables of benchmarks/pruning/README.md, of the CSV files beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from scripts.documented import ROOT

PLAIN = "least-squares"
REFITS = ("none", "mean", PLAIN)
BEST = ("obs:measured", "obs", "obs-task", "l0", "subset", "output-norm", "entropy:highest", "confidence")
ENCODER = (*BEST, "taylor", "wanda", "flap", "lrp", "gradient", "random", "magnitude", "entropy")


def read(name: str) -> pd.DataFrame:
    """A table of benchmarks/pruning."""
    return pd.read_csv(ROOT / "benchmarks" / "pruning" / f"{name}.csv")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(rows: pd.DataFrame, columns: Sequence[str], digits: int, **where: Any) -> str:
    """The numbers of the one row of which `where` holds, with a slash between; empty where there is none."""
    for column, value in where.items():
        rows = rows[rows[column] == value]
    assert len(rows) < 2, (where, rows)
    return " / ".join(f"{rows.iloc[0][column]:.{digits}f}" for column in columns) if len(rows) else ""


def encoder() -> str:
    """Rankings of the sentence encoder × what is done for the heads that went."""
    rows = read("closed-form/bert")
    sizes = [(kept, refit) for kept in (36, 24) for refit in REFITS]
    head = ["ranking", *(f"{kept}, {refit_name(refit)}" for kept, refit in sizes)]
    return table(
        head,
        (
            [name, *(cell(rows, ["value"], 3, method=name, kept=kept, compensation=refit) for kept, refit in sizes)]
            for name in ENCODER
        ),
    )


def refit_name(refit: str) -> str:
    """A refit as the report calls it."""
    return {"none": "masked", PLAIN: "least squares", "feed-forward": "blocks too"}.get(refit, refit)


def calibration() -> str:
    """How much text a refit of the encoder takes, and of which kind."""
    rows = read("closed-form/calibration").query("kept == 36 and method == 'obs'")
    sizes = sorted(rows["sentences"].unique())
    return table(
        ["calibrated on, tested on", *(f"{size:,}" for size in sizes)],
        (
            [
                f"{first}, {second}",
                *(cell(rows, ["value"], 3, calibrated=first, tested=second, sentences=size) for size in sizes),
            ]
            for first in ("captions", "web")
            for second in ("captions", "web")
        ),
    )


ANCHOR_LABELS = {"none": "masked", PLAIN: "plain", "least-squares, mixed": "mixed"}


def anchor_table() -> str:
    """Cosines on other captions / on other English, of refits with and without an anchor."""
    rows = read("anchored/bert")
    kinds = dict.fromkeys(zip(rows["method"], rows["kept"], strict=True))
    return table(
        ["ranking, heads kept", *ANCHOR_LABELS.values()],
        (
            [
                f"{method}, {kept}",
                *(
                    cell(rows, ["captions", "other"], 3, method=method, kept=kept, compensation=refit)
                    for refit in ANCHOR_LABELS
                ),
            ]
            for method, kept in kinds
        ),
    )


def learning() -> str:
    """Closed form against methods that learn or tune, the earlier translation model: loss, means over seeds."""
    sweep = read("all/sweep")
    closed_form = read("closed-form/translation").query(f"compensation == '{PLAIN}'")
    residual = read("closed-form/translation").query("compensation == 'residual'")
    tuning = read("closed-form/tuned")
    sizes = (60, 48, 24)

    def line(name: str, rows: pd.DataFrame, column: str, more: str) -> list[str]:
        means = (rows[rows["kept"] == size][column].mean() for size in sizes)
        return [name, more, *("" if pd.isna(mean) else f"{mean:.3f}" for mean in means)]

    def closed_form_row(name: str, rows: pd.DataFrame, more: str) -> list[str]:
        return line(name, rows[rows["method"] == name], "value", more)

    body = [
        closed_form_row("obs-task", closed_form, "refitted, no training"),
        closed_form_row("obs-task:measured", closed_form, "refitted, no training"),
        closed_form_row("obs-task", residual, "refitted one after the other, no training"),
        closed_form_row("obs-task:measured", residual, "refitted one after the other, no training"),
        *(
            line(f"obs-task{end}", tuning[tuning["allocate"] == mode], "loss", "refitted one after the other, tuned")
            for mode, end in (("global", ""), ("measured", ":measured"))
        ),
        *(
            line(str(name), rows, "loss", "gates learnt, tuned" if name in ("l0", "subset") else "tuned")
            for name, rows in sweep[sweep["method"] != "unpruned"].groupby("method")
        ),
    ]
    return table(["ranking", "what is done", *(f"{size} kept" for size in sizes)], body)


TABLES: dict[str, Callable[[], str]] = {
    "pruning-encoder": encoder,
    "pruning-learning": learning,
    "pruning-anchored": anchor_table,
    "pruning-calibration": calibration,
}
