"""`headscope analyze --clean --corrupt --answer`, from files to the answer; and the same in Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import headscope as hs
from headscope.config import AnalyzeOptions
from headscope.engine.plan import chosen_analyses
from headscope.errors import ConfigError
from headscope.heads import Site
from headscope.report.page.write import facts
from headscope.results.study import Study
from tests.oracles import patching, prompts, speakers
from tests.oracles.patching import Eager

Command = Callable[..., tuple[int, str, str]]
FAST = ("--no-figures", "--bootstrap", 19)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    opened: Any = speakers.checkpoint("gpt2")
    opened.model.save_pretrained(folder)
    opened.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    clean, corrupt, answers, _ = prompts.lines("gpt2")
    made = {}
    for name, lines in (("clean", clean), ("corrupt", corrupt), ("answer", answers)):
        made[name] = tmp_path / f"{name}.txt"
        made[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return made


def flags(files: dict[str, Path]) -> list[object]:
    return [part for name, path in files.items() for part in (f"--{name}", path)]


@pytest.mark.slow
def test_files_and_answers(checkpoint: Path, files: dict[str, Path], tmp_path: Path, command: Command) -> None:
    out = tmp_path / "run"
    arguments = ("analyze", checkpoint, *flags(files), "--out", out, "--dtype", "float64", *FAST)
    status, shown, said = command(*arguments, "--only", "prompts", "--set", "eap_ig.eap-steps=2")
    assert status == 0, said
    tables = {name: pd.read_csv(out / f"{name}.csv") for name in ("heads", "patching", "patching_agreement")}
    its = speakers.checkpoint("gpt2")
    eager = [Eager(its.model, "gpt2", prompt, dict(its.layout)) for prompt in prompts.prompts("gpt2")]
    exact = [patching.exact(one, "noising") for one in eager]
    expected = torch.cat([torch.stack([row[Site.DECODER_SELF, n] for row in exact]).mean(0) for n in (0, 1)])
    assert tables["heads"]["patching"].tolist() == pytest.approx(expected.tolist(), abs=1e-9)
    row: Any = tables["patching_agreement"].set_index(["first", "second"]).loc[("patching", "eap_ig")]
    tests = tables["patching"]
    told = tests[(tests["measure"] == "patching") & (tests["p_adjusted"] <= 0.05)][["site", "layer", "head"]]
    pair = tables["heads"].merge(told)[["patching", "eap_ig"]]
    assert row["heads"] == len(pair)
    expected_r = [pair.corr(method=kind).iloc[0, 1] if len(pair) > 2 else np.nan for kind in ("spearman", "pearson")]
    assert [row.spearman, row.pearson] == pytest.approx(expected_r, nan_ok=True)
    prompts_table = pd.read_csv(out / "patching_prompts.csv")
    assert prompts_table["answer"].tolist() == [line.split("\t")[0] for line in prompts.lines("gpt2")[2]]
    whole = (prompts_table["clean"] - prompts_table["corrupt"]).mean()
    assert tables["heads"]["patching_share"].tolist() == pytest.approx((expected / whole).tolist())
    assert "Which heads the answers need" in shown
    head: Any = max(tables["heads"].to_dict("records"), key=lambda row: row["patching"])
    (answer,) = [answer for answer in Study.open(out).answers() if answer.question == "Which heads the answers need"]
    assert answer.heads[:1] in ((f"decoder-self.{head['layer']}.{head['head']}",), ())
    assert Study.open(out).data == f"clean.txt, {prompts.COUNT} sentences"
    assert facts(Study.open(out))["answer"] == str(files["answer"])
    assert (
        command("plot", "attention", out, "--index", 1, "--heads", "decoder-self.0.*", "--out", tmp_path / "a.png")[0]
        == 0
    )
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert record["data"]["clean"] == str(files["clean"]) and record["data"]["in_corpus"] == prompts.COUNT
    assert "m:patching+attribution_patching+eap_ig|patched:noising" in record["signature"]

    texts = [list(part) for part in prompts.lines("gpt2")[:2]]
    answers: list[Any] = [tuple(line.split("\t")) if "\t" in line else line for line in prompts.lines("gpt2")[2]]
    study = hs.load(str(checkpoint), dtype="float64").analyze(
        clean=texts[0],
        corrupt=texts[1],
        answer=answers,
        only="prompts",
        bootstrap=19,
        eap_steps=2,
    )
    assert study.heads["eap_ig"].tolist() == pytest.approx(tables["heads"]["eap_ig"].tolist(), abs=1e-12)


@pytest.mark.slow
def test_importances_of_prompts_explain_the_answer(
    checkpoint: Path, files: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    """Ablation by zeros of the answer, against hooks; the context of a head on a prompt of zeros."""
    out = tmp_path / "run"
    arguments = ("analyze", checkpoint, *flags(files), "--out", out, "--dtype", "float64", "--only", "ablation", *FAST)
    assert command(*arguments)[0] == 0
    its = speakers.checkpoint("gpt2")
    drops = []
    for prompt in prompts.prompts("gpt2"):
        eager = Eager(its.model, "gpt2", prompt, dict(its.layout))
        with torch.no_grad():
            whole = eager.m(prompt.clean)
            with eager.reading({(Site.DECODER_SELF, 0): {1: torch.zeros(len(prompt.clean), 5).double()}}):
                drops.append(float(whole - eager.m(prompt.clean)))
    heads = pd.read_csv(out / "heads.csv")
    assert heads["ablation"][1] == pytest.approx(sum(drops) / len(drops), abs=1e-9)
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert "objective:answer.v1" in record["signature"]


def test_prompts_run_patching_beside_the_others_unless_something_else_is_wanted() -> None:
    group = {"patching", "attribution_patching", "eap_ig"}

    def names(prompts: bool, **options: Any) -> set[str]:
        return {cls.name for cls in chosen_analyses(AnalyzeOptions(**options), prompts=prompts)}

    assert group < names(True) and "entropy" in names(True) and not group & names(False)
    assert (
        names(True, only=("entropy",)) == {"entropy"}
        and names(True, only=("patching",)) == {"patching"}
        and "eap_ig" not in names(True, skip=("eap_ig",))
    )
    with pytest.raises(ConfigError, match="--direction"):
        names(False, analysis_options={"direction": "denoising"})
