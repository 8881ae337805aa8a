"""By how much heads are further apart than in a first run, and confidence from batch to batch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from headscope.errors import ConfigError
from headscope.report.figures.layers import discrepancy_changes
from headscope.report.figures.training import load_confidence
from headscope.results.study import Study
from tests.makers.figures import draw


def matrices(scale: float) -> dict[str, np.ndarray]:
    luck = np.random.default_rng(3)
    found = {}
    for site, layer, heads in (("encoder-self", 0, 3), ("encoder-self", 1, 3), ("cross", 0, 2)):
        apart = luck.random((heads, heads)) * (1 - np.eye(heads))
        found[f"{site}/{layer}/cosine"] = 1 - apart * scale
        found[f"{site}/{layer}/l2"] = apart * (1 + (scale - 1) * (layer + 1))
    return found


def test_changes_are_of_sums_over_pairs_in_per_cent() -> None:
    heads = pd.DataFrame(columns=["site", "layer", "head", "functions"])
    record = {"layout": {"encoder-self": [3, 3], "cross": [2]}}
    runs = [Study({"heads": heads}, record, arrays=matrices(scale)) for scale in (1.0, 1.25, 0.5)]
    changes = discrepancy_changes(runs)
    np.testing.assert_allclose(changes["cosine"]["encoder-self"], [[25, 25], [-50, -50]])
    np.testing.assert_allclose(changes["l2"]["encoder-self"], [[25, 50], [-50, -100]], atol=1e-9)
    figure = draw("discrepancy", *runs)
    drawn: list[Any] = [axes.patches for axes in figure.axes]
    bars = [[bar.get_height() for bar in patches] for patches in drawn]
    assert bars[0] == pytest.approx([25, 25, -50, -50]) and bars[3] == pytest.approx([25, -50])
    with pytest.raises(ConfigError, match="baseline"):
        discrepancy_changes(runs[:1])


def test_every_batch_is_a_point_between_the_ends_of_epochs(tmp_path: Path) -> None:
    rows = {1: [[0.1, 0.5, 3], [0.3, 0.6, 5]], 2: [[0.2, 0.4, 4], [0.5, 0.8, 4]]}
    for epoch, table in rows.items():
        content = {"encoder": [{"self_attn": np.array(table)}], "decoder": []}
        (tmp_path / f"epoch-{epoch}.pkl").write_bytes(pickle.dumps(content))
    run = load_confidence(tmp_path)
    lines = draw("confidence", run, by="batch").axes[0].lines
    assert lines[0].get_xdata() == pytest.approx([0.5, 1, 1.5, 2])
    assert lines[1].get_ydata() == pytest.approx([0.5, 0.6, 0.4, 0.8])
    means = draw("confidence", run).axes[0].lines[0]
    assert means.get_ydata() == pytest.approx([(0.3 + 1.5) / 8, 0.35])
