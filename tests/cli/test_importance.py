"""`headscope analyze` with importances: options, what they refuse, files, and a model that is left as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from headscope.assets import demo_checkpoint
from headscope.config import AnalyzeConfig
from headscope.engine.base import RunOptions
from headscope.engine.plan import analyze, choose_analyses, chosen_analyses
from headscope.engine.study import run_analysis
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from tests.oracles import speakers
from tests.oracles.commands import ran


def config(folder: Path, **options: Any) -> AnalyzeConfig:
    text = folder / "text.en"
    text.write_text("A dog runs over the grass.\nTwo men sit.\nA woman in a red coat reads a book.\n", encoding="utf-8")
    given: dict[str, Any] = {"device": "cpu", "figures": False, "bootstrap": 20, **options}
    return AnalyzeConfig(checkpoint=str(demo_checkpoint()), source=text, out=folder / "run", **given)


@pytest.mark.slow
def test_columns_tables_detail_and_signature(tmp_path: Path) -> None:
    names = ("gradient", "taylor", "magnitude", "contribution")
    run_analysis(config(tmp_path, only=names, detail=True, analysis_options={"granularity": "token"}))
    heads = pd.read_csv(tmp_path / "run" / "heads.csv")
    for name in ("gradient", "taylor", "magnitude", "magnitude_all", "contribution", "contribution_sum"):
        assert {name, f"{name}_low", f"{name}_high"} <= set(heads.columns) and heads[name].gt(0).all()
    np.testing.assert_allclose(heads.groupby("layer").gradient.apply(lambda g: (g**2).sum()), 1)
    meta = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert meta["signatures"]["gradient"].startswith("m:gradient.v2|objective:representation.v1|grain:token|")
    table = pd.read_csv(tmp_path / "run" / "gradient.csv")
    assert list(table.columns[:5]) == ["site", "layer", "head", "gradient", "raw"]
    with np.load(tmp_path / "run" / "detail" / "gradient.npz") as detail:
        assert sorted(detail.files) == ["0/encoder-self", "1/encoder-self", "2/encoder-self"]
        each = [detail[name] for name in sorted(detail.files)]
    lengths = [9, 6, 12]  # pieces with both special ones
    mean = sum(n * values for n, values in zip(lengths, each, strict=True)) / sum(lengths)
    np.testing.assert_allclose(mean.ravel(), table.raw, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "los", "only": ("gradient",)}, "'los'.*'loss'"),
        ({"objective": "loss", "only": ("gradient",)}, "--objective loss"),
        ({"objective": "loss", "only": ("confidence",)}, "--objective loss.*--importance"),
        ({"only": ("importances",)}, "'importances'"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_analysis(config(tmp_path, **options))
    assert not (tmp_path / "run").exists()


def test_flags_of_parameters_survive_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    its: Any = speakers.checkpoint("gpt2")
    flags = [parameter.requires_grad for parameter in its.model.parameters()]
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in its.model.modules())

    def broken(self: Checkpoint, batch: object, memory: object = None) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(type(its), "logits", broken)
    with pytest.raises(RuntimeError, match="broken"):
        analyze(its, speakers.corpus("gpt2"), analyses=choose_analyses(only=["gradient"]), options=RunOptions())
    assert [parameter.requires_grad for parameter in its.model.parameters()] == flags
    assert sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in its.model.modules()) == hooks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_ranks_as_double_does(dtype: torch.dtype) -> None:
    """Products, sums and norms in float32 at least: three digits are left of the model's own."""
    found = []
    for each in (torch.float64, dtype):
        its = copy.copy(speakers.checkpoint("gpt2"))
        for cached in ("attention_sites", "projections"):
            its.__dict__.pop(cached, None)
        its.model = copy.deepcopy(its.model).to(each)
        names = ("gradient", "taylor", "contribution", "direct_logit")
        found.append(
            analyze(
                its, speakers.corpus("gpt2"), analyses=choose_analyses(only=names), options=RunOptions(), replicates=11
            )
        )
    for name in ("gradient", "taylor", "contribution", "direct_logit"):
        exact, rounded = (each.heads[name].to_numpy() for each in found)
        assert abs(exact - rounded).max() < 0.05 * abs(exact).max(), name


IMPORTANCES = {"gradient", "taylor", "magnitude", "contribution", "direct_logit", "lrp", "ablation"}
MANY_PASSES = {"shapley", "integrated_gradients"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", set()),
        ("--importance", IMPORTANCES),
        ("--importance cheap --also shapley", IMPORTANCES | {"shapley"}),
        ("--importance=all", IMPORTANCES | MANY_PASSES),
        ("--importance all --skip shapley", IMPORTANCES | MANY_PASSES - {"shapley"}),
        ("--faithfulness", IMPORTANCES),
        ("--faithfulness --importance all", IMPORTANCES | MANY_PASSES),
        ("--faithfulness --only gradient", {"gradient"}),
        ("--config cheap.toml", IMPORTANCES),
        ("--config none.toml", set()),
    ],
)
def test_what_takes_many_passes_is_asked_for(
    words: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ("cheap", "none"):
        (tmp_path / f"{value}.toml").write_text(f'importance = "{value}"\n', encoding="utf-8")
    made: list[Any] = []

    def noted(given: Any, **_: Any) -> Any:
        made.append(given)
        return SimpleNamespace(folder=None)

    monkeypatch.setattr("headscope.engine.study.run_analysis", noted)
    (tmp_path / "text").write_text("A dog.\n", encoding="utf-8")
    end = ["model", "--source", "text", "--out", "run"]
    assert ran(["analyze", *words.split(), *end]).orderly and ran(["analyze", *end, *words.split()]).orderly
    for given in made:
        found = {cls.name for cls in chosen_analyses(given) if cls.group == "importance"}
        assert found == expected
    assert len(made) == 2
