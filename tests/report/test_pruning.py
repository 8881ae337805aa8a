"""The figures of pruning: what they read, what each of them shows, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from headscope.report.marks import CHANCE, method_style
from headscope.results.study import Study
from headscope.results.study_tables import RunError
from headscope.results.sweep import open_pruned
from tests.makers import figures as makers
from tests.makers.figures import draw
from tests.makers.runs import places_of

pytestmark = pytest.mark.slow

SITES = {"encoder-self": 24, "decoder-self": 24, "cross": 24}
LAYOUT = {site: [8, 8, 8] for site in SITES}
LABELS = ("positional:-1", "syntactic:nsubj>", "rare", "", "", "positional:1;rare", "syntactic:obj<;syntactic:nsubj>")
METHODS = {"l0": 3, "subset": 3, "random": 3, "magnitude": 1, "confidence": 1, "lrp": 1}
SIZES = (4, 16, 48)


def sweep(folder: Path, **options: Any) -> Path:
    """A sweep that was never run: learnt methods lose little, others more."""
    folder.mkdir()
    methods = {method: (number + 1.0, seeds) for number, (method, seeds) in enumerate(METHODS.items())}
    shares = [size / 72 for size in SIZES]
    return makers.make_sweep(folder, LAYOUT, methods=methods, shares=shares, labels=LABELS, **options)


def choice(folder: Path, keep: int, strength: float, *, seed: int = 1) -> Path:
    """A run of `prune l0` with a price, as it writes itself down."""
    folder.mkdir(parents=True)
    names = [f"{site}.{layer}.{head}" for site, layer, head in places_of(LAYOUT)]
    kept = {
        site: {"kept": sum(name.startswith(site) for name in names[-keep:]), "of": of} for site, of in SITES.items()
    }
    record = {"kind": "choice by l0", "method": "l0", "signature": "m:prune.l0", "heads": 72, "kept": keep}
    record |= {"kept_per_site": kept, "removed": names[:-keep], "options": {"seed": seed}, "source": {"path": "x/m"}}
    record |= {"learning": {"lambda_paper": strength, "lambda_searched": False}}
    (folder / "pruning.json").write_text(json.dumps(record))
    (folder / "kept.txt").write_text("".join(name + "\n" for name in names[-keep:]))
    return folder


def analysed(folder: Path) -> Path:
    """A run of `analyze` that labels some heads."""
    folder.mkdir()
    rows = [
        {"site": site, "layer": layer, "head": head, "functions": LABELS[head % 7]}
        for site, layer, head in places_of(LAYOUT)
    ]
    pd.DataFrame(rows).to_csv(folder / "heads.csv", index=False)
    (folder / "run.json").write_text(json.dumps({"signature": "m:all", "layout": LAYOUT}))
    return folder


def panels(figure: Figure) -> dict[str, Any]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def words(figure: Figure) -> set[str]:
    return {text.get_text() for text in makers.words(figure)}


def test_quality_has_a_line_a_method_with_the_mean_of_its_seeds(tmp_path: Path) -> None:
    figure = draw("pruning", *open_pruned([sweep(tmp_path / "s", controls=("l0", "subset"))]))
    assert list(panels(figure)) == ["BLEU", "loss (nats per token)"]
    table = pd.read_csv(tmp_path / "s" / "sweep.csv").fillna({"control": ""})
    unpruned, *others = panels(figure)["BLEU"].lines
    assert set(np.asarray(unpruned.get_ydata())) == {table["value"].iloc[0]}
    assert len(others) == len(METHODS) + 2
    mine = table[(table["method"] == "l0") & (table["control"] == "")].groupby("kept")["value"].mean()
    whole = [line for line in others if line.get_linestyle() == "-"]
    assert all(line.get_xydata()[-1].tolist() == [72, table["value"].iloc[0]] for line in whole)  # the unpruned point
    drawn = next(line for line in whole if np.allclose(line.get_ydata()[:-1], mine))
    assert list(drawn.get_xdata()) == [*SIZES, 72]
    assert drawn.get_color() == method_style("l0").color and drawn.get_marker() == method_style("l0").mark
    random = table[table["method"] == "random"].groupby("kept")["value"].mean()
    assert next(line for line in whole if np.allclose(line.get_ydata()[:-1], random)).get_color() == CHANCE
    assert sum(line.get_linestyle() == "--" for line in others) == 2
    assert panels(figure)["BLEU"].get_xscale() == "log"
    bands = [each for each in panels(figure)["BLEU"].collections if type(each).__name__ == "FillBetweenPolyCollection"]
    assert len(bands) == 5  # l0, subset and their controls, random: those with seeds
    low, high = (
        table[table["method"] == "random"].groupby("kept")["value"].agg(each).loc[4] for each in ("min", "max")
    )
    corners = bands[-1].get_paths()[0].vertices
    at = corners[np.isclose(corners[:, 0], 4)][:, 1]
    assert np.isclose(at.min(), low) and np.isclose(at.max(), high)
    assert "en-de · 72 heads (encoder-self + decoder-self + cross)" in words(figure)


def test_runs_of_l0_with_several_prices_are_one_course(tmp_path: Path) -> None:
    prices = ((60, 0.01), (30, 0.05), (9, 0.2))
    runs = [choice(tmp_path / f"lambda-{strength:g}", keep, strength) for keep, strength in prices]
    figure = draw("pruning", *open_pruned(runs))
    encoder, _, cross = panels(figure)["l0"].lines
    assert list(encoder.get_xdata()) == [0, 12, 42, 63]
    assert list(encoder.get_ydata()) == [24, 12, 0, 0] and list(cross.get_ydata()) == [24, 24, 24, 9]
    with pytest.raises(RunError, match="quality"):
        draw("pruning", *open_pruned(runs), figure="quality")
    with pytest.raises(RunError, match="--functions RUN"):
        draw("pruning", *open_pruned(runs), figure="functions")
    labels = Study.open(analysed(tmp_path / "run"))
    labelled = [run.with_labels(labels) for run in open_pruned(runs)]
    assert list(panels(draw("pruning", *labelled, figure="functions"))) == ["l0"]
    labels.record["checkpoint"], labelled[0].record["source"] = {"digest": "another"}, {"digest": "own", "path": "m"}
    with pytest.raises(RunError, match="labels heads of another model; name a run on m"):
        labelled[0].with_labels(labels)
