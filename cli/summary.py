"""The summary that `headscope analyze` prints: heads by function, the most confident heads, analyses left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headscope.heads import HeadId, Site

if TYPE_CHECKING:
    from rich.table import Table

    from headscope.api.analysis import Finished

MOST = 8


def summary(finished: Finished) -> Iterator[Any]:
    """The parts of the summary, for a rich console."""
    from rich.text import Text

    study = finished.study
    if study.labels:
        yield _functions(finished)
    if "confidence" in study.heads:
        yield _sharpest(finished)
    if "faithfulness_rankings" in study.tables:
        yield _rankings(finished)
    for line in _remarks(finished):
        yield Text(f" {line}")
    yield Text(str(finished.signature), style="dim")
    yield Text(f"results: {finished.folder}", style="bold")
    if finished.page is not None:
        yield Text(f"page: {finished.page}", style="bold")


def _functions(finished: Finished) -> Table:
    table = _table("heads by function", "function", "heads", "which")
    by_label: dict[str, list[HeadId]] = {}
    for head, labels in finished.study.labels.items():
        for label in labels:
            by_label.setdefault(label, []).append(head)
    for label, heads in sorted(by_label.items(), key=lambda entry: (entry[0] == "sink", entry[0])):
        shown = ", ".join(map(str, sorted(heads)[:MOST]))
        hidden = f" … {len(heads) - MOST} more" if len(heads) > MOST else ""
        table.add_row(label, str(len(heads)), shown + hidden)
    return table


def _sharpest(finished: Finished) -> Table:
    """The most confident heads with their intervals and functions."""
    table = _table("most confident heads", "head", "confidence", "95 %", "functions")
    ranked = finished.study.heads.dropna(subset=["confidence"])
    heads = ranked.nlargest(MOST, "confidence")
    row: Any
    for row in heads.itertuples():
        name = str(HeadId(Site(row.site), int(row.layer), int(row.head)))
        table.add_row(
            name,
            f"{row.confidence:.3f}",
            f"{row.confidence_low:.3f}–{row.confidence_high:.3f}",
            row.functions.replace(";", " "),
        )
    alike = ranked["confidence"] == heads["confidence"].min()
    if alike[~ranked.index.isin(heads.index)].any():
        table.caption, table.caption_justify = (
            f"{int(alike.sum())} heads have the last number; the first are shown",
            "left",
        )
    return table


def _rankings(finished: Finished) -> Table:
    """The rankings, the most faithful first; `chance` is the mean area of random orders ± its standard deviation."""
    title = "rankings by faithfulness: area between removing the most and the least important heads first"
    table = _table(
        title, "", "ranking", "most important", "area", "95 %", "chance", "with ablation", "with itself, shuffled"
    )
    row: Any
    for row in finished.study.tables["faithfulness_rankings"].itertuples():
        table.add_row(
            str(row.place),
            row.ranking,
            f"the {row.important}",
            f"{row.area:.3f}",
            f"{row.area_low:.3f}–{row.area_high:.3f}",
            f"{row.area_random:.3f} ± {row.area_random_sd:.3f}",
            f"{row.ablation_spearman:.2f}",
            f"{row.shuffled_spearman:.2f}",
        )
    return table


def _remarks(finished: Finished) -> Iterator[str]:
    study = finished.study
    yield f"{study.sentences} sentences, {len(study.heads)} heads, {study.seconds:.1f} s"
    for left_out in study.left_out:
        yield f"left out: {left_out.analysis} ({left_out.why})"
    if study.losses.truncated:
        yield f"cut off at the length limit: {study.losses.truncated} sentences (--max-length, --long)"
    for reason, count in study.losses.unaligned.items():
        yield f"not aligned with their parse, left out of syntactic: {count} sentences ({reason})"
    if study.losses.fused:
        yield f"relations inside one written word, not counted: {study.losses.fused}"
    yield from study.remarks


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in ("heads", "confidence") else "left")
    return table
