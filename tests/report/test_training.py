"""The figure of training histories: its input, its panels, its refusals."""

import json
from pathlib import Path

import numpy as np
import pytest

from headscope.results.training import Training
from tests.makers.figures import draw, words

HEAD = (
    "update,epoch,sentences,tokens,seconds,tokens_per_second,lr,loss,nll,gradient_norm,"
    "valid_nll,valid_perplexity,bleu,best"
)


def write_run(folder: Path, variant: str, columns: str = "", rows: tuple[str, ...] = ("", "", "")) -> Path:
    folder.mkdir()
    lines = [HEAD + (f",{columns}" if columns else "")]
    for number, values in enumerate(rows, start=1):
        valid = f"{3 / number},{20 / number},{number}.5,1" if number % 2 else ",,,"
        lines.append(
            f"{number * 50},{number},9,{number * 700},{number}.25,99,0.1,{4 / number},{3.5 / number},1,{valid}{values}"
        )
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    meta = {"kind": "training", "variant": variant, "signature": f"m:train.{variant}", "data": {"sentences": 31}}
    (folder / "run.json").write_text(json.dumps(meta))
    return folder


def write_runs(folder: Path) -> list[Path]:
    alphas = "window,nuclear_norm.encoder-self,nuclear_norm.cross,off_diagonal.cross"
    return [
        write_run(folder / "plain", "baseline"),
        write_run(folder / "mixing", "mixing", alphas, (",0,1,1,0", ",1,1.1,1.2,0.1", ",1,1.2,1.4,0.2")),
        write_run(folder / "swap", "swap", "swaps.cross,swapped.cross", (",0,0", ",2,2", ",4,0")),
        write_run(folder / "mae", "mae", "gate_entropy,gate_steps,own_number", (",,0,5", ",1.9,0,6", ",1.8,3,7")),
    ]


@pytest.mark.slow
def test_a_panel_for_every_quantity_and_a_line_for_every_run(tmp_path: Path) -> None:
    figure = draw("training", *map(Training.open, write_runs(tmp_path)))
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(panels) == [
        "Loss of training batches", "Loss of the validation text", "Difference from plain",
        "BLEU of the validation text", "Gates: entropy", "Nuclear norm · encoder-self",
        "Nuclear norm · cross", "Off-diagonal share · cross",
        "Swaps by score: pairs in effect · cross", "Swaps: exchanges so far · cross", "Gates: G steps so far",
        "own number",
    ]  # fmt: skip
    lines = [np.asarray(line.get_xydata()).tolist() for line in panels["BLEU of the validation text"].lines]
    assert lines == [[[50, 1.5], [150, 3.5]]] * 4
    assert len(panels["Loss of training batches"].lines) == 4
    encoder, opening = panels["Nuclear norm · encoder-self"].lines
    cross, _ = panels["Nuclear norm · cross"].lines
    assert np.asarray(encoder.get_ydata()).tolist() == [1, 1.1, 1.2]
    assert np.asarray(cross.get_ydata()).tolist() == [1, 1.2, 1.4]
    assert np.asarray(opening.get_xdata()).tolist() == [100, 100]
    limits = {axes.get_ylim() for name, axes in panels.items() if name.startswith("Nuclear")}
    assert len(limits) == 1  # the sites of one quantity share an axis
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    (entropy,) = panels["Gates: entropy"].lines
    assert np.asarray(entropy.get_xydata()).tolist() == [[100, 1.9], [150, 1.8]]
    figure_text = " ".join(text.get_text() for text in words(figure))
    assert all(name in figure_text for name in ("plain", "mixing", "swap", "mae", "31 training sentences"))


@pytest.mark.slow
def test_seeds_of_one_setting_share_a_colour(tmp_path: Path) -> None:
    courses = []
    for name, seed, lr in (("a", 1, 0.1), ("b", 2, 0.1), ("c", 1, 0.2), ("d", 3, 0.1)):
        path = write_run(tmp_path / name, "baseline")
        meta = json.loads((path / "run.json").read_text()) | {"config": {"seed": seed, "lr": lr, "out": name}}
        (path / "run.json").write_text(json.dumps(meta))
        courses.append(Training.open(path))
    figure = draw("training", *courses)
    a, b, c, d = (line.get_color() for line in figure.axes[1].lines)
    assert a == b == d != c
    assert {"a and 2 more seeds", "c"} <= {text.get_text() for text in words(figure)}
