"""Reports and the gallery: tables are those of the CSV files, and every number of the text stands in one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.makers.doc_pages import gallery_tables, pruning_report
from tests.makers.documented import DOCS, name
from tests.makers.modules import ROOT

PAGES = {DOCS / "report-pruning.md": pruning_report.TABLES, DOCS / "gallery.md": gallery_tables.TABLES}
SETTINGS = {
    *(72, 48, 36, 24, 60, 12),  # heads
    *(6, 8, 3),  # layers and heads of the models
    *(250, 150),  # updates
    1,  # per cent of the margin
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_are_those_of_the_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for part, table in PAGES[page].items():
        assert f"<!-- generated: {part} -->\n\n{table()}\n\n<!-- end -->" in text


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_number_of_the_text_stands_in_a_table(page: Path) -> None:
    """As it is written there, to the same digit. Years of papers, and counts that are settings, are left out."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|^    .*", "", text, flags=re.MULTILINE)
    tables = set(re.findall(r"-?\d[\d.,]*\d|\d", "\n".join(line for line in text.splitlines() if line[:1] == "|")))
    prose = "\n".join(line for line in text.splitlines() if line[:1] != "|")
    prose = re.sub(r"\b(?:19|20)\d\d\b|^\d\. ", "", prose, flags=re.MULTILINE)
    numbers = re.findall(r"(?<!\w)\d[\d.,]*\d|(?<!\w)\d", prose)
    assert len(numbers) > 15
    assert [number for number in numbers if number not in tables and number not in map(str, SETTINGS)] == []


@pytest.mark.parametrize(
    "table, heading, cells", [("bert", "The pre", 80), ("translation", "The tr", 85), ("lm", "A la", 70)]
)
def test_rankings_refitted_in_closed_form_are_those_of_the_files(table: str, heading: str, cells: int) -> None:
    """The first table of each model in the README of closed-form; the files have six digits."""
    readme = (ROOT / "benchmarks/pruning/closed-form/README.md").read_text(encoding="utf-8")
    text = re.findall(r"^\|(.*)\|$", readme.split(f"\n## {heading}")[1].partition("\n#")[0], flags=re.MULTILINE)
    head, _, *lines = ([cell.strip(" *") for cell in line.split("|")] for line in text)
    rows = pruning_report.read(f"closed-form/{table}").query(f"compensation == '{pruning_report.PLAIN}'")
    values = rows.set_index(["method", "kept"])["value"].to_dict()
    sizes = [int(size.split()[0]) for size in head[1:]]
    assert len(lines) * len(sizes) == cells
    for method, *numbers in lines:
        expected = [values[method, size] for size in sizes]
        assert [float(number) for number in numbers] == pytest.approx(expected, abs=5.6e-5), method


def test_the_updates_are_those_of_the_sweep() -> None:
    assert "updates:250+150|" in (ROOT / "benchmarks/pruning/all/sweep.json").read_text(encoding="utf-8")
