"""How much the model needs each head: importances, how much they agree, and whether removal bears them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from headscope.config.declarations import measure_of
from headscope.engine.evidence.function_need import function_need_sentence, need_over_models
from headscope.engine.evidence.need import agreement_table
from headscope.report.figures.faithfulness import METRICS
from headscope.report.page.numbers import rounded, rounded_all, spearman
from headscope.results.study import Study
from headscope.results.study_tables import HEAD_COLUMNS, MissingTable

GROUP = "importance"
LEADING = ("ablation", "shapley", "integrated_gradients")
"""Measures of what the model loses, the most direct first; where there is none, the first that a run has leads."""
Data = Mapping[str, Any]


def importances(data: Data) -> list[dict[str, Any]]:
    """The measures of a run that order heads by how much the model needs them, the one to read first in front."""
    measures = [measure for measure in data["measures"] if measure["group"] == GROUP and measure["orders"]]
    return sorted(measures, key=lambda measure: _place(measure["name"]))


def _place(name: str) -> int:
    return LEADING.index(name) if name in LEADING else len(LEADING)


def numbers(measure: Data, part: str = "values") -> np.ndarray[Any, np.dtype[np.float64]]:
    """A measure's values, NaN where there is none; or the lower ("low") or upper ("high") ends of its intervals."""
    values = measure["values"]
    if part != "values" and measure["bounds"] is not None:
        values = measure["bounds"][0 if part == "low" else 1]
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def needed(measure: Data) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of the heads from the one that the model needs most; heads without a number are left out."""
    values = numbers(measure)
    order = np.argsort(-values if measure["keep"] == "highest" else values, kind="stable")
    return order[np.isfinite(values[order])]


def importance_data(run: Study, data: Data) -> dict[str, Any] | None:
    """Names of the importances, Spearman's correlations of every two and their median; None where the run has none.

    `functions` says how much the heads of every function are needed. `zero` has, of those that were tested against
    zero, the adjusted p of every head.
    """
    measures = importances(data)
    if not measures:
        return None
    columns = {measure["name"]: numbers(measure) for measure in measures}
    pairs = agreement_table(pd.DataFrame(columns), [measure_of(name) for name in columns])
    matrix = pd.DataFrame(np.eye(len(columns)), index=[*columns], columns=[*columns])
    for first, second, rho in pairs[["first", "second", "spearman"]].itertuples(index=False):
        matrix.loc[first, second] = matrix.loc[second, first] = rho
    return {
        "measures": [*columns],
        "agreement": [rounded_all(row) for row in matrix.to_numpy()],
        "median": rounded(pairs["spearman"].median()),
        "zero": _tests(run, [*columns]),
        "functions": _function_need(run, [*columns]),
    }


NEED = (
    *("heads", "mean", "mean_low", "mean_high", "others_mean", "difference", "difference_low", "difference_high"),
    *("first", "of_first"),
)


def _function_need(run: Study, names: Sequence[str]) -> dict[str, Any]:
    """Of every importance a sentence, and rows of importance_functions.csv: kind, name, and the numbers of `NEED`."""
    try:
        table = run.table("importance_functions")
    except MissingTable:
        return {}
    return {
        name: {
            "said": function_need_sentence(table, name),
            "rows": [
                [row["kind"], row["name"], *rounded_all(row[column] for column in NEED)]
                for row in table[table["measure"] == name].to_dict("records")
            ],
        }
        for name in names
    }


def needs_data(analyses: Sequence[Data]) -> dict[str, Any] | None:
    """Functions × importances over the runs that have both; None for fewer than two.

    `cells` has, for every function and measure: mean, both ends of its interval, the numbers of the `runs`, heads.
    """
    runs = [number for number, data in enumerate(analyses) if importances(data)]
    models = []
    for data in (analyses[number] for number in runs):
        columns = {measure["name"]: numbers(measure) for measure in importances(data)}
        heads = pd.DataFrame({"functions": [";".join(labels) for labels in data["functions"]], **columns})
        models.append((heads, [measure_of(name) for name in columns]))
    table = need_over_models(models)
    if len(runs) < 2 or table.empty:
        return None
    cells: dict[str, dict[str, Any]] = {}
    for row in table.to_dict("records"):
        ends = rounded_all((row["needed"], row["needed_low"], row["needed_high"]))
        cells.setdefault(row["name"], {})[row["measure"]] = [*ends, rounded_all(row["each"]), row["heads"]]
    measures = {measure.name: measure.words for _, its in models for measure in its}
    return {"runs": runs, "measures": measures, "cells": cells}


def _tests(run: Study, names: Sequence[str]) -> dict[str, list[Any]]:
    """The column `p_adjusted` of importance.csv by measure, in the order of the heads."""
    try:
        table = run.table("importance", "measure", "p_adjusted")
    except MissingTable:
        return {}
    heads = list(HEAD_COLUMNS)
    adjusted = {}
    for name in names:
        own = run.heads[heads].merge(table[table["measure"] == name].drop_duplicates(heads), on=heads, how="left")
        if own["p_adjusted"].notna().any():
            adjusted[name] = rounded_all(own["p_adjusted"])
    return adjusted


def faithfulness_data(run: Study) -> dict[str, Any] | None:
    """The rankings, the best first, and what removing heads in their orders did; None where that was not tried."""
    try:
        table, curves = run.table("faithfulness_rankings"), run.table("faithfulness")
    except MissingTable:
        return None
    columns = [str(name) for name in table.columns]
    rows = [[_cell(value) for value in row] for row in table.itertuples(index=False, name=None)]
    drawn: dict[str, dict[str, dict[str, list[Any]]]] = {}
    ends = ["share", "harm", "harm_low", "harm_high"]
    for (metric, ranking, order), group in curves.groupby(["metric", "ranking", "order"], sort=False):
        points = [rounded_all(row) for row in group[ends].itertuples(index=False, name=None)]
        drawn.setdefault(str(metric), {}).setdefault(str(ranking), {})[str(order)] = points
    metrics = [{"name": metric, "title": METRICS.get(metric, metric)} for metric in drawn]
    return {"columns": columns, "rows": rows, "metrics": metrics, "curves": drawn}


def _cell(value: Any) -> Any:
    return value if isinstance(value, str) else rounded(value)


def best_ranking(faithfulness: Data) -> dict[str, Any] | None:
    """The row of the best ranking by column."""
    rows: Sequence[Sequence[Any]] = faithfulness["rows"]
    return dict(zip(faithfulness["columns"], rows[0], strict=True)) if rows else None


Place = tuple[str, int, int]


def comparison_data(first: Data, second: Data) -> dict[str, Any]:
    """Sites whose layouts agree, pairs of heads whose labels differ, and Spearman's correlation of every measure.

    `pairs` are rows of the same head in both runs; `changed` have those whose functions differ. Of sites that are in
    both with other layouts, such as those of a pruned model, no head is another's; `means` has what can be compared:
    site, measure, and its mean over the heads of each run.
    """
    sites = [site for site, counts in first["layout"].items() if second["layout"].get(site) == counts]
    places = {place: row for row, place in enumerate(places_of(second))}
    both = [(row, place) for row, place in enumerate(places_of(first)) if place[0] in sites and place in places]
    pairs = [[row, places[place]] for row, place in both]
    changed = [pair for pair in pairs if set(first["functions"][pair[0]]) != set(second["functions"][pair[1]])]
    others = {measure["name"]: measure for measure in second["measures"]}
    rows = np.array(pairs, dtype=int).reshape(-1, 2)
    correlations = []
    for measure in first["measures"]:
        if measure["name"] in others:
            x, y = numbers(measure)[rows[:, 0]], numbers(others[measure["name"]])[rows[:, 1]]
            correlation, count = spearman(x, y)
            known = np.isfinite(x) & np.isfinite(y)
            difference = float((y - x)[known].mean()) if known.any() else float("nan")
            correlations.append(
                {
                    "name": measure["name"],
                    "spearman": rounded(correlation),
                    "heads": count,
                    "difference": rounded(difference),
                }
            )
    return {
        "sites": sites,
        "left_out": [site for site in first["layout"] if site not in sites],
        "pairs": pairs,
        "changed": changed,
        "correlations": correlations,
        "means": _means_of_sites(first, second, [site for site in first["layout"] if site not in sites]),
    }


def _means_of_sites(first: Data, second: Data, sites: Sequence[str]) -> list[list[Any]]:
    """Site, title and both means of every measure that both runs have at sites that both have."""
    others = {measure["name"]: measure for measure in second["measures"]}
    rows = []
    for site in filter(second["layout"].get, sites):
        here = [np.array([place[0] == site for place in places_of(data)], dtype=bool) for data in (first, second)]
        for measure in (each for each in first["measures"] if each["name"] in others):
            values = [numbers(each)[own] for each, own in zip((measure, others[measure["name"]]), here, strict=True)]
            known = [column[np.isfinite(column)] for column in values]
            if all(map(len, known)):
                rows.append([site, measure["title"], *(rounded(float(column.mean())) for column in known)])
    return rows


def places_of(data: Data) -> list[Place]:
    """Site, layer and head of every row."""
    sites = list(data["layout"])
    return [
        (sites[site], layer, head) for site, layer, head in zip(data["site"], data["layer"], data["head"], strict=True)
    ]


def head_names(data: Data) -> list[str]:
    """`encoder-self.2.5` of every row."""
    return [".".join(map(str, place)) for place in places_of(data)]
