"""Figures of a run show the numbers of its tables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from headscope.errors import ConfigError
from headscope.report.charts import grids_of
from headscope.report.figures.layers import discrepancy_changes, layer_matrices, offset_shares
from headscope.report.figures.maps import shown_measures
from headscope.report.figures.rankings import correlations, ranks_of
from headscope.report.marks import CHANCE, functions_of, method_style
from headscope.report.registry import draw_standard
from headscope.report.styles import write_figure
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable, RunError
from headscope.results.sweep import open_pruned
from tests.makers import figures as makers
from tests.makers.figures import draw, draw_words
from tests.makers.runs import heads_of, make_run

pytestmark = pytest.mark.slow

LAYOUTS = {
    "small": {"encoder-self": [12] * 6},
    "tiny": {"encoder-self": [1, 2], "decoder-self": [1], "cross": [2]},
    "ragged": {"encoder-self": [7, 5, 3, 0], "decoder-self": [7, 2], "cross": [1, 7]},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Study]:
    root = tmp_path_factory.mktemp("runs")
    tables: dict[str, Any] = {"ragged": {"tables": ("positional",)}}
    return {name: Study.open(make_run(root / name, layout, **tables.get(name, {}))) for name, layout in LAYOUTS.items()}


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def meshes(figure: Figure) -> list[np.ndarray]:
    """The arrays of all maps, colour bars left out."""
    return [
        np.ma.filled(np.ma.asarray(artist.get_array()), np.nan)
        for axes in figure.axes
        if not isinstance(getattr(axes, "_colorbar", None), Colorbar)
        for artist in axes.collections
        if isinstance(artist, QuadMesh)
    ]


def test_head_map_draws_the_table(runs: dict[str, Study]) -> None:
    run = runs["ragged"]
    figure = draw("heads", run, measure=("confidence",))
    maps = meshes(figure)
    assert [array.shape for array in maps] == [(4, 7), (2, 7), (2, 7)]
    assert len(figure.axes) == 4  # three sites on one scale, one colour bar
    for site, array in zip(run.layout, maps, strict=True):
        rows = run.heads[run.heads["site"] == site]
        np.testing.assert_array_equal(array[rows["layer"], rows["head"]], rows["confidence"])
        assert np.isfinite(array).sum() == len(rows)
    assert all(any(patch.get_hatch() for patch in axes.patches) for axes in figure.axes[:2])
    assert figure.axes[0].get_ylim() == (4, 0)  # layer 0 at the top
    assert figure.axes[0].get_title(loc="left") == "confidence · encoder-self"
    assert figure.axes[2].get_shared_x_axes() is not None
    assert {mesh.get_clim() for axes in figure.axes[:3] for mesh in axes.collections} == {(0, 1)}  # as is declared


def test_head_map_marks_every_function(runs: dict[str, Study]) -> None:
    run = runs["small"]
    figure = draw("heads", run)
    assert shown_measures(run) == ["confidence", "entropy_share"]
    lines = [line for text in texts(figure) for line in text.split("\n")]
    for labels in run.heads["functions"]:
        for function in functions_of(labels):
            assert {*function.texts[:2]} & set(lines), function
    assert "▲v→s" in lines
    assert "★r" in lines


def test_sorting_keeps_the_heads_numbers_and_functions_together(runs: dict[str, Study]) -> None:
    plain = {grid.site: grid for grid in grids_of(runs["ragged"], "confidence")}
    for grid in grids_of(runs["ragged"], "confidence", sort=True):
        for layer, heads in enumerate(grid.heads):
            count = int((heads >= 0).sum())
            assert np.all(np.diff(grid.values[layer, :count]) <= 0)
            assert np.all(heads[count:] == -1)
            for slot, head in enumerate(heads[:count]):
                assert grid.values[layer, slot] == plain[grid.site].values[layer, head]
                assert grid.functions[layer][slot] == plain[grid.site].functions[layer][head]
    first = grids_of(runs["ragged"], "confidence", sort=True)[0].heads[0, 0]
    sorted_map = draw("heads", runs["ragged"], measure=("confidence",), sort=True)
    assert any(text.split("\n")[0] == f"h{first}" for text in texts(sorted_map))
    assert "rank, highest first" in texts(sorted_map)


def test_functions_figure_counts_and_bands(runs: dict[str, Study]) -> None:
    run = runs["small"]
    figure = draw("functions", run)
    cells, bars = figure.axes
    functions = run.heads["functions"].map(functions_of)
    assert len(cells.patches) == 72 + functions.map(len).sum()  # a ground for each head, a band for each label
    functional = functions.map(bool)  # each counts once
    assert sum(bar.get_width() for bar in bars.patches if isinstance(bar, Rectangle)) == functional.sum()
    assert "no function found" in texts(figure)


def test_offsets_are_the_table_with_tails(runs: dict[str, Study]) -> None:
    run = runs["small"]
    shares = offset_shares(run)
    table = run.table("positional").set_index(["site", "layer", "head"])
    for layer, head in ((0, 1), (3, 7), (5, 11)):
        rows = table.loc[[("encoder-self", layer, head)]]
        row, distribution = shares["encoder-self", layer][head], rows["count"] / rows["count"].sum()
        assert row[0] == pytest.approx(distribution[rows["offset"] < -10].sum())
        assert row[-1] == pytest.approx(distribution[rows["offset"] > 10].sum())
        inside = rows[rows["offset"].abs() <= 10]
        assert row[1:-1][inside["offset"] + 10] == pytest.approx(inside["share"]) and row[0] + row[-1] > 0
    figure = draw("positional", run)
    assert len(figure.axes) == 6 + 1
    np.testing.assert_array_equal(meshes(figure)[3], shares["encoder-self", 3])
    positional = run.heads["functions"].str.contains("positional").sum()
    assert sum(len(axes.patches) for axes in figure.axes[:6]) == positional
    assert "◆−2" in texts(figure)


def test_relations_draw_accuracy_baseline_and_clear_margins(runs: dict[str, Study]) -> None:
    run = runs["small"]
    figure = draw("syntactic", run)
    table = run.table("syntactic")
    maps = meshes(figure)
    assert len(maps) == 12  # a baseline column and a matrix for each layer
    row = table[(table["layer"] == 2) & (table["head"] == 7) & (table["label"] == "obj<")].iloc[0]
    assert maps[2 * 2 + 1][3, 7] == row["accuracy"]
    assert maps[2 * 2][3, 0] == row["baseline"]
    dots = sum(len(axes.lines) for axes in figure.axes[:6])
    assert dots == (table["margin"] >= 0.1).sum() > 0
    fills = {str(line.get_markerfacecolor()) != "none" for axes in figure.axes[:6] for line in axes.lines}
    assert fills == {True, False}, "withheld labels are hollow"
    assert "nsubj>" in texts(figure)


@pytest.mark.parametrize("measure", ["cosine", "cka", "l2"])
def test_the_scale_of_similarity_is_that_of_different_heads(runs: dict[str, Study], measure: str) -> None:
    run = runs["small"]
    figure = draw("similarity", run, measure=measure)
    maps = meshes(figure)
    assert len(maps) == 6
    matrix = run.similarity[f"encoder-self/4/{measure}"]
    pairs = ~np.eye(len(matrix), dtype=bool)
    np.testing.assert_array_equal(maps[4][pairs], matrix[pairs])
    assert np.isnan(maps[4][~pairs]).all()
    norm = figure.axes[0].collections[0].norm
    values = np.concatenate([layer[pairs] for layer in layer_matrices(run, measure).values()])
    limit = abs(values).max()
    assert (norm.vmin, norm.vmax) == ((-limit, limit) if measure == "cosine" else (values.min(), values.max()))


def test_attention_figure_shows_the_weights_and_literal_pieces() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(3), size=(2, 5))
    queries, keys = ["[CLS]", "a$b$", "c", "d", "[SEP]"], ["x", "y", "z" * 40]
    figure = draw_words(weights, queries, keys, ("h1", "h2"))
    np.testing.assert_array_equal(meshes(figure)[1], weights[1])
    assert figure.axes[0].get_title(loc="left") == "h1"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][1] == "a$b$"
    assert figure.axes[0].get_xticklabels()[2].get_text().endswith("…")


def test_compare_with_equal_layouts(runs: dict[str, Study], tmp_path: Path) -> None:
    other = Study.open(make_run(tmp_path / "other", LAYOUTS["small"], seed=7))
    figure = draw("compare", runs["small"], other)
    a, b, difference = meshes(figure)
    np.testing.assert_allclose(difference, b - a)
    maps = [axes for axes in figure.axes if axes.get_title(loc="left").startswith(("A ·", "B ·"))]
    assert maps[0].collections[0].norm is maps[1].collections[0].norm
    assert any(text.startswith("head against head, r = ") for text in texts(figure))
    assert any("B other: all-MiniLM" in text for text in texts(figure))


def test_compare_with_other_layouts_has_no_difference(runs: dict[str, Study]) -> None:
    figure = draw("compare", runs["small"], runs["ragged"])
    assert len(meshes(figure)) == 2 and not any("head against head" in text for text in texts(figure))


def test_standard_figures_go_as_far_as_the_tables(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", {"encoder-self": [3, 2]})
    names = [p.name for p in draw_standard(path, dpi=40)]
    assert names == ["heads.png", "functions.png", "offsets.png", "relations.png", "similarity.png"]
    assert sorted(p.name for p in (path / "figures").iterdir()) == sorted(names)
    for table in ("syntactic.csv", "similarity.npz"):
        (path / table).unlink()
    assert [p.name for p in draw_standard(path, dpi=40)] == names[:3]
    (path / "positional.csv").unlink()
    with pytest.raises(MissingTable, match=r"positional.csv"):
        draw("positional", Study.open(path))


def test_ranges_are_those_that_measures_declare_or_that_are_asked_for(tmp_path: Path) -> None:
    run = Study.open(make_run(tmp_path / "r", {"encoder-self": [3, 3]}, extra=("ablation", "unheard_of")))
    values = run.heads["ablation"].abs().max()
    for measure, limits, colors in (
        ("confidence", (0, 1), "viridis"),
        ("distance", (0, run.heads["distance"].max()), "viridis"),
        ("ablation", (-values, values), "RdBu_r"),
        ("unheard_of", (run.heads["unheard_of"].min(), run.heads["unheard_of"].max()), "viridis"),
    ):
        (mesh,) = draw("heads", run, measure=(measure,)).axes[0].collections
        assert mesh.get_clim() == limits and mesh.get_cmap().name == colors, measure
    figure = draw("heads", run, measure=("ablation",), range=(-0.25, 0.25))
    assert figure.axes[0].collections[0].get_clim() == (-0.25, 0.25)
    assert figure.axes[1]._colorbar.extend == "both"  # type: ignore[attr-defined]
    for ends in ((1, 0), (0,), (0, float("inf"))):
        with pytest.raises(ConfigError, match="--range"):
            draw("heads", run, measure=("ablation",), range=ends)


def test_rankings_agree_as_spearman_says(tmp_path: Path) -> None:
    run = Study.open(make_run(tmp_path / "r", {"encoder-self": [7] * 5}, extra=("taylor", "ablation", "lrp")))
    ranks = ranks_of(run)
    assert list(ranks.columns) == ["taylor", "ablation"]  # a share orders no heads of several layers
    assert ranks["taylor"].idxmin() == run.heads["taylor"].idxmax()
    value, low, high = correlations(ranks)
    assert value[0, 1] == pytest.approx(run.heads["taylor"].corr(run.heads["ablation"], method="spearman"))
    assert ((low <= value) & (value <= high)).all() and np.allclose(np.diag(low), 1)
    labels = texts(draw("rankings", run, ranking=("taylor", "ablation")))
    assert any(text.startswith(f"{value[0, 1]:.2f}".replace("-", "−")) for text in labels)
    with pytest.raises(ConfigError, match=r"distance.*confidence, taylor, ablation"):
        draw("rankings", run, ranking=("distance",))
    with pytest.raises(MissingTable, match=r"1 rankings.*two"):
        draw("rankings", run, ranking=("lrp",))


def test_figures_are_the_same_bytes_every_time(runs: dict[str, Study], tmp_path: Path) -> None:
    pair = [write_figure(draw("functions", runs["small"]), tmp_path / f"{n}.svg").read_bytes() for n in "ab"]
    assert pair[0] == pair[1]


def make_matrices(scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    arrays = {}
    for site, layer, heads in (("encoder-self", 0, 3), ("encoder-self", 1, 3), ("cross", 0, 2)):
        distances = rng.random((heads, heads)) * (1 - np.eye(heads))
        arrays[f"{site}/{layer}/cosine"] = 1 - distances * scale
        arrays[f"{site}/{layer}/l2"] = distances * (1 + (scale - 1) * (layer + 1))
    return arrays


def test_changes_are_of_sums_over_pairs_in_per_cent() -> None:
    heads = pd.DataFrame(columns=["site", "layer", "head", "functions"])
    record = {"layout": {"encoder-self": [3, 3], "cross": [2]}}
    runs = [Study({"heads": heads}, record, arrays=make_matrices(scale)) for scale in (1.0, 1.25, 0.5)]
    changes = discrepancy_changes(runs)
    np.testing.assert_allclose(changes["cosine"]["encoder-self"], [[25, 25], [-50, -50]])
    np.testing.assert_allclose(changes["l2"]["encoder-self"], [[25, 50], [-50, -100]], atol=1e-9)
    figure = draw("discrepancy", *runs)
    bar_groups: list[Any] = [axes.patches for axes in figure.axes]
    bars = [[bar.get_height() for bar in patches] for patches in bar_groups]
    assert bars[0] == pytest.approx([25, 25, -50, -50]) and bars[3] == pytest.approx([25, -50])
    with pytest.raises(ConfigError, match="baseline"):
        discrepancy_changes(runs[:1])


# Figures of pruning: what they read, what each of them shows, what is refused.


SITES = {"encoder-self": 24, "decoder-self": 24, "cross": 24}
LAYOUT = {site: [8, 8, 8] for site in SITES}
LABELS = ("positional:-1", "syntactic:nsubj>", "rare", "", "", "positional:1;rare", "syntactic:obj<;syntactic:nsubj>")
METHODS = {"l0": 3, "subset": 3, "random": 3, "magnitude": 1, "confidence": 1, "lrp": 1}
SIZES = (4, 16, 48)


def write_sweep(folder: Path, **options: Any) -> Path:
    """A sweep that was never run: learnt methods lose little, others more."""
    folder.mkdir()
    methods = {method: (number + 1.0, seeds) for number, (method, seeds) in enumerate(METHODS.items())}
    shares = [size / 72 for size in SIZES]
    return makers.make_sweep(folder, LAYOUT, methods=methods, shares=shares, labels=LABELS, **options)


def write_choice(folder: Path, keep: int, strength: float, *, seed: int = 1) -> Path:
    """A run of `prune l0` with a price, as it writes itself down."""
    folder.mkdir(parents=True)
    names = [f"{site}.{layer}.{head}" for site, layer, head in heads_of(LAYOUT)]
    kept = {site: {"kept": sum(name.startswith(site) for name in names[-keep:]), "of": n} for site, n in SITES.items()}
    record = {"kind": "choice by l0", "method": "l0", "signature": "m:prune.l0", "heads": 72, "kept": keep}
    record |= {"kept_per_site": kept, "removed": names[:-keep], "options": {"seed": seed}, "source": {"path": "x/m"}}
    record |= {"learning": {"lambda_paper": strength, "lambda_searched": False}}
    (folder / "pruning.json").write_text(json.dumps(record))
    (folder / "kept.txt").write_text("".join(name + "\n" for name in names[-keep:]))
    return folder


def write_labels(folder: Path) -> Path:
    """A run of `analyze` that labels some heads."""
    folder.mkdir()
    rows = [
        {"site": site, "layer": layer, "head": head, "functions": LABELS[head % 7]}
        for site, layer, head in heads_of(LAYOUT)
    ]
    pd.DataFrame(rows).to_csv(folder / "heads.csv", index=False)
    (folder / "run.json").write_text(json.dumps({"signature": "m:all", "layout": LAYOUT}))
    return folder


def panels(figure: Figure) -> dict[str, Any]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def words(figure: Figure) -> set[str]:
    return {text.get_text() for text in makers.words(figure)}


def test_quality_has_a_line_a_method_with_the_mean_of_its_seeds(tmp_path: Path) -> None:
    figure = draw("pruning", *open_pruned([write_sweep(tmp_path / "s", controls=("l0", "subset"))]))
    assert list(panels(figure)) == ["BLEU", "loss (nats per token)"]
    table = pd.read_csv(tmp_path / "s" / "sweep.csv").fillna({"control": ""})
    baseline, *curves = panels(figure)["BLEU"].lines
    assert set(np.asarray(baseline.get_ydata())) == {table["value"].iloc[0]}
    assert len(curves) == len(METHODS) + 2
    expected = table[(table["method"] == "l0") & (table["control"] == "")].groupby("kept")["value"].mean()
    solid = [line for line in curves if line.get_linestyle() == "-"]
    assert all(line.get_xydata()[-1].tolist() == [72, table["value"].iloc[0]] for line in solid)  # the unpruned point
    curve = next(line for line in solid if np.allclose(line.get_ydata()[:-1], expected))
    assert list(curve.get_xdata()) == [*SIZES, 72]
    assert curve.get_color() == method_style("l0").color and curve.get_marker() == method_style("l0").mark
    random = table[table["method"] == "random"].groupby("kept")["value"].mean()
    assert next(line for line in solid if np.allclose(line.get_ydata()[:-1], random)).get_color() == CHANCE
    assert sum(line.get_linestyle() == "--" for line in curves) == 2
    assert panels(figure)["BLEU"].get_xscale() == "log"
    bands = [band for band in panels(figure)["BLEU"].collections if type(band).__name__ == "FillBetweenPolyCollection"]
    assert len(bands) == 5  # l0, subset and their controls, random: those with seeds
    low, high = (table[table["method"] == "random"].groupby("kept")["value"].agg(end).loc[4] for end in ("min", "max"))
    corners = bands[-1].get_paths()[0].vertices
    edges = corners[np.isclose(corners[:, 0], 4)][:, 1]
    assert np.isclose(edges.min(), low) and np.isclose(edges.max(), high)
    assert "en-de · 72 heads (encoder-self + decoder-self + cross)" in words(figure)


def test_runs_of_l0_with_several_prices_are_one_course(tmp_path: Path) -> None:
    prices = ((60, 0.01), (30, 0.05), (9, 0.2))
    runs = [write_choice(tmp_path / f"lambda-{strength:g}", keep, strength) for keep, strength in prices]
    figure = draw("pruning", *open_pruned(runs))
    encoder, _, cross = panels(figure)["l0"].lines
    assert list(encoder.get_xdata()) == [0, 12, 42, 63]
    assert list(encoder.get_ydata()) == [24, 12, 0, 0] and list(cross.get_ydata()) == [24, 24, 24, 9]
    with pytest.raises(RunError, match="quality"):
        draw("pruning", *open_pruned(runs), figure="quality")
    with pytest.raises(RunError, match="--functions RUN"):
        draw("pruning", *open_pruned(runs), figure="functions")
    labels = Study.open(write_labels(tmp_path / "run"))
    choices = [run.with_labels(labels) for run in open_pruned(runs)]
    assert list(panels(draw("pruning", *choices, figure="functions"))) == ["l0"]
    labels.record["checkpoint"], choices[0].record["source"] = {"digest": "another"}, {"digest": "own", "path": "m"}
    with pytest.raises(RunError, match="labels heads of another model; name a run on m"):
        choices[0].with_labels(labels)
