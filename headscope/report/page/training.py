"""Runs of `headscope train` as data of the page: a panel of curves for every quantity that they note."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headscope.report.figures.training import STEPS, TrainingHistory, load_history, quantities
from headscope.report.page.numbers import rounded, rounded_all

POINTS = 300  # of a curve


def training_data(paths: Sequence[Path]) -> dict[str, Any] | None:
    """All runs together: names, variants, signatures, and panels of curves over updates."""
    if not paths:
        return None
    histories = [load_history(path) for path in paths]
    names = distinct([history.name for history in histories])
    panels = []
    for quantity in quantities(histories):
        curves = [
            curve for number, history in enumerate(histories) for curve in _curves(history, number, quantity.column)
        ]
        if curves:
            steps = quantity.column in STEPS
            panels.append({"title": quantity.title, "unit": quantity.unit, "steps": steps, "curves": curves})
    return {
        "runs": [
            {
                "name": name,
                "variant": str(history.meta.get("variant", "")),
                "signature": str(history.meta.get("signature", "")),
                "updates": rounded(history.metrics["update"].max()),
                "seconds": rounded(history.metrics["seconds"].max()),
                "best": best_of(history),
            }
            for name, history in zip(names, histories, strict=True)
        ],
        "panels": panels,
    }


def best_of(history: TrainingHistory) -> list[list[Any]]:
    """The best of what was measured on the validation text, and the update at which that was."""
    best = []
    for column, title, highest in (("valid_nll", "validation loss", False), ("bleu", "BLEU", True)):
        if history.has(column):
            x, y = history.line(column, "update")
            place = int(np.argmax(y) if highest else np.argmin(y))
            best.append([title, rounded(y[place]), rounded(x[place])])
    return best


def distinct(names: Sequence[str]) -> list[str]:
    """Names, numbered where several are the same."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]


def _curves(history: TrainingHistory, number: int, quantity: str) -> list[dict[str, Any]]:
    curves = []
    for site in history.sites(quantity):
        column = f"{quantity}.{site}" if site else quantity
        x, y = history.line(column, "update")
        rows = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).round().astype(int))
        curves.append(
            {"run": number, "column": column, "site": site, "x": rounded_all(x[rows]), "y": rounded_all(y[rows])}
        )
    return curves
