"""Which heads the model needs: every importance beside the others, and whether it can be told from zero.

Importances that have a sign (`ablation`, `shapley`, …) are tested against zero, two-sided, and corrected for all heads
of the model by Benjamini and Hochberg's procedure at 5 %. Those that are never negative, such as means of absolute
gradients or distances, cannot be zero on average, so there is nothing to test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headscope.bootstrap import Array, Bootstrap, GroupSums, interval
from headscope.config.declarations import Measure
from headscope.engine.evidence.significance import (
    FALSE_DISCOVERIES,
    adjust,
    kendall,
    p_of_difference,
    row_pearson,
    row_spearman,
    spearman,
)
from headscope.heads import HeadId, Site

if TYPE_CHECKING:
    import pandas as pd

Statistics = Mapping[tuple[str, Site, int], GroupSums]
LEAST_TOLD = 3
"""Heads of which a correlation says something."""


def need_table(heads: pd.DataFrame, measures: Sequence[Measure], sums: Statistics) -> pd.DataFrame:
    """`importance.csv`: a row per measure and head, with its rank (1: needed most) and the test against zero.

    Ranks are among all heads, but for measures within a layer among those of the layer.
    """
    import pandas as pd

    ids = [HeadId(Site(site), layer, head) for site, layer, head in heads[["site", "layer", "head"]].values.tolist()]
    parts = []
    for measure in measures:
        part = heads[["site", "layer", "head"]].assign(measure=measure.name)
        for end in ("", "_low", "_high"):
            part[f"value{end}"] = heads[measure.name + end]
        ascending = measure.keep == "lowest"
        ranked = heads.groupby(["site", "layer"])[measure.name] if measure.within_layer else heads[measure.name]
        part["rank"] = ranked.rank(ascending=ascending, method="min").astype("Int64")
        part["p"] = _p_of(measure.name, ids, sums)
        part["p_adjusted"] = adjust(part["p"].to_numpy())
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def agreement_table(heads: pd.DataFrame, measures: Sequence[Measure]) -> pd.DataFrame:
    """`importance_agreement.csv`: rank correlations of every two measures, over the heads that have both numbers.

    Of those that order heads of all layers.
    """
    import pandas as pd

    signs = {measure.name: 1.0 if measure.keep == "highest" else -1.0 for measure in measures if measure.orders}
    rows = []
    for first, second in combinations(signs, 2):
        pair = np.stack([signs[name] * heads[name].to_numpy(dtype=float) for name in (first, second)])
        known = pair[:, ~np.isnan(pair).any(axis=0)]
        rows.append(
            {
                "first": first,
                "second": second,
                "heads": known.shape[1],
                "spearman": spearman(known[0], known[1]),
                "kendall": kendall(known[0], known[1]),
            }
        )
    return pd.DataFrame(rows, columns=["first", "second", "heads", "spearman", "kendall"])


def told_agreement(need: pd.DataFrame, sums: Statistics, bootstrap: Bootstrap) -> pd.DataFrame:
    """`patching_agreement.csv`: how every two measures agree on the heads that the first one tells from zero.

    Spearman's ρ of the order and Pearson's r of the sizes, with intervals over sentences; NaN of less than three heads.
    Heads without an effect would agree, or not, by noise alone. The first measure is the exact one where it ran: `need`
    has its tests. Measures are means over sentences, whose statistics have their names.
    """
    import pandas as pd

    names = list(dict.fromkeys(need["measure"]))
    rows = need[(need["measure"] == names[0]) & (need["p_adjusted"] <= FALSE_DISCOVERIES)]
    told = {HeadId(Site(site), layer, head) for site, layer, head in rows[["site", "layer", "head"]].values.tolist()}
    samples = {name: _samples(name, sums, bootstrap, told) for name in names}
    found = []
    for first, second in combinations(names, 2):
        pair = samples[first], samples[second]
        estimates = {"spearman": row_spearman(*pair), "pearson": row_pearson(*pair)}
        numbers: dict[str, float] = {}
        for name, values in estimates.items():
            known = interval(values if len(told) >= LEAST_TOLD else torch.full_like(values, torch.nan))
            numbers |= {name: float(known.value), f"{name}_low": float(known.low), f"{name}_high": float(known.high)}
        found.append({"first": first, "second": second, "heads": len(told), **numbers})
    ends = [f"{name}{end}" for name in ("spearman", "pearson") for end in ("", "_low", "_high")]
    return pd.DataFrame(found, columns=["first", "second", "heads", *ends])


def _samples(name: str, sums: Statistics, bootstrap: Bootstrap, heads: set[HeadId]) -> Tensor:
    """A mean of some heads on the corpus and in each replicate [1 + r n], layer by layer."""
    parts = []
    for key in sorted(key for key in sums if key[0] == name):
        total, count = bootstrap.sums(sums[key])
        means = total / count
        parts.append(means[:, [HeadId(*key[1:], head) in heads for head in range(means.shape[1])]])
    return torch.cat(parts, dim=1)


def _p_of(name: str, ids: Sequence[HeadId], sums: Statistics) -> Array:
    """p of every head's mean being zero; NaN for what has no sums over sentences, and what is never negative."""
    p: dict[tuple[Site, int], Array] = {}
    negative = False
    for (statistic, site, layer), group_sums in sums.items():
        if statistic == name and group_sums.total.ndim == 2:
            total, count = group_sums.total[: group_sums.used], group_sums.count[: group_sums.used]
            negative = negative or bool((total < 0).any())
            p[site, layer] = p_of_difference(total, count)
    if not negative:
        return np.full(len(ids), np.nan)
    return np.array([p[head.site, head.layer][head.head] if (head.site, head.layer) in p else np.nan for head in ids])
