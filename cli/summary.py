"""The summary that `headscope analyze` prints: tables, remarks, and last what was found, where it is, what is next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.importance import importance_answers, importance_tables, patching_answers, patching_tables
from headscope.cli.next_commands import after_analysis
from headscope.heads import HeadId, Site

if TYPE_CHECKING:
    from rich.table import Table

    from headscope.api.analysis import FinishedRun

MOST = 8
RIGHT = ("heads", "sharpness")
"""Columns of numbers, which stand on the right."""


def summary(finished: FinishedRun, *, following: bool = True) -> Iterator[Any]:
    """The parts of the summary, for a rich console; with `following` the command that could come next."""
    from rich.text import Text

    study = finished.study
    if study.labels:
        yield _functions(finished)
    if "explained" in study.heads:
        yield _explained(finished)
    if study.unsupported:
        yield _unsupported(finished)
    if "importance" in study.tables:
        yield from importance_tables(study)
    if "patching" in study.tables:
        yield from patching_tables(study)
    if "sharpness" in study.heads and study.tables.keys().isdisjoint({"importance", "patching"}):
        yield sharpest_heads(finished)
    if "faithfulness_rankings" in study.tables:
        yield _rankings(finished)
    for line in _remarks(finished):
        yield Text(f" {line}")
    yield Text(str(finished.signature), style="dim")
    yield from console.ending(
        [*_function_answer(finished), *importance_answers(study), *patching_answers(study)],
        finished.folder,
        after_analysis(finished) if following else "",
        page=finished.page,
    )


def _function_answer(finished: FinishedRun) -> Iterator[str]:
    """How many heads have which functions."""
    study = finished.study
    if "labels" not in study.tables:
        return
    families = Counter(
        label for labels in study.labels.values() for label in {name.partition(":")[0] for name in labels}
    )
    named = ", ".join(f"{count} {family}" for family, count in families.items())
    weak = sum(map(len, study.unsupported.values()))
    yield f"{len(study.labels)} of {len(study.heads)} heads have a function" + (f": {named}" if named else "")
    if weak:
        yield f"{weak} more label{' lacks' if weak == 1 else 's lack'} evidence; labels.csv says what is missing"


def _functions(finished: FinishedRun) -> Table:
    table = console.table(("function", "heads", "which"), title="heads by function", numbers=RIGHT)
    by_label: dict[str, list[HeadId]] = {}
    for head, labels in finished.study.labels.items():
        for label in labels:
            by_label.setdefault(label, []).append(head)
    for label, heads in sorted(by_label.items(), key=lambda entry: (entry[0] == "sink", entry[0])):
        shown = ", ".join(map(str, sorted(heads)[:MOST]))
        hidden = f" … {len(heads) - MOST} more" if len(heads) > MOST else ""
        table.add_row(label, str(len(heads)), shown + hidden)
    return table


def _explained(finished: FinishedRun) -> Table:
    """What explains the most of each head, heads of one group together, with the sentence of the clearest."""
    from headscope.description.sentences import mostly

    title = "what explains the heads (heads.csv has a sentence for each)"
    table = console.table(("mostly", "heads", "median", "the clearest"), title=title, numbers=RIGHT)
    groups: dict[str, list[dict[Any, Any]]] = {}
    sites = set(finished.study.heads["site"])
    for row in finished.study.heads.dropna(subset=["explained"]).to_dict("records"):
        groups.setdefault(mostly(row), []).append(row)
    for name, rows in sorted(groups.items(), key=lambda entry: -len(entry[1])):
        clearest = max(rows, key=lambda row: float(row["explained"]))
        head = HeadId(Site(clearest["site"]), int(clearest["layer"]), int(clearest["head"]))
        shares = sorted(float(row["explained"]) for row in rows)
        table.add_row(
            name, str(len(rows)), f"{shares[len(shares) // 2]:.2f}", f"{head.name(sites)} {clearest['description']}"
        )
    return table


def _unsupported(finished: FinishedRun) -> Table:
    """Labels that the estimates alone would give."""
    table = console.table(("head", "label", "missing"), title="not enough evidence", numbers=RIGHT)
    sites = set(finished.study.heads["site"])
    rows = [(head, text) for head, texts in finished.study.unsupported.items() for text in texts]
    for head, text in rows[:MOST]:
        label, _, missing = text.partition(" (")
        table.add_row(head.name(sites), label, missing.removesuffix(")"))
    if len(rows) > MOST:
        table.caption, table.caption_justify = f"… {len(rows) - MOST} more in labels.csv", "left"
    return table


def sharpest_heads(finished: FinishedRun) -> Table:
    """The heads whose largest weights most exceed even ones, without sinks, with their intervals and functions."""
    title = (
        "sharpest heads, beside sinks: largest weight of queries that see five keys or more, in times an even weight"
    )
    table = console.table(("head", "sharpness", "95 %", "functions"), title=title, numbers=RIGHT)
    ranked = finished.study.heads.dropna(subset=["sharpness"])
    ranked = ranked[["sink" not in labels.split(";") for labels in ranked["functions"]]]
    heads = ranked.nlargest(MOST, "sharpness")
    row: Any
    for row in heads.itertuples():
        name = HeadId(Site(row.site), int(row.layer), int(row.head)).name(set(finished.study.heads["site"]))
        table.add_row(
            name,
            f"{row.sharpness:.2f}",
            f"{row.sharpness_low:.2f}–{row.sharpness_high:.2f}",
            row.functions.replace(";", " "),
        )
    alike = ranked["sharpness"] == heads["sharpness"].min()
    if alike[~ranked.index.isin(heads.index)].any():
        table.caption, table.caption_justify = (
            f"{int(alike.sum())} heads have the last number; the first are shown",
            "left",
        )
    return table


def _rankings(finished: FinishedRun) -> Table:
    """The rankings, the most faithful first; `chance` is the mean area of random orders ± its standard deviation."""
    title = "rankings by faithfulness: area between removing the most and the least important heads first"
    columns = ("", "ranking", "most important", "area", "95 %", "chance", "CPR", "CMD")
    table = console.table((*columns, "with ablation", "with itself, shuffled"), title=title)
    row: Any
    for row in finished.study.tables["faithfulness_rankings"].itertuples():
        table.add_row(
            str(row.place),
            row.ranking,
            f"the {row.important}",
            f"{row.area:.3f}",
            f"{row.area_low:.3f}–{row.area_high:.3f}",
            f"{row.area_random:.3f} ± {row.area_random_sd:.3f}",
            f"{row.cpr:.3f}",
            f"{row.cmd:.3f}",
            f"{row.ablation_spearman:.2f}",
            f"{row.shuffled_spearman:.2f}",
        )
    return table


def _remarks(finished: FinishedRun) -> Iterator[str]:
    study = finished.study
    plural = "s" * (study.sentences != 1)
    yield f"{study.sentences} sentence{plural}, {len(study.heads)} heads, {finished.seconds:.1f} s in all"
    if study.streamed:
        whole = "" if study.streamed == study.sentences else f" for {study.streamed} sentences, dense for the others"
        yield f"attention: streamed{whole}"
    for left_out in study.left_out:
        yield f"left out: {left_out.analysis} ({left_out.why})"
    if study.losses.truncated:
        yield f"cut off at the length limit: {study.losses.truncated} sentences (--max-length, --long)"
    for reason, count in study.losses.unaligned.items():
        yield f"not aligned with their parse, left out of syntactic: {count} sentences ({reason})"
    if study.losses.fused:
        yield f"relations inside one written word, not counted: {study.losses.fused}"
    yield from study.remarks
