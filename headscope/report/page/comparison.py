"""Two analysis runs head by head: whose function changed, and how far the measures put heads in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headscope.report.page.importance import numbers
from headscope.report.page.numbers import rounded, spearman

Data = Mapping[str, Any]
Place = tuple[str, int, int]


def comparison_data(first: Data, second: Data) -> dict[str, Any]:
    """Sites whose layouts agree, pairs of heads whose labels differ, and Spearman's correlation of every measure.

    `pairs` are rows of the same head in both runs; `changed` have those whose functions differ. Where no site has the
    same layout in both, all are empty.
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
                    "spearman": rounded(correlation, 4),
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
    }


def places_of(data: Data) -> list[Place]:
    """Site, layer and head of every row."""
    sites = list(data["layout"])
    return [
        (sites[site], layer, head) for site, layer, head in zip(data["site"], data["layer"], data["head"], strict=True)
    ]


def head_names(data: Data) -> list[str]:
    """`encoder-self.2.5` of every row."""
    return [".".join(map(str, place)) for place in places_of(data)]
