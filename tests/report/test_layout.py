"""What all figures share: marks, measured text, places on the page, scales, and where files go."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from headscope.config.declarations import head_functions
from headscope.errors import ConfigError, OutputError
from headscope.report.figures.functionmap import functions_figure
from headscope.report.layout.grid import cell_lines, centred_limits, shared_limits
from headscope.report.layout.legend import Legend, arrow, contrast, fit, functions_of, signed
from headscope.report.layout.output import FigureStyle, figure_style, panel_width, target_paths, widest, write_figure
from headscope.report.layout.page import even_width, flow, shorten, text_width, wrap
from headscope.report.layout.panels import share_limits
from headscope.results.study import Study
from tests.makers.runs import SIGNATURE, make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Study]:
    root = tmp_path_factory.mktemp("runs")
    layout = {"encoder-self": [3, 2]}
    return {name: Study.open(make_run(root / name, layout, tables=())) for name in ("small", "large")}


def test_labels_become_marks() -> None:
    marks = [f.mark for f in functions_of("positional:-1;syntactic:nsubj>;rare;previous_token;odd_one")]
    assert marks == ["◆−1", "▲v→s", "★r", "◀p", "✚o"]
    assert functions_of("") == ()
    assert [signed(text) for text in ("-12", "1", "+1", "0")] == ["−12", "+1", "+1", "0"]
    assert [arrow(label) for label in ("obj<", "det>", "acl:relcl<")] == ["o→v", "→det", "acl→"]
    function = functions_of("syntactic:compound>")[0]
    assert [fit(function, width, 6.5) for width in (1, 0.37, 0.1)] == ["▲→comp", "→comp", "▲"]
    assert cell_lines(functions_of("rare;sink;induction"), 1, most=2) == ["★r", "+2"]


def test_families_differ_in_glyph_letter_and_colour() -> None:
    for field in ("glyph", "letter", "color"):
        assert len({getattr(family, field) for family in head_functions().values()}) == len(head_functions())
    assert [contrast(color) for color in ("white", "#440154", (1.0, 1.0, 0.0, 1.0))] == [
        "black",
        "white",
        "black",
    ]


def test_layout_arithmetic() -> None:
    laid = flow([(2, 1), (2, 3), (2, 1)], 5, gap=(1, 0.5))
    assert laid.corners == [(0, 0), (3, 0), (0, 3.5)]
    assert (laid.width, laid.height) == (5, 4.5)
    assert flow([(1, 1), (1, 1)], 9, breaks=frozenset({1})).corners == [(0, 0), (0, 1.2)]
    assert even_width(6, 1, 5.5, gap=0) == 3  # two lines of three, not five and one
    assert Legend.plan([], 3).height == 0
    assert "".join(wrap("a|" + "b" * 300 + "|c", 2, 6)) == "a|" + "b" * 300 + "|c"
    assert all(text_width(line, 6) <= 2 for line in wrap(SIGNATURE, 2, 6))
    assert shorten("short", 1, 6) == "short"
    assert wrap("", 1, 6) == []


def test_scales_survive_constants_and_nothing() -> None:
    assert (shared_limits([np.full((2, 2), 3.0)]).vmin, shared_limits([]).vmax) == (2.5, 0.5)
    assert shared_limits([np.full(2, np.nan)]).vmax == 1
    limits = centred_limits([np.array([-0.2, 0.5])])
    assert (limits.vmin, limits.vmax) == (-0.5, 0.5)


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


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    pair = [tmp_path / name / "out" for name in ("a", "b")]
    assert [path.name for path in target_paths(tmp_path / "{run}.png", pair, figure="heads")] == [
        "a-out.png",
        "b-out.png",
    ]


def test_writing_refuses_to_replace_and_reports_failures(runs: dict[str, Study], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.png"
    write_figure(functions_figure(runs["small"]), path, dpi=40)
    with pytest.raises(OutputError, match=r"x\.png.*--force"):
        write_figure(functions_figure(runs["small"]), path, dpi=40)
    write_figure(functions_figure(runs["small"]), path, dpi=40, force=True)
    with pytest.raises(OutputError, match=r"y\.png.*(Not a directory|File exists)"):
        write_figure(functions_figure(runs["small"]), path / "y.png", dpi=40)


def test_lines_before_a_band_keep_off_the_axis_and_bars_stand_on_it() -> None:
    lines, bars = Figure().subplots(1, 2)
    lines.axhspan(30, 40)
    lines.plot([0, 1], [12, 37])
    bars.bar([0, 1], [12, 37])
    for panel in (lines, bars):
        share_limits([panel])
    assert lines.get_ylim()[0] < 12 and bars.get_ylim()[0] == pytest.approx(0)


def test_panels_of_an_asked_width_stand_beside_each_other_where_four_fifths_of_them_fit() -> None:
    with figure_style(FigureStyle(name="paper", width=6.5)):
        room, wide = widest(10), panel_width(2.6, 8, left=0.52, gap=0.25, most=10)
        assert 2 * (0.52 + wide) + 0.25 == pytest.approx(room) and 0.8 * 2.6 < wide < 2.6
