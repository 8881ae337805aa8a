"""docs/report-pruning.md: tables are those of the CSV files, and every number of the text stands in one of them."""

from __future__ import annotations

import html
import re

from tests.makers.doc_pages import pruning_report
from tests.makers.documented import DOCS
from tests.makers.modules import ROOT

PAGE = DOCS / "report-pruning.md"
SETTINGS = {
    *(72, 48, 36, 24, 60, 12),  # heads
    *(6, 8, 3),  # layers and heads of the models
    *(250, 150),  # updates
    1,  # per cent of the margin
}


def test_tables_are_those_of_the_files() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, table in pruning_report.TABLES.items():
        assert f"<!-- generated: {name} -->\n\n{table()}\n\n<!-- end -->" in text


def test_every_number_of_the_text_stands_in_a_table() -> None:
    """As it is written there, to the same digit. Years of papers, and counts that are settings, are left out."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|^    .*", "", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    tables = set(re.findall(r"-?\d[\d.,]*\d|\d", "\n".join(line for line in text.splitlines() if line[:1] == "|")))
    prose = "\n".join(line for line in text.splitlines() if line[:1] != "|")
    prose = re.sub(r"\b(?:19|20)\d\d\b|^\d\. ", "", prose, flags=re.MULTILINE)
    numbers = re.findall(r"(?<!\w)\d[\d.,]*\d|(?<!\w)\d", prose)
    assert len(numbers) > 60
    assert [number for number in numbers if number not in tables and number not in map(str, SETTINGS)] == []


def test_what_auto_takes_is_never_below_masking() -> None:
    rows = pruning_report.anchored_rows().set_index(["method", "kept", "compensation"])
    taken = rows.xs("auto", level="compensation")
    masked = rows.xs("none", level="compensation").loc[taken.index]
    assert len(taken) == 8 and (taken[["captions", "other"]] > masked[["captions", "other"]]).all().all()


def test_the_updates_are_those_of_the_sweep() -> None:
    assert "updates:250+150|" in (ROOT / "benchmarks/pruning/all/sweep.json").read_text(encoding="utf-8")


def test_the_figure_shows_the_files() -> None:
    """It carries the numbers that it was drawn of."""
    drawing = PAGE.parent.joinpath("figures", "report-pruning.svg").read_text(encoding="utf-8")
    assert pruning_report.described() in html.unescape(drawing)
