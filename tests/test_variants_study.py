"""The study of variants: its plan before its runs, its verdicts, and its committed page made again from its tables."""

import dataclasses
import importlib
import json
import math
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtrit

from headscope.training.config import TrainConfig
from headscope.training.variant import VARIANTS
from tests.makers.modules import ROOT

RESULTS = ROOT / "benchmarks" / "variants"
FLAGS = {"mae-uniform": " --uniform", "mae-nobcd": " --no-bcd", "baseline-0.2": " --dropout 0.2"}
FLAGS["swap-soft"] = " --dynamic soft"
FLAGS["mae-uniform-0.2"] = FLAGS["mae-uniform"] + FLAGS["baseline-0.2"]


@pytest.fixture(autouse=True)
def benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def part(name: str) -> ModuleType:
    return importlib.import_module(f"variants.{name}")


def runs(arm: str, values: dict[int, float], column: str = "valid_nll", **more: Any) -> list[dict[str, Any]]:
    return [{"arm": arm, "seed": seed, column: value, **more} for seed, value in values.items()]


def test_a_difference_has_the_interval_and_p_value_of_students_t() -> None:
    difference = part("verdicts").Difference.of([0.9, 1.0, 1.1])
    assert difference.mean == pytest.approx(1.0)
    assert difference.reach == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)
    t = 1.0 / (0.1 / 3**0.5)
    assert difference.p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6), "exact for two degrees of freedom"
    assert part("verdicts").Difference.of([0.5]) is None
    assert part("verdicts").Difference.of([0.0, 0.0]).p == 1.0


def test_p_values_are_adjusted_as_holm_did() -> None:
    adjusted = part("verdicts").holm([0.01, 0.04, 0.03, 0.005])
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert part("verdicts").holm([0.9, 0.8]) == [1.0, 1.0]


def test_each_of_the_four_words() -> None:
    design, verdicts = part("design"), part("verdicts")
    names = ("better", "worse", "same", "lost", "idle")
    claims = [design.Claim(name, "loss", "valid_nll", name, "base", -1, -0.1, "") for name in names]
    rows = runs("base", {1: 2.0, 2: 2.1, 3: 1.9})
    rows += runs("better", {1: 1.900, 2: 2.001, 3: 1.799})
    rows += runs("worse", {1: 2.100, 2: 2.199, 3: 2.001})
    rows += runs("same", {1: 2.01, 2: 2.08, 3: 1.91})
    rows += runs("lost", {1: 1.5})
    rows += runs("idle", {1: 1.5, 2: 1.6, 3: 1.4})
    judged = verdicts.verdicts(claims, rows, {"idle": "gates"})
    assert [verdict.word for verdict in judged] == ["reproduced", "contradicted", "undecided", "untested", "untested"]
    assert judged[0].p_adjusted == pytest.approx(3 * judged[0].difference.p), "three claims were tested"
    assert judged[0].holds_published
    assert judged[1].holds_published is False
    assert judged[4].why == "idle: gates"


def test_an_arm_that_did_nothing_is_found_and_named() -> None:
    design, verdicts = part("design"), part("verdicts")
    arms = {arm.name: arm for arm in design.ARMS}
    moved = {"gate_steps": 9.0, "gate_change": 0.2}
    rows = runs("mae", {1: 1.9, 2: 2.07}, "gate_entropy", **moved) + runs("swap", {1: 32.0}, "swaps")
    assert verdicts.idle(arms.values(), rows) == {"mae": "gate_entropy of seed 2 is 2.07, must be at most 2"}
    assert "mixing" in verdicts.idle(arms.values(), runs("mixing", {1: 1.9})), "without the number nothing is shown"


def test_the_number_of_seeds_follows_from_deviation_and_width() -> None:
    verdicts = part("verdicts")
    seeds = verdicts.seeds_needed(0.02, 0.02)
    reaches = [stdtrit(count - 1, 0.975) * 0.02 / count**0.5 for count in (seeds - 1, seeds)]
    assert reaches[0] > 0.02 >= reaches[1]
    assert verdicts.detectable(0.02, 6) < verdicts.detectable(0.02, 6, tests=9)


def test_power_is_that_of_the_noncentral_t() -> None:
    verdicts = part("verdicts")
    luck = np.random.default_rng(0)
    drawn = luck.normal(verdicts.detectable(0.7, 5, tests=9), 0.7, size=(100_000, 5))
    statistic = drawn.mean(axis=1) / (drawn.std(axis=1, ddof=1) / 5**0.5)
    found = (np.abs(statistic) > stdtrit(4, 1 - 0.05 / 18)).mean()
    assert found == pytest.approx(0.8, abs=0.005)


def test_arms_and_recipe_are_options_that_train_has(tmp_path: Path) -> None:
    design, study = part("design"), part("runs")
    assert set(design.RECIPE) <= {field.name for field in dataclasses.fields(TrainConfig)}
    setting = study.Setting(tmp_path, tmp_path, design.RECIPE, 1, "cpu", "")
    for arm in (*design.ARMS, *design.REGIME_ARMS):
        VARIANTS.get(arm.variant).Options(**arm.options)
        config = study.train_config(setting, arm, 1)
        assert (config.lr, config.max_epochs, config.heads) == (arm.lr, design.EPOCHS, 8)
    names = {arm.name for arm in design.ARMS} | {"swap-soft"}
    assert {claim.arm for claim in design.CLAIMS} <= names
    assert len(set(design.CLAIMS)) == len(design.CLAIMS)


def finished(out: Path, arm: str, seed: int, loss: float, **numbers: float | str) -> None:
    run = out / "runs" / f"{arm}-{seed}"
    run.mkdir(parents=True)
    note = {"arm": arm, "seed": seed, "valid_nll": loss, "best_epoch": 1, "parameters": 1000, "bleu": 30.0 - loss}
    note |= {"signature": f"m:train|commit:{'ab' * 20}", "ended": "2026-01-02", "machine": "a processor", "threads": 1}
    (run / "result.json").write_text(json.dumps(note | numbers))
    (run / "metrics.csv").write_text(f"update,epoch,valid_nll\n1,1,{loss}\n2,1,\n3,2,{loss + 0.5}\n")


def test_the_committed_page_is_that_of_the_committed_tables(tmp_path: Path) -> None:
    if not (RESULTS / "runs.csv").exists():
        pytest.skip("the runs of the plan are not finished")
    for path in RESULTS.iterdir():
        if path.suffix == ".csv" or path.is_dir():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    part("page").write_page(tmp_path)
    for name in ("table.md", "table.csv"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text(), name
