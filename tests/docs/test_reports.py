"""The study of pruning: its tables are those of the CSV files, and every number of the text stands in one of them."""

from __future__ import annotations

import re

from tests.makers.doc_pages.pruning_report import TABLES
from tests.makers.doc_pages.write import PRUNING

SETTINGS = {
    *(72, 48, 36, 24, 12),  # heads
    *(250, 150),  # updates
}
TEXT = PRUNING.read_text(encoding="utf-8")


def test_tables_are_those_of_the_files() -> None:
    for part, table in TABLES.items():
        assert f"<!-- generated: {part} -->\n\n{table()}\n\n<!-- end -->" in TEXT


def test_every_number_of_the_text_stands_in_a_table() -> None:
    """As it is written there, to the same digit. Years of papers, and counts that are settings, are left out."""
    text = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|^    .*", "", text, flags=re.MULTILINE)
    tables = set(re.findall(r"-?\d[\d.,]*\d|\d", "\n".join(line for line in text.splitlines() if line[:1] == "|")))
    prose = "\n".join(line for line in text.splitlines() if line[:1] != "|")
    prose = re.sub(r"\b(?:19|20)\d\d\b|^\d\. ", "", prose, flags=re.MULTILINE)
    numbers = re.findall(r"(?<!\w)\d[\d.,]*\d|(?<!\w)\d", prose)
    assert len(numbers) > 15
    assert [number for number in numbers if number not in tables and number not in map(str, SETTINGS)] == []


def test_the_updates_are_those_of_the_sweep() -> None:
    assert "updates:250+150|" in (PRUNING.parent / "all" / "sweep.json").read_text(encoding="utf-8")
