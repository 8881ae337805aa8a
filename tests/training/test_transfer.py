"""Tuning a trained model on a share of the text, and the figure of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from headscope.config.option import configured
from headscope.data.corpus import open_corpus
from headscope.errors import ConfigError
from headscope.report.figures.training import transfer_points
from headscope.results.training import Training
from headscope.training.config import TrainConfig
from tests.makers.figures import draw


def test_a_smaller_share_is_part_of_a_larger_one(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"line {n}\n" for n in range(40)), encoding="utf-8")
    whole = open_corpus(tmp_path / "text")
    drawn = {share: [each.source for each in whole.share(share, seed=1)] for share in (0.01, 0.25, 0.5, 1.0)}
    assert [len(lines) for lines in drawn.values()] == [1, 10, 20, 40]
    assert set(drawn[0.01]) < set(drawn[0.25]) < set(drawn[0.5]) < set(drawn[1.0])
    assert drawn[1.0] == [each.source for each in whole] and drawn[0.5] == sorted(drawn[0.5], key=drawn[1.0].index)
    other = whole.share(0.5, seed=2)
    assert [each.source for each in other] != drawn[0.5] and other.digest != whole.share(0.5, seed=1).digest
    for share in (0.0, 1.5):
        with pytest.raises(ConfigError, match="--fraction"):
            configured(TrainConfig, {"source": tmp_path / "text", "target": tmp_path / "text", "fraction": share})


def run(tune: str, fraction: float, bleu: list[float], **config: Any) -> Training:
    meta = {"config": {"init": "mae/last", "fraction": fraction, "seed": 1, **config}, "options": {"tune": tune}}
    return Training(meta, pd.DataFrame({"update": range(len(bleu)), "bleu": bleu}), Path("run"))


def test_the_figure_has_the_best_validation_of_every_run() -> None:
    runs = [run("gates", 0.05, [20.0, 21.0]), run("gates", 1.0, [22.0]), run("gates+output", 0.05, [23.0, 22.5])]
    runs += [run("none", 1.0, [24.0]), run("none", 1.0, [9.0], init=None)]
    points = transfer_points(runs)
    assert points["bleu"].tolist() == [21, 22, 23, 24, 9]
    assert [name.partition(" ")[0] for name in points["tuned"]] == ["FTG", "FTG", "FTG+", "all", "from"]
    axes = draw("transfer", *runs, untuned=19.5).axes[0]
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[0.05, 21], [1, 22]]
    assert np.asarray(axes.lines[-1].get_ydata()).tolist() == [19.5, 19.5]
