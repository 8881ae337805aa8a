"""Tables that compare importances: of single heads with tests against zero, of groups of heads, and their agreement.

Importances with a sign (`ablation`, `shapley`, …) are tested against zero, two-sided, and corrected for all heads of
the model by Benjamini and Hochberg's procedure at 5 %. Those that are never negative, such as means of absolute
gradients or distances, cannot be zero on average, so there is nothing to test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import comb, floor

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy.special import stdtrit
from torch import Tensor

from headscope.bootstrap import Array, Bootstrap, GroupSums, interval
from headscope.config.declarations import Measure, head_functions
from headscope.description.features import leading_explanation
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

FIRST, QUARTER = 10, 4
"""The most needed heads that are counted: `FIRST`, or a quarter of all heads where that is fewer."""
FEWEST = 3
"""The fewest heads, or models, for an interval: of two, Student's t says no more than the measure's range."""
LEVEL = 0.05
NO_LABEL = "no label"
COLUMNS = (
    *("kind", "name", "measure", "heads", "mean", "mean_low", "mean_high", "others", "others_mean"),
    *("difference", "difference_low", "difference_high", "first", "of_first", "p_first"),
)
Members = npt.NDArray[np.bool_]


def function_need_table(heads: pd.DataFrame, measures: Sequence[Measure]) -> pd.DataFrame:
    """`importance_functions.csv`: a row for each group of heads and each measure that orders heads of all layers.

    Groups (`kind`) are functions ("aligned", "no label"), labels where a function has several ("aligned:predicted"),
    and what explains most of a head ("pairs of words"). A head may be in several groups; heads without a number are in
    none. `mean` of the group has its 95 % interval, `difference` to the mean of all other heads Welch's (1947): both
    treat the heads as a sample of heads like them, so one head has no interval. Of the `of_first` most needed heads
    `first` are in the group; `p_first` is the hypergeometric probability of that many or more by chance, uncorrected.
    """
    members = [(kind, name, np.array(own)) for kind, name, own in groups_of(heads)]
    rows = []
    for measure in (measure for measure in measures if measure.orders):
        values = heads[measure.name].to_numpy(dtype=float)
        is_known = np.isfinite(values)
        sort_keys = np.where(is_known, -values if measure.keep == "highest" else values, np.inf)
        first = np.zeros(len(values), dtype=bool)
        first[np.argsort(sort_keys, kind="stable")[: max(1, min(FIRST, int(is_known.sum()) // QUARTER))]] = True
        for kind, name, own in members:
            if (own & is_known).any():
                about = {"kind": kind, "name": name, "measure": measure.name}
                comparison = _compare_groups(values, own & is_known, ~own & is_known, ends=measure.range)
                rows.append({**about, **comparison, **_among(first & is_known, own, is_known)})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def groups_of(heads: pd.DataFrame) -> Iterator[tuple[str, str, list[bool]]]:
    """Kind, name and members of every group, by the columns `functions` and `explained…`."""
    labels = [[label for label in str(cell or "").split(";") if label] for cell in heads["functions"]]
    families = [{label.partition(":")[0] for label in of_head} for of_head in labels]
    for family in sorted(set().union(*families)):
        yield "function", family, [family in of_head for of_head in families]
        details = sorted({label for of_head in labels for label in of_head if label.partition(":")[0] == family})
        if len(details) > 1:
            yield from (("label", label, [label in of_head for of_head in labels]) for label in details)
    if any(families) and not all(families):
        yield "function", NO_LABEL, [not of_head for of_head in families]
    if "explained" in heads:
        leading = [leading_explanation(row) for row in heads.to_dict("records")]
        yield from (("mostly", name, [name == of_head for of_head in leading]) for name in sorted({*leading} - {""}))


def need_over_models(models: Sequence[tuple[pd.DataFrame, Sequence[Measure]]]) -> pd.DataFrame:
    """Functions × importances over several models: a row for each function and measure of their heads.csv.

    `needed` is the probability that a head with the function is needed more than another head of the same model (ties
    count half; 0.5: the function says nothing), averaged over models. `needed_low` and `needed_high` are its 95 %
    interval by Student's t, with models as the sample, clipped to [0, 1]; NaN for fewer than three. `each` has each
    model's number, NaN for a model without such heads or without others; `models` and `heads` count those that went in.
    Functions come in the order of legends, heads without a label last.
    """
    values_by_function: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for number, (heads, measures) in enumerate(models):
        for measure in measures:
            values = heads[measure.name].to_numpy(dtype=float) * (-1 if measure.keep == "lowest" else 1)
            for kind, name, members in groups_of(heads):
                part, other_values = (
                    values[np.isfinite(values) & side] for side in (np.array(members), ~np.array(members))
                )
                if kind == "function" and len(part) and len(other_values):
                    more = (part[:, None] > other_values).mean() + (part[:, None] == other_values).mean() / 2
                    row = values_by_function.setdefault((name, measure.name), [(np.nan, 0)] * len(models))
                    row[number] = float(more), len(part)
    rows, function_names = [], [*head_functions()]
    order = [*function_names, *sorted({name for name, _ in values_by_function} - {*function_names, NO_LABEL}), NO_LABEL]
    for (name, column), entries in sorted(values_by_function.items(), key=lambda item: order.index(item[0][0])):
        by_model = np.array([value for value, _ in entries])
        finite_values = by_model[np.isfinite(by_model)]
        reach = np.nan
        if len(finite_values) >= FEWEST:
            reach = _reach(float(finite_values.var(ddof=1)) / len(finite_values), len(finite_values) - 1)
        mean, heads_of = float(finite_values.mean()), sum(count for _, count in entries)
        low, high = np.clip([mean - reach, mean + reach], 0, 1)
        about = {"name": name, "measure": column, "models": len(finite_values), "heads": heads_of}
        rows.append(about | {"needed": mean, "needed_low": low, "needed_high": high, "each": by_model})
    return pd.DataFrame(rows)


def _compare_groups(
    values: Array, members: Members, other_heads: Members, *, ends: tuple[float | None, float | None]
) -> dict[str, float]:
    """Means of two groups of heads and their difference, with intervals clipped to the `ends` of the measure."""
    mean, other_mean = (float(values[part].mean()) if part.any() else np.nan for part in (members, other_heads))
    count, other_count = int(members.sum()), int(other_heads.sum())
    variance = float(values[members].var(ddof=1)) / count if count > 1 else np.nan
    other_variance = float(values[other_heads].var(ddof=1)) / other_count if other_count > 1 else np.nan
    reach = _reach(variance, count - 1) if count >= FEWEST else np.nan
    total_variance = variance + other_variance
    freedom = np.nan
    if total_variance > 0:
        freedom = total_variance**2 / (variance**2 / (count - 1) + other_variance**2 / (other_count - 1))
    apart = _reach(total_variance, freedom) if min(count, other_count) >= FEWEST else np.nan
    lower_end, upper_end = (sign * np.inf if end is None else end for end, sign in zip(ends, (-1, 1), strict=True))
    low, high = np.clip([mean - reach, mean + reach], min(lower_end, mean), max(upper_end, mean))
    far = np.clip([mean - other_mean - apart, mean - other_mean + apart], lower_end - upper_end, upper_end - lower_end)
    return {
        **{"heads": count, "mean": mean, "mean_low": low, "mean_high": high},
        **{"others": other_count, "others_mean": other_mean, "difference": mean - other_mean},
        **{"difference_low": far[0], "difference_high": far[1]},
    }


def _reach(variance: float, freedom: float) -> float:
    """Half the width of an interval by Student's t, degrees of freedom rounded down; NaN if the variance is NaN."""
    if not variance > 0:
        return 0.0 if variance == 0 else np.nan
    return float(stdtrit(max(1, floor(freedom + 1e-9)), 1 - LEVEL / 2) * variance**0.5)


def _among(first: Members, members: Members, is_known: Members) -> dict[str, float]:
    """How many of the first heads are in the group, and the probability of as many or more by chance."""
    total, size, n_first = int(is_known.sum()), int((members & is_known).sum()), int(first.sum())
    hits = int((first & members).sum())
    counts = range(hits, min(size, n_first) + 1)
    ways = sum(comb(size, count) * comb(total - size, n_first - count) for count in counts)
    return {"first": hits, "of_first": n_first, "p_first": ways / comb(total, n_first)}


Statistics = Mapping[tuple[str, Site, int], GroupSums]
MIN_SIGNIFICANT = 3
"""The fewest heads that a correlation is reported for."""


def need_table(heads: pd.DataFrame, measures: Sequence[Measure], sums: Statistics) -> pd.DataFrame:
    """`importance.csv`: a row for each measure and head, with its rank (1: needed most) and the test against zero.

    Ranks are among all heads, or among those of the layer for measures that are comparable within a layer only.
    """
    ids = [HeadId.of_row(row) for row in heads[["site", "layer", "head"]].to_dict("records")]
    parts = []
    for measure in measures:
        part = heads[["site", "layer", "head"]].assign(measure=measure.name)
        for end in ("", "_low", "_high"):
            part[f"value{end}"] = heads[measure.name + end]
        ascending = measure.keep == "lowest"
        scores = heads.groupby(["site", "layer"])[measure.name] if measure.within_layer else heads[measure.name]
        part["rank"] = scores.rank(ascending=ascending, method="min").astype("Int64")
        part["p"] = _p_of(measure.name, ids, sums)
        part["p_adjusted"] = adjust(part["p"].to_numpy())
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def agreement_table(heads: pd.DataFrame, measures: Sequence[Measure]) -> pd.DataFrame:
    """`importance_agreement.csv`: rank correlations of every two measures that order heads of all layers.

    Over the heads that have both numbers.
    """
    signs = {measure.name: 1.0 if measure.keep == "highest" else -1.0 for measure in measures if measure.orders}
    rows = []
    for first, second in combinations(signs, 2):
        pair = np.stack([signs[name] * heads[name].to_numpy(dtype=float) for name in (first, second)])
        finite_pairs = pair[:, ~np.isnan(pair).any(axis=0)]
        rows.append((first, second, finite_pairs.shape[1], spearman(*finite_pairs), kendall(*finite_pairs)))
    return pd.DataFrame(rows, columns=["first", "second", "heads", "spearman", "kendall"])


def significant_agreement(need: pd.DataFrame, sums: Statistics, bootstrap: Bootstrap) -> pd.DataFrame:
    """`patching_agreement.csv`: how every two measures agree on the heads with a significant effect in the first one.

    Spearman's ρ of the order and Pearson's r of the sizes, with intervals over sentences; NaN for fewer than three
    heads. Heads without an effect would agree, or not, by noise alone. The first measure in `need` is the exact one if
    it ran. Measures are means over sentences, from the statistics of the same names.
    """
    names = list(dict.fromkeys(need["measure"]))
    rows = need[(need["measure"] == names[0]) & (need["p_adjusted"] <= FALSE_DISCOVERIES)].to_dict("records")
    significant_heads = {HeadId.of_row(row) for row in rows}
    means = {name: _samples(name, sums, bootstrap, significant_heads) for name in names}
    agreement_rows = []
    for first, second in combinations(names, 2):
        pair = means[first], means[second]
        row = {"first": first, "second": second, "heads": len(significant_heads)}
        for name, values in (("spearman", row_spearman(*pair)), ("pearson", row_pearson(*pair))):
            samples = values if len(significant_heads) >= MIN_SIGNIFICANT else torch.full_like(values, torch.nan)
            row |= interval(samples).cell(name)
        agreement_rows.append(row)
    ends = [f"{name}{end}" for name in ("spearman", "pearson") for end in ("", "_low", "_high")]
    return pd.DataFrame(agreement_rows, columns=["first", "second", "heads", *ends])


def _samples(name: str, sums: Statistics, bootstrap: Bootstrap, heads: set[HeadId]) -> Tensor:
    """The means [1+r n] of n heads, layer by layer, on the corpus and in each of r replicates."""
    parts = []
    for key in sorted(key for key in sums if key[0] == name):
        total, count = bootstrap.sums(sums[key])
        means = total / count
        parts.append(means[:, [HeadId(*key[1:], head) in heads for head in range(means.shape[1])]])
    return torch.cat(parts, dim=1)


def _p_of(name: str, ids: Sequence[HeadId], sums: Statistics) -> Array:
    """p of every head's mean being zero; NaN without sums over sentences, and for measures that are never negative."""
    p: dict[HeadId, float] = {}
    negative = False
    for (statistic, site, layer), group_sums in sums.items():
        if statistic == name and group_sums.total.ndim == 2:
            total, count = group_sums.total[: group_sums.n_used], group_sums.count[: group_sums.n_used]
            negative = negative or bool((total < 0).any())
            p |= {HeadId(site, layer, head): of_head for head, of_head in enumerate(p_of_difference(total, count))}
    return np.array([p.get(head, np.nan) if negative else np.nan for head in ids])
