"""Signals while `analyze` is past its common pass: what is finished is kept as it would be, the rest is named."""

from __future__ import annotations

import importlib
import json
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from headscope.progress import reported
from tests.faults.conftest import Command

# Where it comes, at which call, and what has not all its numbers then.
STAGES = {
    "ablation": ("analyses.ablation.ablation", 1, {"ablation", "shapley", "faithfulness"}),
    "ablation of the second batch": ("analyses.ablation.ablation", 2, {"shapley", "faithfulness"}),
    "shapley": ("analyses.ablation.shapley", 1, {"shapley", "faithfulness"}),
    "descriptions": ("analyses.explained.explained", 1, {"explained", "faithfulness"}),
    "removing heads": ("engine.faithfulness.run.measure_drop", 1, {"faithfulness"}),
    "shuffled weights": ("engine.faithfulness.run.analyze", 1, {"faithfulness"}),
    "figures": ("report.registry.draw_standard", 1, {"figures"}),
}
MEASURED = {"confidence", "ablation", "shapley", "explained"}
OPTIONS = [
    *("--only", "confidence,ablation,shapley,explained", "--faithfulness", "--set", "faithfulness-steps=2"),
    *(
        "--set",
        "faithfulness-seeds=2",
        "--set",
        "explained.explained-steps=2",
        "--set",
        "shapley.shapley-samples=2",
        "--bootstrap",
        "20",
        "--batch-tokens",
        "40",
        "--max-sentences",
        "8",
    ),
]


def analyze(headscope: Command, inputs: Path, out: Path, *more: str) -> tuple[int, str, dict[str, Any], pd.DataFrame]:
    text = ["--source", str(inputs / "source"), "--target", str(inputs / "target")]
    status, err = headscope(["analyze", str(inputs / "model"), *text, *OPTIONS, *more, "--out", str(out)])
    return status, err, json.loads((out / "run.json").read_text(encoding="utf-8")), pd.read_csv(out / "heads.csv")


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    from headscope.config import AnalyzeConfig
    from headscope.engine.study import run_analysis

    out = tmp_path_factory.mktemp("whole") / "run"
    own = {"shapley_samples": 2, "explained_steps": 2}
    options: Any = {"bootstrap": 20, "batch_tokens": 40, "max_sentences": 8, "analysis_options": own}
    files: Any = {"source": inputs / "source", "target": inputs / "target", "checkpoint": str(inputs / "model")}
    shown: dict[str, list[tuple[int, int]]] = {}
    progress = reported(lambda title, done, total: shown.setdefault(title, []).append((done, total)))
    config = AnalyzeConfig(**files, out=out, only=tuple(MEASURED), figures=False, **options)
    run_analysis(config, progress=progress)
    # Every stage is shown, to its end; a batch that takes long step by step.
    sites = [f"describing heads of {site}" for site in ("encoder-self", "decoder-self", "cross")]
    assert sorted(shown) == sorted(["analysing", "ablation", "shapley", *sites])
    assert all(steps[-1][0] == steps[-1][1] for steps in shown.values())
    assert len(shown["shapley"]) > len(shown["ablation"]) > 16 >= len(shown["analysing"])
    return pd.read_csv(out / "heads.csv")


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_finished_is_kept_and_what_is_not_is_named(
    stage: str,
    headscope: Command,
    inputs: Path,
    tmp_path: Path,
    whole: pd.DataFrame,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, call, lacking = STAGES[stage]
    module, _, name = f"headscope.{place}".rpartition(".")
    owner = importlib.import_module(module)
    real, calls = getattr(owner, name), [0]

    def interrupted(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, interrupted)
    status, err, record, heads = analyze(
        headscope, inputs, tmp_path / "run", *([] if stage == "figures" else ["--no-figures"])
    )
    assert (status, record["complete"], record["data"]["sentences"]) == (130, False, 8), err
    assert {entry["analysis"] for entry in record["left_out"] if entry["why"].startswith("was interrupted")} == lacking
    assert err.startswith("interrupted: ") and err.count("\n") == 1 and all(name in err for name in lacking)
    there = {path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*.*")}
    assert there == {*record["files"]}
    assert MEASURED - set(heads) == MEASURED & lacking
    part = {"ablation"} if "second" in stage else set()
    assert [line.split()[0] for line in record["remarks"] if " was interrupted after " in line] == [*part]
    for measure in MEASURED - lacking - part:
        pd.testing.assert_series_equal(heads[measure], whole[measure])
