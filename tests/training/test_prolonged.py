"""Runs that are resumed with another end: what depends on the length goes by the length they were begun with."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headscope.formats.base import open_checkpoint
from headscope.training.trainer import train
from headscope.training.variant import VARIANTS
from tests.oracles import lessons
from tests.oracles.swaps import differing

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {"precision": "float32", "log_every": 1}


def run(out: Path, name: str = "baseline", *, resume: bool = False, **options: Any) -> list[dict[str, str]]:
    """Train; the lines of metrics.csv. Names that a variant has are its options, the others those of every run."""
    cls = VARIANTS.get(name)
    own = {key: value for key, value in options.items() if key in cls.Options.__dataclass_fields__}
    shared = {key: value for key, value in options.items() if key not in own}
    out.mkdir(exist_ok=True)
    train(lessons.config(out, **SHORT | shared), cls(cls.Options(**own)), resume=resume)
    with (out / "run" / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def weights(out: Path) -> dict[str, Any]:
    model: Any = open_checkpoint(str(out / "run" / "last"), device="cpu").model
    return dict(model.state_dict())


def test_a_window_that_has_opened_stays_open(tmp_path: Path) -> None:
    """Two epochs and three more are five in which the window opens as early."""
    run(tmp_path / "a", "mixing", max_epochs=2, start_after=0.5, gamma=0.1)
    prolonged = run(tmp_path / "a", "mixing", max_epochs=5, start_after=0.5, gamma=0.1, resume=True)
    whole = run(tmp_path / "b", "mixing", max_epochs=5, start_after=0.2, gamma=0.1)
    open_in = [{row["epoch"] for row in rows if row["window"] == "1"} for rows in (prolonged, whole)]
    assert open_in == [{"2", "3", "4", "5"}] * 2
    assert not differing(weights(tmp_path / "a"), weights(tmp_path / "b"))
    about = json.loads((tmp_path / "a" / "run" / "run.json").read_text(encoding="utf-8"))
    assert about["planned"] == {"updates": None, "epochs": 2} and about["config"]["max_epochs"] == 5


def test_a_cosine_rate_stays_where_it_ended(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "cosine", "lr": 0.01, "min_lr": 0.001}
    first = run(tmp_path, updates=8, max_epochs=None, **options)
    for end in (11, 14):  # the plan outlives the second restart too
        rows = run(tmp_path, updates=end, max_epochs=None, resume=True, **options)
        assert [row["lr"] for row in rows[:8]] == [row["lr"] for row in first]
        assert [float(row["lr"]) for row in rows[8:]] == [0.001] * (end - 8)


def test_an_earlier_end_cuts_the_run_short_and_changes_nothing_before_it(tmp_path: Path) -> None:
    """Interrupted in a run of three epochs, resumed to end after two."""

    options: dict[str, Any] = {"schedule": "cosine", "min_lr": 0.0}
    whole = run(tmp_path / "whole", max_epochs=3, **options)
    (tmp_path / "cut").mkdir()
    config = lessons.config(tmp_path / "cut", max_epochs=3, **SHORT, **options)
    cls = VARIANTS.get("baseline")
    assert train(config, cls(cls.Options()), listener=lessons.StopsAfter(2)).reason == "interrupted"
    assert train(replace(config, max_epochs=2), cls(cls.Options()), resume=True).epoch == 2
    rows = run(tmp_path / "cut", max_epochs=2, resume=True, **options)
    assert len(rows) > 4 and [row["loss"] for row in rows] == [row["loss"] for row in whole[: len(rows)]]
