"""The pictures of docs/figures.md are small and of every kind of figure."""

from headscope.report.figures.pruning import FIGURES
from headscope.report.registry import plot_figures
from scripts.gallery import PAGE, commands

COMMANDS = commands()
REPORT = {"report"}  # a page, not a figure


def test_every_kind_of_figure_has_a_small_picture_on_the_page() -> None:
    assert {words[1] for words in COMMANDS.values()} == plot_figures().keys() - REPORT
    shown = {words[words.index("--figure") + 1] for words in COMMANDS.values() if "--figure" in words}
    assert shown | {"quality"} == FIGURES.keys()
    text = PAGE.read_text(encoding="utf-8")
    sizes = [(PAGE.parent / "figures" / name).stat().st_size for name in COMMANDS]
    assert all(f"](figures/{name})" in text for name in COMMANDS)
    assert max(sizes) < 100_000 and sum(sizes) < 1_500_000
