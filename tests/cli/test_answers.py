"""Commands end with what was asked, where it is, and a command that could come next, which runs as it stands."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

import headscope as hs
from headscope.cli.console import table_lines
from headscope.engine.plan import chosen_analyses
from headscope.formats.native import NATIVE
from headscope.results.answer import AnswerTable
from tests.makers import fairseq_layouts
from tests.makers.shared import Command, succeed
from tests.oracles import checkpoints, evidence, fairseq
from tests.oracles.commands import run_cli

Text = tuple[object, ...]


@pytest.fixture
def text(caption_files: tuple[Path, Path]) -> Text:
    """Captions and their translations, as options."""
    return "--source", caption_files[0], "--target", caption_files[1]


@pytest.mark.slow
def test_importance_says_which_heads_are_needed(command: Command, text: Text, tmp_path: Path) -> None:
    out = tmp_path / "run"
    names = "ablation,magnitude,sink"
    options = ("--out", out, "--only", names, "--bootstrap", 50, "--no-figures", "--device", "cpu")
    output = succeed(command, "analyze", hs.assets.trained_model(), *text, *options)
    subject, heading, first, *lines = output.splitlines()
    assert "72 heads" in subject and heading.startswith("Which heads the model needs ")
    table, pairs = (pd.read_csv(out / f"{name}.csv") for name in ("importance", "importance_agreement"))
    assert len(table) == 72 * 3 and len(pairs) == 3  # magnitude has two columns
    rows = table[table.measure == "ablation"].sort_values("rank")
    best = rows.iloc[0]
    assert first.split()[0] == f"{best.site}.{best.layer}.{best['head']}"
    zero = int((rows.p_adjusted > 0.05).sum())
    assert any(line.strip().startswith(f"{zero} of 72 heads cannot be told from zero") for line in lines)
    assert evidence.bh_rejections(rows.p.tolist(), 0.05) == {n for n, p in enumerate(rows.p_adjusted) if p <= 0.05}
    assert table[table.measure != "ablation"].p.isna().all()
    need = pd.read_csv(out / "importance_functions.csv")
    assert set(need.measure) == set(table.measure) and set(need.name) == {"sink", "no label"}
    figure = lines[-1]
    assert figure.startswith("Figure for a paper:  headscope plot heads ") and "--measure ablation" in figure
    assert not any(line.startswith("Smaller model:") for line in lines), "so few lines can tell nothing"
    words = shlex.split(figure.partition(":  headscope ")[2])
    assert command(*words)[0] == 0
    single = ("--out", tmp_path / "one", "--only", "ablation", "--max-sentences", 1, *options[4:])
    status, output, _ = command("analyze", hs.assets.trained_model(), *text, *single)
    assert status == 0 and "1 sentence" in output and "told from zero" not in output, "of one nothing is tested"


def test_each_head_names_differences(command: Command, text: Text) -> None:
    metrics = ("--metrics", "perplexity,accuracy")
    options = ("--each-head", "--heads", "cross.0.*", *metrics, "--device", "cpu", "--bootstrap", 50)
    status, output, _ = command("evaluate", hs.assets.trained_model(), *text, *options)
    assert status == 0 and "±" not in output
    assert "Δ loss (nats)" in output and "Δ accuracy" in output
    first, heading, intact, top, *lines = output.splitlines()
    name = top.split()[0]
    assert re.match(
        rf"(no head is shown to matter; the most )?{name}.*: Δ loss \(nats\) [+−]0\.\d{{4}} \(95 %: ", first
    )
    assert first.endswith("; 8 heads off one by one, on 13 sentences")
    assert heading.startswith("Heads, the most needed first")
    assert intact.split()[0] == "none" and name.startswith("cross.0.")
    assert any("contains 0 for" in line and "of 8 heads" in line for line in lines)


def test_evaluate_begins_with_its_first_score_and_says_each_once(command: Command, text: Text) -> None:
    options = ["--metrics", "perplexity,accuracy", "--mask", "cross.0.1", "--device", "cpu", "--bootstrap", "50"]
    _, output, _ = command("evaluate", hs.assets.trained_model(), *text, *options)
    first, heading, score, *lines = output.splitlines()
    number = r"[\d.]+"
    match = re.fullmatch(rf"perplexity {number} \(95 %: {number}–{number}\) with 1 head off \((.+)\) on (.+)", first)
    assert match and match.groups() == ("cross.0.1", "13 sentences")
    assert heading.startswith("Other scores") and score.split()[:2] == ["token", "accuracy"] and lines == []


@pytest.mark.parametrize("options", [fairseq.BASE, fairseq.LM], ids=["two sides", "language model"])
def test_show_describes_a_checkpoint_whose_dictionaries_are_elsewhere(
    options: dict[str, Any], command: Command, tmp_path: Path
) -> None:
    tied = options | fairseq_layouts.TIED
    status, output, error = command("show", fairseq.write(tmp_path / "model.pt", tied, fairseq.state(tied)))
    assert (status, error) == (0, "") and "Text: no tokenizer" in output
    assert "What each head does:  headscope analyze " in output and output.rstrip().endswith(" --dicts DIR")


def test_json_is_the_record_and_the_answers(command: Command, tmp_path: Path) -> None:
    NATIVE.save(checkpoints.small(), tmp_path / "plain")
    overview = json.loads(command("show", tmp_path / "plain", "--json")[1])
    out = tmp_path / "out"
    conversion = json.loads(command("convert", tmp_path / "plain", out, "--to", "native", "--json")[1])
    assert (set(overview), set(conversion)) == ({"record", "answers"}, {"out", "record", "answers"})
    assert conversion["answers"][0]["sentence"].startswith("out: ") and conversion["out"] == str(out)
    file = json.loads((out / "conversion.json").read_text())
    assert conversion["record"] == {name: file[name] for name in file if name not in ("kind", "files")}


def test_show_says_that_heads_are_mixed(command: Command, tmp_path: Path) -> None:
    NATIVE.save(checkpoints.small(self_mixing="alpha.v1", cross_mixing="alpha.v1"), tmp_path / "mixed")
    NATIVE.save(checkpoints.small(), tmp_path / "plain")
    mixing = json.loads(command("show", tmp_path / "mixed", "--json")[1])["record"]["mixing"]
    assert {entry["mixing"] for entry in mixing} == {"alpha.v1"}
    lines = command("show", tmp_path / "mixed")[1].splitlines()
    assert any(line.startswith("Mixing: alpha.v1: at ") and "a matrix that mixes" in line for line in lines)
    lines = command("show", tmp_path / "plain")[1].splitlines()
    assert not any(line.startswith("Mixing") for line in lines)


# `headscope analyze` with importances: options, what they refuse, files, and a model that is left as it was.


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
    configs: list[Any] = []

    def record(config: Any, **_: Any) -> Any:
        configs.append(config)
        return SimpleNamespace(folder=None)

    monkeypatch.setattr("headscope.engine.study.run_analysis", record)
    (tmp_path / "text").write_text("A dog.\n", encoding="utf-8")
    end = ["model", "--source", "text", "--out", "run"]
    assert run_cli(["analyze", *words.split(), *end]).orderly and run_cli(["analyze", *end, *words.split()]).orderly
    for config in configs:
        names = {cls.name for cls in chosen_analyses(config) if cls.group == "importance"}
        assert names == expected
    assert len(configs) == 2


def test_columns_stand_closer_before_a_row_is_cut() -> None:
    row = ("cosine", 30 * "1", 30 * "2", 20 * "x")
    table = AnswerTable(("", "before", "after", "on"), (row,))
    lines = {width: next(table_lines(table, width)) for width in (98, 95, 94)}
    assert {width: len(line) for width, line in lines.items()} == {98: 98, 95: 95, 94: 94}
    assert lines[95].endswith(20 * "x") and lines[94] == lines[95][:93] + "…"
