"""Every kind of figure, small and large, for paper and for the screen: what it says, and that all of it can be read."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from headscope.report.styles import FigureStyle
from tests.makers.figures import LAYOUTS, STRUCTURES, STYLES, boxes, every_figure, overlapping, structure, texts


def readable(name: str, figure: Figure, *, smallest: float) -> None:
    """No text on another one, none beyond the page, none too small."""
    found = boxes(figure)
    assert not overlapping(found), name
    width, height = figure.bbox.x1, figure.bbox.y1
    outside = [text for text, box in found if min(box.x0, box.y0) < -1 or box.x1 > width + 1 or box.y1 > height + 1]
    assert not outside, name
    assert min(float(text.get_fontsize()) for text in texts(figure)) >= smallest, name


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "smallest"), [("2x2", 8), ("three sites", 6)])
def test_structure_and_legibility(layout: str, smallest: float, tmp_path: Path) -> None:
    """The small ones for the screen, the large ones on paper. Written by `python -m tests.makers.figures`."""
    expected = json.loads(STRUCTURES.read_text(encoding="utf-8"))[layout]
    figures = every_figure(tmp_path, LAYOUTS[layout])
    assert figures.keys() == expected.keys()
    for name, draw in figures.items():
        figure = draw(STYLES[layout])
        readable(name, figure, smallest=smallest)
        assert structure(figure) == expected[name], name


@pytest.mark.slow
def test_a_width_is_kept_and_nothing_overlaps(tmp_path: Path) -> None:
    """That of a column of a paper, with title and key."""
    for name, draw in every_figure(tmp_path, LAYOUTS["three sites"]).items():
        figure = draw(FigureStyle("paper", 3.3))
        assert figure.get_figwidth() == pytest.approx(3.3), name
        readable(name, figure, smallest=6)
