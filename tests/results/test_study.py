"""A study is the same in memory, from its folder and on the page; what comes first answers the question."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import headscope as hs
from headscope.cli.answers import answer_lines
from headscope.config.declarations import measure_of
from headscope.report.page.write import gather
from headscope.results.answer import interval_text, number_text
from headscope.results.roles import role_of
from headscope.results.study import Study
from headscope.results.study_answers import MEASURED, main_importance
from headscope.results.study_tables import MissingTable, RunError

TEXT = ["A dog runs.", "Two men sit on the grass.", "We saw it there."]


@pytest.fixture(scope="module")
def study() -> Study:
    return hs.load(hs.assets.trained()).analyze(
        TEXT, target=["Ein Hund rennt.", "Zwei sitzen im Gras.", "Wir sahen es dort."], importance=True, bootstrap=19
    )


@pytest.mark.slow
def test_memory_folder_and_page_say_the_same(study: Study, tmp_path: Path) -> None:
    folder = study.save(tmp_path / "run", figures=False)
    opened = Study.open(folder)
    assert opened.answers() == study.answers() == gather([folder]).blocks[0].answers
    assert opened.record == json.loads(json.dumps(study.record)) and opened.labels == study.labels
    assert next(iter(opened.tables)) == "heads" and set(opened.tables) == set(study.tables)
    for name, table in study.tables.items():
        pd.testing.assert_frame_equal(opened.tables[name], table.fillna(opened.tables[name]), check_dtype=False)
    assert opened.arrays.keys() == study.arrays.keys()
    np.testing.assert_array_equal(opened.arrays["cross/1/cka"], study.arrays["cross/1/cka"])
    again = opened.save(tmp_path / "again", figures=False)
    assert (again / "heads.csv").read_bytes() == (folder / "heads.csv").read_bytes()


def test_the_headline_is_first_by_the_best_measure_that_compares_layers(study: Study) -> None:
    measure = main_importance(study)
    assert measure is not None and measure.name == next(name for name in MEASURED if name in study.heads)
    assert not measure_of(measure.name).within_layer
    subject, needed = study.answers()[:2]
    assert "72 heads" in subject.sentence and needed.question.startswith("Which heads the model needs")
    order = study.heads.sort_values(measure.name, ascending=False)
    first = order.iloc[0]
    assert needed.heads[0] == f"{first['site']}.{first['layer']}.{first['head']}"


def test_answers_fit_a_screen(study: Study) -> None:
    lines = [line.plain for line in answer_lines(study.answers(), verbose=False, width=100)]
    assert len(lines) <= 25 and not any("no number" in line or "nan" in line for line in lines)
    assert len([line.plain for line in answer_lines(study.answers(), verbose=True, width=100)]) > len(lines)


def test_tables_that_are_missing_say_what_measures_them(study: Study, tmp_path: Path) -> None:
    with pytest.raises(MissingTable, match=r"no syntactic\.csv.*needs"):
        study.table("syntactic")
    with pytest.raises(MissingTable, match=r"no faithfulness\.csv; analyze with --faithfulness"):
        study.table("faithfulness")
    with pytest.raises(RunError, match=r"no run\.json; make one with `headscope analyze"):
        Study.open(tmp_path)
    folder = study.save(tmp_path / "run", figures=False)
    (folder / "positional.csv").write_text("site,layer\n")
    with pytest.raises(RunError, match=r"positional\.csv of run run has no column offset"):
        Study.open(folder).table("positional", "offset")
    (folder / "heads.csv").write_text("site\n")
    with pytest.raises(RunError, match=r"heads\.csv.*no column layer"):
        Study.open(folder).heads  # noqa: B018


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ("positional:-1", "previous token"),
        ("previous", "previous token"),
        ("positional:+1", "next token"),
        ("positional:+0", "the token itself"),
        ("positional:+3", "3 tokens ahead"),
        ("positional:-2", "2 tokens back"),
        ("syntactic:nsubj>", "head → dependent (nsubj)"),
        ("syntactic:det<", "dependent → head (det)"),
        ("looks:same-token", "looks at same token"),
        ("facilitating", "the model needs it for this text"),
        ("somebody_elses:x", "somebody elses (x)"),
    ],
)
def test_roles_in_words(label: str, role: str) -> None:
    assert role_of(label) == role


def test_numbers_are_rounded_once() -> None:
    assert [number_text(value) for value in (0.180502, -0.00012, 1234.4, 0.0, float("nan"))] == [
        *("0.181", "−0.00012", "1,234", "0", "not measured"),
    ]
    assert interval_text(0.1, 0.25) == "0.1 to 0.25" and interval_text(1, 1) == "" == interval_text(float("nan"), 1)
