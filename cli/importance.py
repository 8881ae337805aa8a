"""What `headscope analyze --importance` answers: which heads the model needs most and least, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.config.declarations import measure_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from headscope.engine.conclusion import AnalysisResult


MEASURED = ("ablation", "shapley", "integrated_gradients")
"""What is measured by taking heads out comes before what is estimated; the rest in the order of the columns."""
MOST = 5
LEVEL = 0.05


def main_measure(study: AnalysisResult) -> str:
    """The importance that the summary speaks of; empty where none has numbers."""
    table = study.tables.get("importance")
    if table is None:
        return ""
    names = list(dict.fromkeys(table.dropna(subset=["value"])["measure"]))
    return next((name for name in MEASURED if name in names), next(iter(names), ""))


def importance_tables(study: AnalysisResult) -> Iterator[Any]:
    """The heads needed most and least with intervals, and how the rankings agree."""
    main = main_measure(study)
    if not main:
        return
    ranked = ranked_rows(study, main)
    yield most_and_least(ranked, f"the heads that the model needs most and least, by {measure_of(main).words}", main)
    if len(study.tables["importance_agreement"]):
        yield _agreement(study.tables["importance_agreement"], main)
    if "importance_functions" in study.tables:
        table = study.tables["importance_functions"]
        title = f"functions by {measure_of(main).words} (every importance is in importance_functions.csv)"
        columns = ("heads", "mean", "95 %", "less the others", "95 % ", "needed most")
        shown = console.table(("function", *columns), title=title, numbers=columns, whole=("function", *columns))
        for row in table[table["measure"] == main].to_dict("records"):
            name = f"mostly {row['name']}" if row["kind"] == "mostly" else row["name"]
            cells = [f"{row['heads']}"]
            for column in ("mean", "difference"):
                ends = [row[f"{column}_{end}"] for end in ("low", "high")]
                known = ends[0] == ends[0]
                cells += [number_text(row[column]), " to ".join(map(number_text, ends)) if known else ""]
            shown.add_row(name, *cells, f"{row['first']} of {row['of_first']}")
        yield shown


def most_and_least(ranked: pd.DataFrame, title: str, main: str) -> Table:
    """The first and the last of ranked heads."""
    count = min(MOST, len(ranked) // 2)
    columns, whole = ("rank", "head", main, "95 %", "from zero", "functions"), ("head", main, "95 %", "from zero")
    table = console.table(columns, title=title, numbers=("rank", main, "95 %"), whole=whole)
    for number, part in enumerate((ranked.head(count), ranked.tail(count))):
        if number and 2 * count < len(ranked):
            table.add_row("…")
        for row in part.to_dict("records"):
            table.add_row(*head_cells(row))
    return table


def importance_answers(study: AnalysisResult) -> Iterator[str]:
    """The last lines about importance."""
    main = main_measure(study)
    if not main:
        return
    ranked = ranked_rows(study, main)
    first, last = ranked.iloc[0], ranked.iloc[-1]
    named = [f"{head_name(row)} ({number_text(row['value'])}, {interval_text(row)})" for row in (first, last)]
    yield f"by {main} the model needs {named[0]} most and {named[1]} least"
    tested = ranked["p_adjusted"].dropna()
    if len(tested):
        zero = int((tested > LEVEL).sum())
        yield (
            f"{zero} of {len(tested)} heads cannot be told from zero, each by itself (5 % false discoveries, corrected "
            "for all heads); together they may matter"
        )
    elif (ranked["value"] < 0).any():
        yield f"{main} is not tested against zero, which takes numbers of two sentences at least"
    else:
        yield f"{main} is never negative here, so that no head can be tested against zero"
    from headscope.engine.evidence.function_need import function_need_sentence

    if said := function_need_sentence(study.tables.get("importance_functions"), main):
        yield said
    pairs = study.tables["importance_agreement"].dropna(subset=["spearman"])
    if len(pairs):
        import numpy as np

        rho, tau = pairs["spearman"].to_numpy(), pairs["kendall"].to_numpy()
        worst = pairs.iloc[int(rho.argmin())]
        yield (
            f"{len(pairs)} pairs of rankings agree by a median Spearman of {np.median(rho):.2f} (Kendall "
            f"{np.median(tau):.2f}); the least, {worst['first']} and {worst['second']}, by {rho.min():.2f}"
        )


def ranked_rows(study: AnalysisResult, main: str, *, group: str = "importance") -> pd.DataFrame:
    """The heads with a number, needed most first, and their functions; `group` is the table that has the measure."""
    table = study.tables[group]
    rows = table[(table["measure"] == main) & table["value"].notna()]
    functions = study.heads[["site", "layer", "head", "functions"]].assign(sites=study.heads["site"].nunique())
    return rows.merge(functions, on=["site", "layer", "head"]).sort_values("rank", kind="stable")


def head_cells(row: dict[Any, Any]) -> list[str]:
    """Rank, head, value, interval, whether it can be told from zero, functions."""
    p = row["p_adjusted"]
    from_zero = "" if p != p else "not told" if p > LEVEL else "above" if row["value"] > 0 else "below"
    functions = row["functions"].replace(";", " ")
    return [str(row["rank"]), head_name(row), number_text(row["value"]), interval_text(row), from_zero, functions]


def head_name(row: Any) -> str:
    """The head of a row, with its site where the model has several."""
    return f"{row['site']}.{row['layer']}.{row['head']}" if row["sites"] > 1 else f"{row['layer']}.{row['head']}"


def number_text(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}"


def interval_text(row: Any) -> str:
    """The interval of a row."""
    return f"{number_text(row['value_low'])} to {number_text(row['value_high'])}"


def _agreement(pairs: pd.DataFrame, main: str) -> Table:
    """Every ranking beside the main one and, on average, beside all others."""
    title = "how the rankings agree (all pairs are in importance_agreement.csv)"
    columns = (f"Spearman with {main}", f"Kendall with {main}", "mean Spearman with the others")
    table = console.table(["ranking", *columns], title=title, numbers=columns, whole=("ranking",))
    for name in dict.fromkeys([*pairs["first"], *pairs["second"]]):
        own_pairs = pairs[(pairs["first"] == name) | (pairs["second"] == name)]
        beside = (
            own_pairs[(own_pairs["first"] == main) | (own_pairs["second"] == main)]
            if name != main
            else own_pairs.head(0)
        )
        cells = [f"{float(beside[kind].iloc[0]):.2f}" if len(beside) else "" for kind in ("spearman", "kendall")]
        table.add_row(name, *cells, f"{own_pairs['spearman'].mean():.2f}")
    return table


def main_effect(study: AnalysisResult) -> str:
    """The measure that the summary speaks of, the exact one where it ran; empty without any."""
    table = study.tables.get("patching")
    names = [] if table is None else list(dict.fromkeys(table.dropna(subset=["value"])["measure"]))
    return "patching" if "patching" in names else next(iter(names), "")


def patching_tables(study: AnalysisResult) -> Iterator[Any]:
    """The heads that the answers need most and least, and how estimates rank them."""
    if main := main_effect(study):
        ranked = ranked_rows(study, main, group="patching")
        yield most_and_least(
            ranked, f"the heads that the answers need most and least, by {measure_of(main).words}", main
        )
        if len(study.tables["patching_agreement"]):
            title = "how the rankings agree: Spearman with its interval over prompts"
            rows = (
                (row["first"], row["second"], *_rho(row))
                for row in study.tables["patching_agreement"].to_dict("records")
            )
            columns = ("ranking", "and", "Spearman", "95 %")
            yield console.table(columns, rows, title=title, numbers=columns[2:], pad_edge=True)


def patching_answers(study: AnalysisResult) -> Iterator[str]:
    """The last lines about the heads that the answers need."""
    main = main_effect(study)
    if not main:
        return
    yield _strongest(ranked_rows(study, main, group="patching"), main)
    for row in study.tables["patching_agreement"].to_dict("records"):
        if row["first"] == main and row["spearman"] == row["spearman"]:
            value, interval = _rho(row)
            yield f"{row['second']} ranks heads as {main} does by a Spearman of {value} ({interval})"


def _strongest(ranked: pd.DataFrame, main: str) -> str:
    """The head that moves the answers most, and how many move them at all."""
    told = ranked[ranked["p_adjusted"] <= LEVEL]
    if not len(told):
        return f"by {main} no head can be told from zero ({len(ranked)} tested, 5 % false discoveries)"
    strongest = max(told.to_dict("records"), key=lambda row: abs(row["value"]))
    below = int((told["value"] < 0).sum())
    return (
        f"by {main} {head_name(strongest)} moves the answers most ({number_text(strongest['value'])}, "
        f"{interval_text(strongest)}); {len(told)} of {len(ranked)} heads can be told from zero (5 % false "
        f"discoveries), {below} of them speak against the answer"
    )


def _rho(row: Any) -> tuple[str, str]:
    return f"{row['spearman']:.2f}", f"{row['spearman_low']:.2f} to {row['spearman_high']:.2f}"
