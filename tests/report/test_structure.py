"""Every kind of figure, small and large, for paper and for the screen: what it says, and that all of it can be read."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from headscope.errors import ConfigError
from headscope.report.layout.output import FigureStyle, enlarge, figure_style
from tests.makers.figures import LAYOUTS, STRUCTURES, boxes, every_figure, overlapping, structure, texts


@pytest.fixture(scope="module", params=LAYOUTS)
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Figure]]:
    """The name of a layout, and every figure of it on paper, drawn once."""
    folder = tmp_path_factory.mktemp("figures")
    with figure_style(FigureStyle("paper")):
        return request.param, {name: figure() for name, figure in every_figure(folder, LAYOUTS[request.param]).items()}


def readable(name: str, figure: Figure, *, smallest: float) -> None:
    """No text on another one, none beyond the page, none too small."""
    found = boxes(figure)
    assert not overlapping(found), name
    width, height = figure.bbox.x1, figure.bbox.y1
    outside = [text for text, box in found if min(box.x0, box.y0) < -1 or box.x1 > width + 1 or box.y1 > height + 1]
    assert not outside, name
    assert min(float(text.get_fontsize()) for text in texts(figure)) >= smallest, name


@pytest.mark.slow
def test_structure_and_legibility(drawn: tuple[str, dict[str, Figure]]) -> None:
    """On paper; then enlarged for the screen, where the same must hold. Written by `python -m tests.makers.figures`."""
    layout, figures = drawn
    expected = json.loads(STRUCTURES.read_text(encoding="utf-8"))[layout]
    assert figures.keys() == expected.keys()
    for name, figure in figures.items():
        readable(name, figure, smallest=6)
        assert structure(figure) == expected[name], name
        if layout != "three sites" and name not in ("heads", "positional"):
            continue  # enlarged it has the same proportions
        enlarge(figure, FigureStyle("screen").scale)
        readable(f"{name} on screen", figure, smallest=8)


@pytest.mark.slow
def test_a_width_is_kept_and_nothing_overlaps(tmp_path: Path) -> None:
    """That of a column of a paper, the least there is room in."""
    with figure_style(FigureStyle("paper", 3.3, title=False, signature=False)):
        for name, draw in every_figure(tmp_path, LAYOUTS["three sites"]).items():
            figure = draw()
            assert figure.get_figwidth() == pytest.approx(3.3), name
            readable(name, figure, smallest=6)
            assert not any("ckpt:" in text.get_text() or "all-MiniLM" in text.get_text() for text in figure.texts), name


def test_panels_of_heads_fill_the_width(tmp_path: Path) -> None:
    """That of the text of a paper, the line with the most of them; not one below the other on its left."""
    with figure_style(FigureStyle("paper", 6.5)):
        figures = every_figure(tmp_path, LAYOUTS["12x16"])
        for name in ("syntactic", "positional"):
            figure = figures[name]()
            rights = [axes.get_position().x1 for axes in figure.axes]
            assert max(rights) > 0.85 and sum(right > 0.5 for right in rights) > len(rights) / 3, (name, rights)


def test_what_a_style_refuses() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "poster"}, "--style 'poster' is not known; choose from paper, screen"),
        ({"width": 0.5}, "--width 0.5: give inches from 2 to 60"),
        ({"width": float("nan")}, "--width nan"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            FigureStyle(**options)
