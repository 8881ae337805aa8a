"""Conclusions of a sweep from its record."""

from typing import Any

import pandas as pd
import pytest

from headscope.results.sweep import Sweep

TEXT = "smallest loss that this test set could have seen"
NO_SIZE = "no size is shown to be as good as the unpruned model"


def headline(verdicts: dict[str, str], *about_text: str) -> str:
    """The first sentence of a sweep whose methods have these verdicts, each keeping one head more than the last."""
    rows = [
        {"method": name, "control": "", "size": "keep 1", "verdict": verdict, "kept": size}
        for size, (name, verdict) in enumerate(verdicts.items(), start=1)
    ]
    conclusions = [f"{name}: {verdict}; numbers" for name, verdict in verdicts.items() if verdict]
    record: dict[str, Any] = {"verdicts": rows, "conclusions": [*conclusions, *about_text], "remarks": []}
    baseline = {"method": "unpruned", "control": "", "size": "", "seed": 1, "kept": 9, "value": 1.0, "difference": 0.0}
    cells = pd.DataFrame([baseline | {"metric": "bleu", "cell": "unpruned"}])
    return Sweep("sweep", record, cells, pd.DataFrame()).answers()[0].sentence.removeprefix("sweep: ")


@pytest.mark.parametrize(
    ("verdicts", "about_text", "expected"),
    [
        ({"l0": "worse", "obs": "non-inferior", "mean": "non-inferior"}, (), "obs: non-inferior"),
        ({"a": "", "a: b": "non-inferior"}, (), "a: b: non-inferior"),
        ({"l0": "worse", "obs": "not established"}, (TEXT,), f"{NO_SIZE}; {TEXT}"),
        ({"l0": "worse", "obs": "worse"}, (), NO_SIZE),
        ({"l0": ""}, (), "nothing to compare with"),
    ],
)
def test_a_sweep_says_first_what_it_shows(verdicts: dict[str, str], about_text: tuple[str, ...], expected: str) -> None:
    assert headline(verdicts, *about_text) == expected
