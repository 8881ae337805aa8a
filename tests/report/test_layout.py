"""Rules of all figures: marks, legible texts, file names, declarations, a picture of every kind in the docs."""

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from headscope.config.declarations import import_target
from headscope.errors import ConfigError
from headscope.report.charts import cell_lines
from headscope.report.figures.pruning import FIGURES
from headscope.report.marks import arrow, fit, functions_of, signed_offset
from headscope.report.registry import PlotFigure, declared_figures, plot_figures
from headscope.report.styles import FigureStyle, target_paths
from headscope.results.study import Study
from scripts.gallery import PAGE, commands
from tests.makers.figures import LAYOUTS, boxes, every_figure, overlapping, texts
from tests.makers.runs import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Study]:
    root = tmp_path_factory.mktemp("runs")
    layout = {"encoder-self": [3, 2]}
    return {name: Study.open(make_run(root / name, layout, tables=())) for name in ("small", "large")}


def test_labels_become_marks() -> None:
    marks = [f.texts[0] for f in functions_of("positional:-1;syntactic:nsubj>;rare;previous_token;odd_one")]
    assert marks == ["◆−1", "▲v→s", "★r", "◀p", "✚o"]
    assert functions_of("") == ()
    assert [signed_offset(text) for text in ("-12", "1", "+1", "0")] == ["−12", "+1", "+1", "0"]
    assert [arrow(label) for label in ("obj<", "det>", "acl:relcl<")] == ["o→v", "→det", "acl→"]
    function = functions_of("syntactic:compound>")[0]
    assert [fit(function, width, 6.5) for width in (1, 0.37, 0.1)] == ["▲→comp", "→comp", "▲"]
    with FigureStyle().in_use():
        assert cell_lines(functions_of("rare;sink;induction"), 1, room=2) == ["★r", "▼s…"]


def test_where_figures_go(runs: dict[str, Study], tmp_path: Path) -> None:
    one_run, two_runs = [runs["small"].path], [runs["small"].path, runs["large"].path]
    assert target_paths(tmp_path / "x.svg", one_run, figure="heads") == [tmp_path / "x.svg"]
    assert target_paths(tmp_path / "d", two_runs, figure="heads") == [
        tmp_path / "d" / "small-heads.png",
        tmp_path / "d" / "large-heads.png",
    ]
    assert target_paths(tmp_path / "{run}.pdf", two_runs, figure="heads")[1] == tmp_path / "large.pdf"
    assert target_paths(tmp_path, one_run, figure="heads") == [tmp_path / "small-heads.png"]
    with pytest.raises(ConfigError, match=r"x\.png.*2.*\{run\}"):
        target_paths(tmp_path / "x.png", two_runs, figure="heads")
    with pytest.raises(ConfigError, match="twice"):
        target_paths(tmp_path / "d", one_run * 2, figure="heads")
    with pytest.raises(ConfigError, match=r"\.jpg.*\.png, \.svg, \.pdf"):
        target_paths(tmp_path / "x.jpg", one_run, figure="heads")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "style", "smallest"), [("2x2", FigureStyle("screen"), 8), ("three sites", FigureStyle("paper", 3.3), 6)]
)
def test_a_width_is_kept_and_nothing_overlaps(layout: str, style: FigureStyle, smallest: float, tmp_path: Path) -> None:
    """With title and key: no overlapping texts, none outside the page, none too small."""
    for name, draw in every_figure(tmp_path, LAYOUTS[layout]).items():
        figure = draw(style)
        assert style.width is None or figure.get_figwidth() == pytest.approx(style.width), name
        labels = boxes(figure)
        assert not overlapping(labels), name
        right, top = figure.bbox.x1, figure.bbox.y1
        outside = [text for text, box in labels if min(box.x0, box.y0) < -1 or box.x1 > right + 1 or box.y1 > top + 1]
        assert not outside, name
        assert min(float(text.get_fontsize()) for text in texts(figure)) >= smallest, name


COMMANDS = commands()
REPORT = {"report"}  # a page, not a figure


def test_every_kind_of_figure_has_a_small_picture_on_the_page() -> None:
    assert {words[1] for words in COMMANDS.values()} == plot_figures().keys() - REPORT
    figure_names = {words[words.index("--figure") + 1] for words in COMMANDS.values() if "--figure" in words}
    assert figure_names | {"quality"} == FIGURES.keys()
    text = PAGE.read_text(encoding="utf-8")
    sizes = [(PAGE.parent / "figures" / name).stat().st_size for name in COMMANDS]
    assert all(f"](figures/{name})" in text for name in COMMANDS)
    assert max(sizes) < 100_000 and sum(sizes) < 1_500_000


def test_declarations_are_read_as_they_are_imported() -> None:
    declarations = {figure.name: figure for figure in declared_figures()}
    assert len(declarations) >= 15 and declarations.keys() < plot_figures().keys()
    for name, figure in declarations.items():
        draw = import_target(figure.draw)
        target = next(
            (value for value in vars(sys.modules[draw.__module__]).values() if getattr(value, "name", "") == name), None
        )
        if not figure.page:
            assert isinstance(target, PlotFigure) and target.draw is draw
            assert (target.summary, target.source, target.runs) == (figure.summary, figure.source, figure.runs)
            options = ([(f.name, f.default, f.metadata) for f in fields(plot.Options)] for plot in (target, figure))
            assert next(options) == next(options)
