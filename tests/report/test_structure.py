"""Every kind of figure, small on the screen and large in a column of a paper: all of it can be read."""

from pathlib import Path

import pytest

from headscope.report.styles import FigureStyle
from tests.makers.figures import LAYOUTS, boxes, every_figure, overlapping, texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "style", "smallest"), [("2x2", FigureStyle("screen"), 8), ("three sites", FigureStyle("paper", 3.3), 6)]
)
def test_a_width_is_kept_and_nothing_overlaps(layout: str, style: FigureStyle, smallest: float, tmp_path: Path) -> None:
    """With title and key: no text on another one, none beyond the page, none too small."""
    for name, draw in every_figure(tmp_path, LAYOUTS[layout]).items():
        figure = draw(style)
        assert style.width is None or figure.get_figwidth() == pytest.approx(style.width), name
        found = boxes(figure)
        assert not overlapping(found), name
        width, height = figure.bbox.x1, figure.bbox.y1
        outside = [text for text, box in found if min(box.x0, box.y0) < -1 or box.x1 > width + 1 or box.y1 > height + 1]
        assert not outside, name
        assert min(float(text.get_fontsize()) for text in texts(figure)) >= smallest, name
