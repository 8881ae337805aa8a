"""Two studies compared, as answers: which heads changed roles, and how alike every measure orders the heads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from headscope.config.declarations import measure_of
from headscope.engine.rank_correlation import spearman
from headscope.results.answer import Answer, AnswerTable, number_text
from headscope.results.roles import NONE, role_of
from headscope.results.study import Study
from headscope.results.study_tables import HEAD_COLUMNS
from headscope.signature import counted

HEAD = list(HEAD_COLUMNS)
FEWEST = 3  # heads that a correlation needs


def comparison(first: Study, second: Study, names: tuple[str, str]) -> list[Answer]:
    """What changed from the first study to the second: heads one by one at sites with the same layout, else means."""
    layouts = first.layout, second.layout
    sites = [site for site, counts in layouts[0].items() if layouts[1].get(site) == counts]
    both = first.heads.merge(second.heads, on=HEAD, suffixes=("", ":B"))
    both = both[both["site"].isin(sites)].reset_index(drop=True)
    answers = list(_changed(first, both, names)) if sites else []
    shared = [name for name in first.measures if name in second.measures]
    answers += _orders(both, shared, names) if sites else []
    apart = [site for site in layouts[0] if site not in sites and site in layouts[1]]
    if len(sites) < len(layouts[0]):
        left = ", ".join(site for site in layouts[0] if site not in sites)
        text = f"{left} differ in layout; no head of theirs is compared"
        table = _means(first.heads, second.heads, apart, shared)
        answers.append(Answer("Means over heads", text, table, caution=True))
    return answers


def _changed(first: Study, both: pd.DataFrame, names: tuple[str, str]) -> Iterator[Answer]:
    roles = [[_roles(cell) for cell in both[column]] for column in ("functions", "functions:B")]
    changed = [row for row in range(len(both)) if set(roles[0][row]) != set(roles[1][row])]
    heads = [".".join(map(str, both.loc[row, HEAD])) for row in changed]
    rows = tuple(
        (first.short_name(head), *(", ".join(own[row]) or NONE for own in roles))
        for head, row in zip(heads, changed, strict=True)
    )
    text = f"{len(changed):,} of {counted(len(both), 'head')} changed role from {names[0]} to {names[1]}"
    yield Answer("Which heads changed", text, AnswerTable(("head", *names), rows) if rows else None, tuple(heads))


def _roles(cell: object) -> list[str]:
    return list(dict.fromkeys(role_of(label.strip()) for label in str(cell or "").split(";") if label.strip()))


def _orders(both: pd.DataFrame, measures: list[str], names: tuple[str, str]) -> list[Answer]:
    """Spearman's correlation of every measure that at least three heads have in both, the most alike first."""
    found = []
    for name in measures:
        x, y = (both[column].to_numpy(dtype=float) for column in (name, f"{name}:B"))
        known = np.isfinite(x) & np.isfinite(y)
        if known.sum() >= FEWEST:
            rho = spearman(x[known], y[known])
            if np.isfinite(rho):
                difference = number_text((y - x)[known].mean())
                found.append(
                    (rho, (measure_of(name).label, f"{rho:.2f}".replace("-", "−"), difference, f"{known.sum():,}"))
                )
    rows = tuple(row for _, row in sorted(found, key=lambda entry: -entry[0]))
    columns = ("measure", "rank correlation", f"{names[1]} − {names[0]}, mean", "heads")
    return [Answer("Do they order the heads alike", "", AnswerTable(columns, rows))] if rows else []


def _means(first: pd.DataFrame, second: pd.DataFrame, sites: list[str], measures: list[str]) -> AnswerTable | None:
    rows = []
    for site in sites:
        own, other = (heads.loc[heads["site"] == site, measures].mean() for heads in (first, second))
        rows += [
            (site, measure_of(name).label, number_text(own[name]), number_text(other[name]))
            for name in measures
            if np.isfinite(own[name]) and np.isfinite(other[name])
        ]
    return AnswerTable(("site", "measure", "mean in the first", "mean in the second"), tuple(rows)) if rows else None
