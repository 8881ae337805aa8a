"""Commands end with what was asked, where it is, and a command that could come next, which runs as it stands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import headscope as hs
from headscope.formats.native import NATIVE
from tests.makers import fairseq_layouts
from tests.oracles import checkpoints, evidence, fairseq

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def few(tmp_path: Path) -> tuple[Path, Path]:
    """Twelve captions and their translations."""
    paths = tmp_path / "few.en", tmp_path / "few.de"
    for path, language in zip(paths, ("en", "de"), strict=True):
        path.write_text("\n".join(hs.assets.captions(language).read_text("utf-8").splitlines()[:12]) + "\n", "utf-8")
    return paths


@pytest.mark.slow
def test_importance_says_which_heads_are_needed(command: Command, few: tuple[Path, Path], tmp_path: Path) -> None:
    out, text = tmp_path / "run", ("--source", few[0], "--target", few[1])
    names = "ablation,magnitude,sink"
    given = ("--out", out, "--only", names, "--bootstrap", 50, "--no-figures", "--device", "cpu")
    status, shown, _ = command("analyze", hs.assets.trained(), *text, *given)
    assert status == 0
    subject, heading, first, *rest = shown.splitlines()
    assert "72 heads" in subject and heading.startswith("Which heads the model needs ")
    table, pairs = (pd.read_csv(out / f"{name}.csv") for name in ("importance", "importance_agreement"))
    assert len(table) == 72 * 3 and len(pairs) == 3  # magnitude has two columns
    tested = table[table.measure == "ablation"].sort_values("rank")
    best = tested.iloc[0]
    assert first.split()[0] == f"{best.site}.{best.layer}.{best['head']}"
    zero = int((tested.p_adjusted > 0.05).sum())
    assert any(line.strip().startswith(f"{zero} of 72 heads cannot be told from zero") for line in rest)
    assert evidence.rejected(tested.p.tolist(), 0.05) == {n for n, p in enumerate(tested.p_adjusted) if p <= 0.05}
    assert table[table.measure != "ablation"].p.isna().all()
    need = pd.read_csv(out / "importance_functions.csv")
    assert set(need.measure) == set(table.measure) and set(need.name) == {"sink", "no label"}
    figure = rest[-1]
    assert figure.startswith("Figure for a paper:  headscope plot heads ") and "--measure ablation" in figure
    assert not any(line.startswith("Smaller model:") for line in rest), "so few lines can tell nothing"
    words = shlex.split(figure.partition(":  headscope ")[2])
    assert command(*words)[0] == 0
    alone = ("--out", tmp_path / "one", "--only", "ablation", "--max-sentences", 1, *given[4:])
    status, shown, _ = command("analyze", hs.assets.trained(), *text, *alone)
    assert status == 0 and "1 sentence" in shown and "told from zero" not in shown, "of one nothing is tested"


@pytest.mark.slow
def test_functions_say_what_lacks_evidence(command: Command, few: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = (
        "--out",
        out,
        "--only",
        "sink,positional",
        "--bootstrap",
        50,
        "--set",
        "positional.min-instances=500",
        "--no-figures",
        "--device",
        "cpu",
    )
    status, shown, _ = command("analyze", hs.assets.trained(), "--source", few[0], "--target", few[1], *given)
    assert status == 0 and "instances, 500 are needed" not in shown
    line = shown.splitlines()[-1]
    assert "--importance --out" in line and f"--source {few[0]} --target {few[1]}" in line
    again = (*given[:1], tmp_path / "again", *given[2:], "--verbose")
    shown = command("analyze", hs.assets.trained(), "--source", few[0], "--target", few[1], *again)[1]
    assert "Not enough evidence" in shown and "instances, 500 are needed" in shown
    labels, heads = pd.read_csv(out / "labels.csv"), pd.read_csv(out / "heads.csv")
    assert not labels.given.any() and heads.functions_unsupported.notna().any()


def test_each_head_names_differences(command: Command, few: tuple[Path, Path]) -> None:
    metrics = ("--metrics", "perplexity,accuracy")
    given = ("--each-head", "--heads", "cross.0.*", *metrics, "--device", "cpu", "--bootstrap", 50)
    status, shown, _ = command("evaluate", hs.assets.trained(), "--source", few[0], "--target", few[1], *given)
    assert status == 0 and "±" not in shown
    assert "Δ nll/token" in shown and "Δ accuracy" in shown
    first, heading, none, most, *rest = shown.splitlines()
    assert first.startswith("each of 8 heads off alone") and heading.startswith("Which head matters most")
    assert none.split()[0] == "none" and most.split()[0].startswith("cross.0.")
    assert any("contains 0 for" in line and "of 8 heads" in line for line in rest)


def test_evaluate_begins_with_its_scores(command: Command, few: tuple[Path, Path]) -> None:
    given = ("--metrics", "perplexity", "--device", "cpu", "--bootstrap", 50)
    _, shown, _ = command("evaluate", hs.assets.trained(), "--source", few[0], "--target", few[1], *given)
    first, heading, score, *_ = shown.splitlines()
    assert first.startswith("perplexity ") and heading.startswith("Scores") and "–" in score


@pytest.mark.parametrize("options", [fairseq.BASE, fairseq.LM], ids=["two sides", "language model"])
def test_show_describes_a_checkpoint_whose_dictionaries_are_elsewhere(
    options: dict[str, Any], command: Command, tmp_path: Path
) -> None:
    tied = options | fairseq_layouts.TIED
    status, shown, error = command("show", fairseq.write(tmp_path / "model.pt", tied, fairseq.state(tied)))
    assert (status, error) == (0, "") and "Text: no tokenizer" in shown
    assert "What each head does:  headscope analyze " in shown and shown.rstrip().endswith(" --dicts DIR")


def test_show_says_that_heads_are_mixed(command: Command, tmp_path: Path) -> None:
    NATIVE.save(checkpoints.small(self_mixing="alpha.v1", cross_mixing="alpha.v1"), tmp_path / "mixed")
    NATIVE.save(checkpoints.small(), tmp_path / "plain")
    mixing = json.loads(command("show", tmp_path / "mixed", "--json")[1])["mixing"]
    assert {place["mixing"] for place in mixing} == {"alpha.v1"}
    lines = command("show", tmp_path / "mixed")[1].splitlines()
    assert any(line.startswith("Mixing: alpha.v1: at ") and "a matrix that mixes" in line for line in lines)
    lines = command("show", tmp_path / "plain")[1].splitlines()
    assert not any(line.startswith("Mixing") for line in lines)
