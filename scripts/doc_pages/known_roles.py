"""The table of docs/analyze.md on heads whose roles others established, of benchmarks/known_roles.csv."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pandas as pd

from scripts.doc_pages.pruning_report import table
from scripts.documented import ROOT

MAX_NAMED = 8
"""Heads that are named, not counted."""
HEAD = ("model: role (source)", "known heads", "labelled", "others labelled", "AUC", "all off", "ten random sets")


def known_roles() -> str:
    """A row a role: its heads with the label, other heads with it, and the loss without its heads."""
    roles = pd.read_csv(ROOT / "benchmarks" / "known_roles.csv", keep_default_na=False)
    return table(HEAD, map(_cells, roles.to_dict("records")))


def _cells(row: dict[Hashable, Any]) -> list[str]:
    has_label = bool(row["label"])
    return [
        f"{row['model']}: {row['role']} ({row['source']})",
        _heads(row["heads"]),
        f"{float(row['labelled']):.0f} of {len(row['heads'].split())}" if has_label else "no measure",
        _heads(row["false"]),
        f"{float(row['auc']):.3f}" if has_label else "",
        f"{row['ablation']:.3f} ({row['objective']})",
        f"{row['random_low']:.3f} to {row['random_high']:.3f}",
    ]


def _heads(names: str) -> str:
    count = len(names.split())
    return names if count <= MAX_NAMED else f"{count} heads"
