"""Two studies compared: which heads differ most, which changed roles, and how alike measures order them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import norm

from headscope.config.declarations import measure_of
from headscope.engine.evidence.significance import adjust, spearman
from headscope.heads import HeadId
from headscope.results.answer import Answer, AnswerTable, Result, interval_text, number_text
from headscope.results.roles import NONE, role_of
from headscope.results.study import Study
from headscope.results.study_answers import LEVEL, importance_label, main_importance
from headscope.results.study_tables import HEAD_COLUMNS
from headscope.signature import count_of

MAX_SHOWN = 5  # rows of an answer; all are details
FEWEST = 4  # heads that the interval of a correlation needs
QUANTILE = float(norm.ppf(0.975))


class StudyComparison(Result):
    """The differences between two studies, head by head at sites with the same layout.

    `tables` has "heads", a row a head with the columns of both studies (`…:A`, `…:B`) and, of `measure`, the
    difference B − A with p and its adjusted value, and "measures", a row a measure with its rank correlation.
    """

    def __init__(self, studies: Sequence[Study], *, names: Sequence[str] = (), measure: str = "") -> None:
        self.first, self.second = studies
        self.names = tuple(names) or tuple(study.name for study in studies)
        self.names = self.names if len(set(self.names)) == 2 else ("A", "B")
        layouts = self.first.layout, self.second.layout
        self.sites = [site for site, counts in layouts[0].items() if layouts[1].get(site) == counts]
        self.shared = [name for name in self.first.measures if name in self.second.measures]
        self.measure = measure or compared_measure(self.first, self.second)
        pairs = self.first.heads.merge(self.second.heads, on=HEAD_COLUMNS, suffixes=(":A", ":B"))
        heads = pairs[pairs["site"].isin(self.sites)].reset_index(drop=True).copy()
        self.tables = {"heads": self._with_differences(heads), "measures": self._correlations(heads)}
        self.record = {"runs": dict(zip("AB", self.names, strict=True)), "measure": self.measure}
        self.signature = "\n".join(study.signature for study in studies)

    def _with_differences(self, heads: pd.DataFrame) -> pd.DataFrame:
        """The table with difference and p-value of the measure, by the normal approximation of both intervals."""
        if not self.measure:
            return heads
        difference = heads[f"{self.measure}:B"] - heads[f"{self.measure}:A"]
        ends = [(f"{self.measure}_low:{run}", f"{self.measure}_high:{run}") for run in "AB"]
        widths = [heads[high] - heads[low] if low in heads else difference * np.nan for low, high in ends]
        error = (widths[0] ** 2 + widths[1] ** 2) ** 0.5 / (2 * QUANTILE)
        p = 2 * norm.sf((difference / error.where(error > 0)).abs())
        return heads.assign(difference=difference, p=p, p_adjusted=adjust(p))

    def _correlations(self, heads: pd.DataFrame) -> pd.DataFrame:
        """Spearman's correlation of every measure with its 95 % interval (Bonett & Wright 2000), the least first."""
        rows = []
        for name in self.shared:
            values = heads[[f"{name}:A", f"{name}:B"]].dropna().to_numpy(float)
            rho = spearman(*values.T) if len(values) >= FEWEST else np.nan
            if np.isfinite(rho):
                reach = QUANTILE * np.sqrt((1 + rho**2 / 2) / (len(values) - 3))
                low, high = np.tanh(np.arctanh(np.clip(rho, -1 + 1e-12, 1 - 1e-12)) + np.array([-reach, reach]))
                rows.append((name, rho, low, high, (values[:, 1] - values[:, 0]).mean(), len(values)))
        columns = ["measure", "spearman", "spearman_low", "spearman_high", "difference", "heads"]
        table = pd.DataFrame(rows, columns=columns)
        return table.sort_values("spearman", key=lambda rho: rho.where(table["measure"] != self.measure, -2))

    def answers(self) -> list[Answer]:
        """The largest changes, the roles, and the agreement of measures."""
        same_model = self.first.model == self.second.model
        studies = zip(self.names, (self.first, self.second), strict=True)
        runs = (f"{name} ({'' if same_model else f'{study.model}, '}{study.data})" for name, study in studies)
        subject = f"{self.first.model}: " * same_model + " against ".join(runs)
        answers = [Answer("", subject)]
        if sites := [site for site in self.first.layout if site not in self.sites]:
            answers.append(Answer("Not compared", f"heads of {', '.join(sites)}: the layouts differ", caution=True))
        if self.sites:
            answers += [*self._differences(), *self._changed_roles(), *self._orders()]
        return sorted(answers, key=lambda answer: answer.detail)

    def _differences(self) -> Iterator[Answer]:
        if not self.measure:
            return
        heads = self.tables["heads"].dropna(subset=["difference"])
        heads = heads.sort_values("difference", key=abs, ascending=False, kind="stable")
        columns = ("head", *self.names, f"{self.names[1]} − {self.names[0]}", "adjusted p")
        numbers = [f"{self.measure}:A", f"{self.measure}:B", "difference"]
        rows = []
        for row in heads.to_dict("records"):
            p = row["p_adjusted"]
            p_text = "" if np.isnan(p) else "< 0.001" if p < 0.001 else number_text(p, 2)
            rows.append((HeadId.of_row(row), *(number_text(row[name], 2) for name in numbers), p_text))
        yield Answer("Do heads differ", self._verdict())
        question = f"Which heads differ most: {importance_label(self.first, measure_of(self.measure))}"
        yield from self._table(question, "", columns, rows)

    def _verdict(self) -> str:
        """How many heads differ significantly."""
        p_values, words = self.tables["heads"]["p_adjusted"].dropna(), measure_of(self.measure).words
        count, heads = int((p_values <= LEVEL).sum()), count_of(len(p_values), "head")
        test = f"by {words} (adjusted p of at most {LEVEL:g}, runs taken as independent samples)"
        return f"{count or 'none'} of {heads}, {test}" if len(p_values) else f"{words} has no intervals to test by"

    def _changed_roles(self) -> Iterator[Answer]:
        heads = self.tables["heads"]
        rows = []
        for row in heads.to_dict("records"):
            labels = [str(row[f"functions:{run}"] or "").split(";") for run in "AB"]
            roles = [list(dict.fromkeys(role_of(label) for label in of_run if label)) for of_run in labels]
            if set(roles[0]) != set(roles[1]):
                rows.append((HeadId.of_row(row), *(", ".join(of_run) or NONE for of_run in roles)))
        text = f"{len(rows):,} of {count_of(len(heads), 'head')} changed role from {self.names[0]} to {self.names[1]}"
        yield from self._table("Which heads changed role", text, ("head", *self.names), rows)

    def _orders(self) -> Iterator[Answer]:
        rows = [
            (
                measure_of(row["measure"]).label,
                f"{row['spearman']:.2f}".replace("-", "−"),
                interval_text(row["spearman_low"], row["spearman_high"], 2),
                number_text(row["difference"]),
            )
            for row in self.tables["measures"].to_dict("records")
        ]
        if rows:
            columns = ("measure", "Spearman", "95 %", f"{self.names[1]} − {self.names[0]}, mean")
            text = f"the least alike of {len(rows)} measures" if len(rows) > MAX_SHOWN else ""
            yield from self._table("Do they order the heads alike", text, columns, rows)

    def _table(
        self, question: str, text: str, columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]]
    ) -> Iterator[Answer]:
        """An answer with the first rows, and as a detail one with all of them; heads have their short names."""
        heads = tuple(str(row[0]) for row in rows if isinstance(row[0], HeadId))
        texts = [
            tuple(cell.name(self.first.layout) if isinstance(cell, HeadId) else cell for cell in row) for row in rows
        ]
        table = AnswerTable(columns, tuple(texts[:MAX_SHOWN])) if rows else None
        yield Answer(question, text, table, heads[:MAX_SHOWN])
        if len(rows) > MAX_SHOWN:
            yield Answer(f"{question}: all", "", AnswerTable(columns, tuple(texts)), heads, detail=True)


def compared_measure(first: Study, second: Study) -> str:
    """The measure to compare heads by: the importance, else the first of an overview, or ""."""
    shared = [name for name in first.measures if name in second.measures]
    main = main_importance(first)
    if main and main.name in shared:
        return main.name
    return min(
        (name for name in shared if measure_of(name).overview), key=lambda name: measure_of(name).overview, default=""
    )
