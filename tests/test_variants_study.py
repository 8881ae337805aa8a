"""The study of variants: its tables from made-up runs, its verdicts, its swap schedule."""

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from headscope.heads import HeadId, Site
from headscope.training.swaps.schedule import read_schedule
from tests.makers.modules import ROOT

Study = tuple[ModuleType, ModuleType]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("variants_study"), importlib.import_module("variants_report")


def test_verdicts_need_the_published_direction_beyond_the_spread_of_seeds(study: Study) -> None:
    judged = study[1].judged
    assert judged([], 1) == "no numbers yet"
    assert judged([0.25], 1) == "open, one seed only: +0.25, that direction"
    assert judged([0.25], -1) == "open, one seed only: +0.25, not that direction"
    # mean 1, deviation 0.1: 4.303 · 0.1 / √3 = 0.248
    assert judged([0.9, 1.0, 1.1], 1) == "reproduced: +1 ± 0.25 (95 %, 3 seeds)"
    assert judged([0.9, 1.0, 1.1], -1) == "not reproduced: +1 ± 0.25 (95 %, 3 seeds), not that direction"
    assert judged([0.0, 1.0, 2.0], 1).endswith("no more than seeds differ")


def test_the_schedule_is_read_by_train_and_leaves_heads_where_they_were(study: Study, tmp_path: Path) -> None:
    layout = {(Site.CROSS, layer): 8 for layer in range(3)}
    path = tmp_path / "swaps.json"
    path.write_text(json.dumps(study[0].swap_schedule(5)))
    found = read_schedule(path, layout)
    assert sorted(found) == [2, 3, 4, 5]
    assert all(len(swaps) == 8 for swaps in found.values())
    pair = (found[2][3].first, found[2][3].second)
    assert pair == (HeadId(Site.CROSS, 0, 3), HeadId(Site.CROSS, 2, 3))
    assert sorted(study[0].swap_schedule(4)) == ["2", "3"], "an odd number of exchanges would leave them elsewhere"


def finished(out: Path, arm: str, seed: int, bleu: float, cpu: float, spread: float) -> None:
    run, analysis = out / "runs" / f"{arm}-{seed}", out / "analysis" / f"{arm}-{seed}"
    run.mkdir(parents=True)
    analysis.mkdir(parents=True)
    result = {"arm": arm, "seed": seed, "bleu": bleu, "valid_nll": 2.0, "parameters": 1000, "seconds": 9.0}
    result |= {"cpu_seconds": cpu, "threads": 1, "ended": "2026-01-02", "bleu_signature": "tok:13a"}
    (run / "result.json").write_text(json.dumps(result))
    (run / "run.json").write_text(json.dumps({"kind": "training", "variant": arm}))
    (run / "metrics.csv").write_text("update,tokens,seconds,nll,valid_nll\n1,9,1.0,3.0,\n2,18,2.0,2.5,2.0\n")
    heads = [("cross", 0, head, 0.5 + spread * sign) for head, sign in enumerate((1, -1))]
    pd.DataFrame(heads, columns=["site", "layer", "head", "confidence"]).to_csv(analysis / "heads.csv", index=False)
    layout = {"encoder-self": [], "decoder-self": [], "cross": [2]}
    about = {"complete": seed != 1, "signature": "s", "layout": layout}  # without an analysis, no figure of it
    (analysis / "run.json").write_text(json.dumps(about))


def test_the_report_is_made_of_whatever_is_finished(study: Study, tmp_path: Path) -> None:
    study_, report = study
    (tmp_path / "study.json").write_text(json.dumps({"epochs": 5, "max_sentences": None, "recipe": {"lr": 0.002}}))
    report.report(tmp_path, study_.ARMS)
    assert "seeds finished: none" in (tmp_path / "table.md").read_text()
    for seed, better in ((1, 1.0), (2, 2.0)):
        finished(tmp_path, "baseline", seed, 30.0, 100.0, 0.25)
        finished(tmp_path, "swap-manual", seed, 30.0 + better, 110.0, 0.125)
    finished(tmp_path, "mae", 2, 33.0, 115.0, 0.25)
    report.report(tmp_path, study_.ARMS)
    table = pd.read_csv(tmp_path / "table.csv").set_index("arm")
    assert list(table.loc["swap-manual", ["seeds", "bleu", "time_ratio"]]) == pytest.approx([2, 31.5, 1.1])
    assert table.loc["swap-manual", "bleu_sd"] == pytest.approx(0.5**0.5)
    assert table.loc["mae", "seeds"] == 1
    assert pd.isna(table["bleu_sd"]["mae"])
    rows = pd.read_csv(tmp_path / "runs.csv").set_index(["arm", "seed"])
    assert rows.loc[("swap-manual", 2), "confidence_spread.cross"] == pytest.approx(0.125)
    assert pd.isna(rows["confidence_spread.cross"][("swap-manual", 1)]), "its analysis is not complete"
    text = (tmp_path / "table.md").read_text()
    assert (
        "| MHR swaps by schedule | 2 | 31.50 ± 0.71 | 2.0000 ± 0.0000 | 1,000 | 110 ± 0 | 1.10 ± 0.00 | 9 ± 0 |" in text
    )
    assert "34.74, 34.51 | not reproduced: +1.5 ± 6.4 (95 %, 2 seeds), that" in text
    assert "open, one seed only: -0.125, that direction" in text
    assert "headscope train mae --no-bcd" in text
    assert (tmp_path / "figures" / "training.png").exists()


def test_seeds_are_added_to_a_table_whose_runs_are_elsewhere(study: Study, tmp_path: Path) -> None:
    study_, report = study
    (tmp_path / "study.json").write_text(json.dumps({"epochs": 5, "max_sentences": None, "recipe": {"lr": 0.002}}))
    for seed in (1, 2, 3):
        finished(tmp_path, "baseline", seed, 30.0 + seed / 7, 100.0, 0.25)
        finished(tmp_path, "swap-manual", seed, 31.0, 110.0 + seed / 3, 0.125)
    report.report(tmp_path, study_.ARMS)
    expected = {name: (tmp_path / name).read_text() for name in ("table.md", "table.csv", "runs.csv")}
    for seed in (1, 2):
        for name in ("baseline", "swap-manual"):
            shutil.rmtree(tmp_path / "runs" / f"{name}-{seed}")
            shutil.rmtree(tmp_path / "analysis" / f"{name}-{seed}")
    report.report(tmp_path, study_.ARMS)
    assert {name: (tmp_path / name).read_text() for name in expected} == expected
    finished(tmp_path, "baseline", 2, 50.0, 100.0, 0.25)
    report.report(tmp_path, study_.ARMS)
    rows = pd.read_csv(tmp_path / "runs.csv").set_index(["arm", "seed"])
    assert rows.loc[("baseline", 2), "bleu"] == 50.0, "a run that is there comes before what was noted of it"
    assert len(rows) == 6
