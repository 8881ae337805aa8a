"""By how much heads are further apart than in a first run, and confidence from batch to batch."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from headscope.errors import ConfigError
from headscope.report.figures.layers import discrepancy_changes
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
