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
    given = ("--out", out, "--only", names, "--bootstrap", 50, "--no-figures", "--device", "cpu")
    shown = succeed(command, "analyze", hs.assets.trained_model(), *text, *given)
    subject, heading, first, *rest = shown.splitlines()
    assert "72 heads" in subject and heading.startswith("Which heads the model needs ")
    table, pairs = (pd.read_csv(out / f"{name}.csv") for name in ("importance", "importance_agreement"))
    assert len(table) == 72 * 3 and len(pairs) == 3  # magnitude has two columns
    tested = table[table.measure == "ablation"].sort_values("rank")
    best = tested.iloc[0]
    assert first.split()[0] == f"{best.site}.{best.layer}.{best['head']}"
    zero = int((tested.p_adjusted > 0.05).sum())
    assert any(line.strip().startswith(f"{zero} of 72 heads cannot be told from zero") for line in rest)
    assert evidence.bh_rejections(tested.p.tolist(), 0.05) == {n for n, p in enumerate(tested.p_adjusted) if p <= 0.05}
    assert table[table.measure != "ablation"].p.isna().all()
    need = pd.read_csv(out / "importance_functions.csv")
    assert set(need.measure) == set(table.measure) and set(need.name) == {"sink", "no label"}
    figure = rest[-1]
    assert figure.startswith("Figure for a paper:  headscope plot heads ") and "--measure ablation" in figure
    assert not any(line.startswith("Smaller model:") for line in rest), "so few lines can tell nothing"
    words = shlex.split(figure.partition(":  headscope ")[2])
    assert command(*words)[0] == 0
    alone = ("--out", tmp_path / "one", "--only", "ablation", "--max-sentences", 1, *given[4:])
    status, shown, _ = command("analyze", hs.assets.trained_model(), *text, *alone)
    assert status == 0 and "1 sentence" in shown and "told from zero" not in shown, "of one nothing is tested"


def test_each_head_names_differences(command: Command, text: Text) -> None:
    metrics = ("--metrics", "perplexity,accuracy")
    given = ("--each-head", "--heads", "cross.0.*", *metrics, "--device", "cpu", "--bootstrap", 50)
    status, shown, _ = command("evaluate", hs.assets.trained_model(), *text, *given)
    assert status == 0 and "±" not in shown
    assert "Δ loss (nats)" in shown and "Δ accuracy" in shown
    first, heading, none, most, *rest = shown.splitlines()
    name = most.split()[0]
    assert re.match(
        rf"(no head is shown to matter; the most )?{name}.*: Δ loss \(nats\) [+−]0\.\d{{4}} \(95 %: ", first
    )
    assert first.endswith("; 8 heads off one by one, on 13 sentences")
    assert heading.startswith("Heads, the most needed first")
    assert none.split()[0] == "none" and name.startswith("cross.0.")
    assert any("contains 0 for" in line and "of 8 heads" in line for line in rest)


def test_evaluate_begins_with_its_first_score_and_says_each_once(command: Command, text: Text) -> None:
    given = ["--metrics", "perplexity,accuracy", "--mask", "cross.0.1", "--device", "cpu", "--bootstrap", "50"]
    _, shown, _ = command("evaluate", hs.assets.trained_model(), *text, *given)
    first, heading, score, *rest = shown.splitlines()
    number = r"[\d.]+"
    found = re.fullmatch(rf"perplexity {number} \(95 %: {number}–{number}\) with 1 head off \((.+)\) on (.+)", first)
    assert found and found.groups() == ("cross.0.1", "13 sentences")
    assert heading.startswith("Other scores") and score.split()[:2] == ["token", "accuracy"] and rest == []


@pytest.mark.parametrize("options", [fairseq.BASE, fairseq.LM], ids=["two sides", "language model"])
def test_show_describes_a_checkpoint_whose_dictionaries_are_elsewhere(
    options: dict[str, Any], command: Command, tmp_path: Path
) -> None:
    tied = options | fairseq_layouts.TIED
    status, shown, error = command("show", fairseq.write(tmp_path / "model.pt", tied, fairseq.state(tied)))
    assert (status, error) == (0, "") and "Text: no tokenizer" in shown
    assert "What each head does:  headscope analyze " in shown and shown.rstrip().endswith(" --dicts DIR")


def test_json_is_the_record_and_the_answers(command: Command, tmp_path: Path) -> None:
    NATIVE.save(checkpoints.small(), tmp_path / "plain")
    shown = json.loads(command("show", tmp_path / "plain", "--json")[1])
    out = tmp_path / "out"
    converted = json.loads(command("convert", tmp_path / "plain", out, "--to", "native", "--json")[1])
    assert (set(shown), set(converted)) == ({"record", "answers"}, {"out", "record", "answers"})
    assert converted["answers"][0]["sentence"].startswith("out: ") and converted["out"] == str(out)
    written = json.loads((out / "conversion.json").read_text())
    assert converted["record"] == {name: written[name] for name in written if name not in ("kind", "files")}


def test_show_says_that_heads_are_mixed(command: Command, tmp_path: Path) -> None:
    NATIVE.save(checkpoints.small(self_mixing="alpha.v1", cross_mixing="alpha.v1"), tmp_path / "mixed")
    NATIVE.save(checkpoints.small(), tmp_path / "plain")
    mixing = json.loads(command("show", tmp_path / "mixed", "--json")[1])["record"]["mixing"]
    assert {place["mixing"] for place in mixing} == {"alpha.v1"}
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
    made: list[Any] = []

    def noted(given: Any, **_: Any) -> Any:
        made.append(given)
        return SimpleNamespace(folder=None)

    monkeypatch.setattr("headscope.engine.study.run_analysis", noted)
    (tmp_path / "text").write_text("A dog.\n", encoding="utf-8")
    end = ["model", "--source", "text", "--out", "run"]
    assert run_cli(["analyze", *words.split(), *end]).orderly and run_cli(["analyze", *end, *words.split()]).orderly
    for given in made:
        found = {cls.name for cls in chosen_analyses(given) if cls.group == "importance"}
        assert found == expected
    assert len(made) == 2


def test_columns_stand_closer_before_a_row_is_cut() -> None:
    row = ("cosine", 30 * "1", 30 * "2", 20 * "x")
    table = AnswerTable(("", "before", "after", "on"), (row,))
    lines = {width: next(table_lines(table, width)) for width in (98, 95, 94)}
    assert {width: len(line) for width, line in lines.items()} == {98: 98, 95: 95, 94: 94}
    assert lines[95].endswith(20 * "x") and lines[94] == lines[95][:93] + "…"
