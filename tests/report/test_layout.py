"""What all figures share: marks, measured text, places on the page, scales, and where files go."""

from pathlib import Path

import pytest

from headscope.errors import ConfigError
from headscope.report.charts import cell_lines
from headscope.report.marks import arrow, fit, functions_of, signed_offset
from headscope.report.sheet import Sheet, swatch
from headscope.report.styles import FigureStyle, target_paths
from headscope.results.study import Study
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


def test_panels_stand_in_lines_and_a_key_has_what_is_drawn_once() -> None:
    style = FigureStyle("paper", 6.5)
    with style.in_use():
        sheet = Sheet(style)
        panels = sheet.panels(list("abcde"), [(20.0, 10.0)] * 5, starts={3})
        for axes in panels:
            axes.plot([0, 1], label="a line")
            axes.set_xlabel("x")
        sheet.key(swatch("red", "an area"), "a note")
        sheet.headline("title", "subtitle")
        sheet.finish()
    tops = [round(axes.get_position().y1, 2) for axes in panels]
    assert tops[0] == tops[1] == tops[2] > tops[3] == tops[4]
    assert [axes.get_xlabel() for axes in panels] == ["", "", "x", "x", "x"]
    (legend,) = sheet.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a line", "an area"]
    assert sheet.get_figwidth() == 6.5 and [axes.get_title(loc="left") for axes in panels] == list("abcde")


def test_where_figures_go(runs: dict[str, Study], tmp_path: Path) -> None:
    one, two = [runs["small"].path], [runs["small"].path, runs["large"].path]
    assert target_paths(tmp_path / "x.svg", one, figure="heads") == [tmp_path / "x.svg"]
    assert target_paths(tmp_path / "d", two, figure="heads") == [
        tmp_path / "d" / "small-heads.png",
        tmp_path / "d" / "large-heads.png",
    ]
    assert target_paths(tmp_path / "{run}.pdf", two, figure="heads")[1] == tmp_path / "large.pdf"
    assert target_paths(tmp_path, one, figure="heads") == [tmp_path / "small-heads.png"]
    with pytest.raises(ConfigError, match=r"x\.png.*2.*\{run\}"):
        target_paths(tmp_path / "x.png", two, figure="heads")
    with pytest.raises(ConfigError, match="twice"):
        target_paths(tmp_path / "d", one * 2, figure="heads")
    with pytest.raises(ConfigError, match=r"\.jpg.*\.png, \.svg, \.pdf"):
        target_paths(tmp_path / "x.jpg", one, figure="heads")
