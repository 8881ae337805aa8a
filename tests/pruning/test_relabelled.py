"""Functions of the heads that a sweep leaves: in the whole model, and in each pruned model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.text import Text

from headscope.config import AnalyzeConfig
from headscope.engine.study import run_analysis
from headscope.errors import ConfigError
from headscope.pruning.sweep.sweep import run_sweep
from headscope.results.sweep import open_pruned
from tests.makers.figures import draw
from tests.makers.sweeps import config, made_words
from tests.oracles import checkpoints

pytestmark = pytest.mark.slow


def analysed(words: dict[str, Any], out: Path, checkpoint: str) -> Path:
    """A run that labels by the estimate alone, so that a label of one head does not depend on what others are there."""
    texts: dict[str, Any] = {"source": words["valid_source"], "target": words["valid_target"]}
    how: dict[str, Any] = {"label_rule": "published"}
    found = run_analysis(
        AnalyzeConfig(
            checkpoint=checkpoint, out=out, **texts, only=("positional",), analysis_options=how, figures=False
        )
    )
    return found.path


def names(table: pd.DataFrame) -> list[str]:
    return [f"{row.site}.{row.layer}.{row.head}" for row in table.itertuples()]


def labels(run: Path) -> dict[str, str]:
    """Of the heads that have some, in self attention."""
    heads = pd.read_csv(run / "heads.csv").fillna({"functions": ""})
    return {head: text for head, text in zip(names(heads), heads["functions"], strict=True) if text}


def labels_of(survivors: pd.DataFrame, cell: str) -> dict[str, str]:
    own = survivors[survivors["cell"] == cell]
    return {head: text for head, text in zip(names(own), own["relabelled"], strict=True) if text}


def test_a_sweep_labels_pruned_models_as_analyze_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope.analyses.positional.THRESHOLD", 0.4)
    words = made_words(tmp_path, checkpoints.small())
    run = analysed(words, tmp_path / "whole", words["checkpoint"])
    asked = {"methods": ("l0", "random"), "keep": (9,), "functions": run, "relabel": True, "keep_models": True}
    found = run_sweep(config(words, tmp_path / "out", **asked))
    whole = labels(run)
    assert labels_of(found.survivors, "unpruned") == whole and any(whole.values())
    for row in found.cells[1:].itertuples():
        its = analysed(words, tmp_path / str(row.cell), str(tmp_path / "out" / str(row.model)))
        assert sorted(labels_of(found.survivors, str(row.cell)).values()) == sorted(labels(its).values())
        own = found.survivors[found.survivors["cell"] == row.cell]
        assert own["functions"].tolist() == [whole.get(head, "") for head in names(own)]
    assert (found.survivors["relabelled"] != found.survivors["functions"]).any()
    (drawn,) = open_pruned([tmp_path / "out"])
    texts = [text.get_text() for text in draw("pruning", drawn, figure="functions").findobj(Text)]
    assert {"l0, before", "l0, after", "random, before", "random, after"} <= set(texts)
    with pytest.raises(ConfigError, match=r"--relabel True.*False"):
        run_sweep(config(words, tmp_path / "out", **{**asked, "relabel": False}))
    words["valid_source"].write_text("a b\n" * 17, encoding="utf-8")
    with pytest.raises(ConfigError, match="whole"):
        run_sweep(config(words, tmp_path / "other", **asked))
