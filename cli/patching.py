"""What `headscope analyze --clean` answers: which heads answers need, and how far estimates of that can be trusted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headscope.cli.importance import LEVEL, head_name, interval_text, most_and_least, number_text, ranked_rows
from headscope.engine.declarations import measure_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from headscope.engine.result import AnalysisResult


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
            yield _agreement(study.tables["patching_agreement"])


def patching_answers(study: AnalysisResult) -> Iterator[str]:
    """The last lines about the heads that the answers need."""
    main = main_effect(study)
    if not main:
        return
    yield _strongest(ranked_rows(study, main, group="patching"), main)
    for row in study.tables["patching_agreement"].to_dict("records"):
        if row["first"] == main and row["spearman"] == row["spearman"]:
            yield f"{row['second']} ranks heads as {main} does by a Spearman of {_rho(row)}"


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


def _rho(row: Any) -> str:
    return f"{row['spearman']:.2f} ({row['spearman_low']:.2f} to {row['spearman_high']:.2f})"


def _agreement(pairs: pd.DataFrame) -> Table:
    from rich import box
    from rich.table import Table

    title = "how the rankings agree: Spearman with its interval over prompts"
    table = Table("ranking", "and", title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("Spearman", "95 %"):
        table.add_column(name, justify="right")
    for row in pairs.to_dict("records"):
        interval = f"{row['spearman_low']:.2f} to {row['spearman_high']:.2f}"
        table.add_row(row["first"], row["second"], f"{row['spearman']:.2f}", interval)
    return table
