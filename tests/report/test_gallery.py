"""The pictures of docs/figures.md are current, small, and of every kind of figure."""

import json
import os
from typing import Any

import pytest

from headscope.report.figures.pruning import FIGURES
from headscope.report.registry import plot_figures
from scripts.gallery import CONTENTS, PAGE, ROOT, commands, contents, drawn

COMMANDS = commands()
EXPECTED: dict[str, Any] = json.loads(CONTENTS.read_text(encoding="utf-8"))
REPORT = {"report"}  # a page, not a figure


@pytest.mark.skipif(not os.environ.get("HEADSCOPE_SLOW"), reason="draws every picture; set HEADSCOPE_SLOW to run it")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_picture_is_current(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by `python -m scripts.gallery`."""
    monkeypatch.chdir(ROOT)
    found = json.loads(json.dumps(contents(drawn(COMMANDS[name], write=False))))
    numbers, expected = found.pop("numbers"), dict(EXPECTED[name])
    for panel, its in zip(numbers, expected.pop("numbers"), strict=True):
        assert panel.keys() == its.keys()
        for kind, values in panel.items():
            assert values == pytest.approx(its[kind], rel=1e-3, abs=1e-6), kind
    assert found == expected


def test_every_kind_of_figure_has_a_small_picture_on_the_page() -> None:
    assert {words[1] for words in COMMANDS.values()} == plot_figures().keys() - REPORT
    shown = {words[words.index("--figure") + 1] for words in COMMANDS.values() if "--figure" in words}
    assert shown | {"quality"} == FIGURES.keys()
    text = PAGE.read_text(encoding="utf-8")
    sizes = [(PAGE.parent / "figures" / name).stat().st_size for name in COMMANDS]
    assert all(f"](figures/{name})" in text for name in COMMANDS)
    assert max(sizes) < 100_000 and sum(sizes) < 1_500_000
    assert EXPECTED.keys() == COMMANDS.keys()
