"""Signals while `analyze` is past its common pass: what is finished is kept as it would be, the rest is named."""

import importlib
import json
import random
import shlex
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from headscope.progress import report_to
from tests.faults.conftest import Command, one_line
from tests.makers.runs import make_run

# Where it comes, at which call, and what has not all its numbers then.
STAGES = {
    "ablation of the second batch": ("analyses.ablation.ablation", 2, {"shapley", "faithfulness"}),
    "shapley": ("analyses.ablation.shapley", 1, {"shapley", "faithfulness"}),
    "descriptions": ("analyses.explained.explain_shares", 1, {"explained", "faithfulness"}),
    "shuffled weights": ("engine.faithfulness.comparison.analyze", 1, {"faithfulness"}),
    "figures": ("report.registry.draw_standard", 1, {"figures"}),
}
MEASURES = {"confidence", "ablation", "shapley", "explained"}
OPTIONS = shlex.split(
    "--only confidence,ablation,shapley,explained --faithfulness --set faithfulness-steps=2 --set faithfulness-seeds=1 "
    "--set explained.explained-steps=2 --set shapley.shapley-samples=2 --bootstrap 20 --batch-tokens 40 "
    "--max-sentences 5"
)


def analyze(headscope: Command, inputs: Path, out: Path, *more: str) -> tuple[int, str, dict[str, Any], pd.DataFrame]:
    text = ["--source", str(inputs / "source"), "--target", str(inputs / "target")]
    status, err = headscope(["analyze", str(inputs / "model"), *text, *OPTIONS, *more, "--out", str(out)])
    return status, err, json.loads((out / "run.json").read_text(encoding="utf-8")), pd.read_csv(out / "heads.csv")


@pytest.fixture(scope="module")
def table(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    from headscope.config.analyze import AnalyzeConfig
    from headscope.engine.study import run_analysis

    out = tmp_path_factory.mktemp("table") / "run"
    sampling = {"shapley_samples": 2, "explained_steps": 2}
    options: Any = {"bootstrap": 20, "batch_tokens": 40, "max_sentences": 5, "analysis_options": sampling}
    files: Any = {"source": inputs / "source", "target": inputs / "target", "checkpoint": str(inputs / "model")}
    reports: dict[str, list[tuple[int, int]]] = {}
    progress = report_to(lambda title, step, total: reports.setdefault(title, []).append((step, total)))
    config = AnalyzeConfig(**files, out=out, only=tuple(MEASURES), figures=False, **options)
    run_analysis(config, progress=progress)
    # Every stage is shown, to its end; a batch that takes long step by step.
    sites = [f"describing heads of {site}" for site in ("encoder-self", "decoder-self", "cross")]
    assert sorted(reports) == sorted(["analysing", "ablation", "shapley", *sites])
    assert all(steps[-1][0] == steps[-1][1] for steps in reports.values())
    assert len(reports["shapley"]) > len(reports["ablation"]) > 16 >= len(reports["analysing"])
    return pd.read_csv(out / "heads.csv")


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_finished_is_kept_and_what_is_not_is_named(
    stage: str, headscope: Command, inputs: Path, tmp_path: Path, table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, call, lacking = STAGES[stage]
    module, _, name = f"headscope.{target}".rpartition(".")
    owner = importlib.import_module(module)
    real, calls = getattr(owner, name), [0]

    def interrupt(*arguments: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **kwargs)

    monkeypatch.setattr(owner, name, interrupt)
    monkeypatch.setattr("headscope.progress.INTERVAL", 1e9)  # no line of it, however slow the machine is
    status, err, record, heads = analyze(
        headscope, inputs, tmp_path / "run", *([] if stage == "figures" else ["--no-figures"])
    )
    assert (status, record["complete"], record["data"]["sentences"]) == (130, False, 5), err
    assert {entry["analysis"] for entry in record["left_out"] if entry["why"].startswith("was interrupted")} == lacking
    assert err.startswith("interrupted: ") and err.count("\n") == 1 and all(name in err for name in lacking)
    files = {path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*.*")}
    assert files == {*record["files"]}
    assert MEASURES - set(heads) == MEASURES & lacking
    part = {"ablation"} if "second" in stage else set()
    assert [line.split()[0] for line in record["remarks"] if " was interrupted after " in line] == [*part]
    for measure in MEASURES - lacking - part:
        pd.testing.assert_series_equal(heads[measure], table[measure])


# Damaged files of runs: figures and pages of them are drawn, or refused in one line; nothing ends in a traceback.


LAYOUT = {"encoder-self": [2, 3], "cross": [2]}
WORDS = ("", "abc", "nan", "inf", "-1", "1.5", "1e308", "9" * 20, "True", "[1]", "\x1b[31m")
FIGURES = {"heads.csv": "heads", "positional.csv": "positional"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small run of `analyze`."""
    return make_run(tmp_path / "run", LAYOUT)


def damage(text: str, chance: random.Random) -> str:
    """The text of a table with one fault."""
    rows = [line.split(",") for line in text.splitlines()]
    row, column = chance.randrange(1, len(rows)), chance.randrange(len(rows[0]))
    kind = chance.randrange(7)
    if kind < 3:
        rows[row][column] = chance.choice(WORDS)
    elif kind == 3:
        word = chance.choice(WORDS)
        rows[1:] = [[*cells[:column], word, *cells[column + 1 :]] for cells in rows[1:]]
    elif kind == 4:
        rows = [cells[:column] + cells[column + 1 :] for cells in rows]
    elif kind == 5:
        rows.insert(row, rows[row])
    result = "".join(",".join(cells) + "\n" for cells in rows)
    return result[: chance.randrange(len(result))] if kind == 6 else result


@pytest.mark.filterwarnings("ignore:You are merging on int and float columns")
@pytest.mark.parametrize("name", FIGURES)
def test_a_damaged_table_is_drawn_or_refused_in_one_line(name: str, run: Path, headscope: Command) -> None:
    chance, text = random.Random(name), (run / name).read_text(encoding="utf-8")
    for number in range(4):
        (run / name).write_text(damage(text, chance), encoding="utf-8")
        figure = ["report"] if number % 2 else [FIGURES[name], "--dpi", "30"]
        out = run.parent / ("page.html" if number % 2 else "figure.png")
        status, err = headscope(["plot", *figure, str(run), "--out", str(out), "--force"])
        assert status == 0 or (status == 2 and one_line(err)), (number, err)


def test_a_table_that_is_cut_off_is_refused(run: Path, headscope: Command) -> None:
    command = ["plot", "positional", str(run), "--out", str(run.parent / "p.png")]
    path = run / "positional.csv"
    text = path.read_text(encoding="utf-8")
    for end in (1, 2, 5, 9, 40):
        path.write_text(text[:-end], encoding="utf-8")
        status, err = headscope(command)
        assert (status, one_line(err)) == (2, True) and "positional.csv is cut off" in err, err
