"""Estimates of every analysis as one table with a row per head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from headscope.bootstrap import Array
from headscope.engine.base import AnalysisReport
from headscope.heads import HeadId, Site


def heads_table(
    heads: Sequence[HeadId],
    reports: Sequence[AnalysisReport],
    labels: Mapping[HeadId, list[str]],
    unsupported: Mapping[HeadId, list[str]],
) -> pd.DataFrame:
    """One row per head: site, layer, head, every measure with its interval, the labels, and those without evidence."""
    columns: dict[str, list[Any]] = {
        "site": [head.site.value for head in heads],
        "layer": [head.layer for head in heads],
        "head": [head.head for head in heads],
    }
    for report in reports:
        for name, texts in report.texts.items():
            columns[name] = [texts.get(head, "") for head in heads]
        for column in report.columns:
            for end, part in (("", "value"), ("_low", "low"), ("_high", "high")):
                columns[column.name + end] = _entries(column.estimates, heads, part)
    columns["functions"] = [";".join(labels.get(head, [])) for head in heads]
    columns["functions_unsupported"] = [";".join(unsupported.get(head, [])) for head in heads]
    return pd.DataFrame(columns)


def _entries(estimates: Mapping[tuple[Site, int], Any], heads: Sequence[HeadId], part: str) -> list[float]:
    """One bound of a column at every head; NaN where its place was not measured."""
    bounds = {site_layer: getattr(estimate, part).tolist() for site_layer, estimate in estimates.items()}
    missing = float("nan")
    return [
        bounds[head.site, head.layer][head.head] if (head.site, head.layer) in bounds else missing for head in heads
    ]


def stacked(layers: Mapping[int, Tensor]) -> Array:
    """Per-layer values [h] as [layer h]; layers with fewer heads are filled with NaN."""
    widest = max(len(values) for values in layers.values())
    filled = np.full((max(layers) + 1, widest), np.nan)
    for layer, values in layers.items():
        filled[layer, : len(values)] = values.numpy()
    return filled
