"""A study is the same in memory, from its folder and on the page; what comes first answers the question."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import headscope as hs
from headscope.cli.console import answer_lines
from headscope.config.declarations import measure_of
from headscope.report.page.write import gather
from headscope.results.answer import interval_text, number_text
from headscope.results.overview import Overview
from headscope.results.study import Study
from headscope.results.study_answers import MEASURED, main_importance
from headscope.results.study_tables import MissingTable, RunError
from tests.makers import decoders

TEXT = ["A dog runs.", "Two men sit on the grass.", "We saw it there."]


@pytest.fixture(scope="module")
def study() -> Study:
    return hs.load(hs.assets.trained_model()).analyze(
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
    subject, short, needed = study.answers()[:3]
    assert short.caution and short.sentence == "3 sentences cannot tell what a head does; 10 or more can"
    assert "What the heads seem to do (not tested)" in [answer.question for answer in study.answers()]
    assert "72 heads" in subject.sentence and needed.question.startswith("Which heads the model needs")
    order = study.heads.sort_values(measure.name, ascending=False)
    first = order.iloc[0]
    assert needed.heads[0] == f"{first['site']}.{first['layer']}.{first['head']}"


def test_answers_fit_a_screen(study: Study) -> None:
    lines = [line.plain for line in answer_lines(study.answers(), verbose=False, width=100)]
    assert len(lines) <= 25 and not any("no number" in line or "nan" in line for line in lines)
    assert len([line.plain for line in answer_lines(study.answers(), verbose=True, width=100)]) > len(lines)


@pytest.mark.slow
def test_of_one_sentence_no_column_is_empty() -> None:
    """Which has no intervals."""
    one = hs.load(hs.assets.trained_model()).analyze(
        ["A dog runs."], target=["Ein Hund rennt."], only="confidence,ablation"
    )
    tables = [answer.table for answer in one.answers() if answer.table is not None]
    assert tables and all(
        any(row[place] for row in table.rows) for table in tables for place in range(len(table.columns))
    )
    assert tables[0].columns[1:] == ("loss rises by (nats) if off", "what it does")


def test_tables_that_are_missing_say_what_measures_them(study: Study, tmp_path: Path) -> None:
    with pytest.raises(MissingTable, match=r"no syntactic\.csv.*needs"):
        study.table("syntactic")
    with pytest.raises(MissingTable, match=r"no faithfulness\.csv; analyze with --faithfulness"):
        study.table("faithfulness")
    with pytest.raises(RunError, match=r"no run\.json; name what `headscope analyze"):
        Study.open(tmp_path)
    folder = study.save(tmp_path / "run", figures=False)
    (folder / "positional.csv").write_text("site,layer\n")
    with pytest.raises(RunError, match=r"positional\.csv of run run has no column offset"):
        Study.open(folder).table("positional", "offset")
    (folder / "heads.csv").write_text("site\n")
    with pytest.raises(RunError, match=r"heads\.csv.*no column layer"):
        Study.open(folder).heads  # noqa: B018


def test_data_are_named_by_their_files() -> None:
    pairs = {"source": "a.en", "source2": "b.en", "sentences": 40}
    assert Study({}, {"data": pairs}).data == "a.en and b.en, 40 pairs"


def test_numbers_are_rounded_once() -> None:
    assert [number_text(value) for value in (0.180502, -0.00012, 1234.4, 0.0, float("nan"))] == [
        *("0.181", "−0.00012", "1,234", "0", "not measured")
    ]
    assert interval_text(0.1, 0.25) == "0.1 to 0.25" and interval_text(1, 1) == "" == interval_text(float("nan"), 1)


# What `show` says of a checkpoint fits a screen, most asked first, and `--verbose` has the rest.


Command = Callable[..., tuple[int, str, str]]


def test_a_screen_has_it(command: Command) -> None:
    status, shown, _ = command("show", hs.assets.trained_model())
    lines = shown.splitlines()
    assert status == 0 and len(lines) <= 40 and lines[0].startswith("en-de: 72 heads, Transformer")
    assert "attention is 39 % of the parameters: half of the heads save 20 % at most" in shown
    assert [shlex.split(line.partition(":  ")[2])[:2] for line in lines[-3:]] == [
        *(["headscope", "analyze"], ["headscope", "analyze"], ["headscope", "prune"])
    ]
    assert "accuracy" in shown and "needs" not in shown
    listed = command("list", "analyses", hs.assets.trained_model())[1]
    assert "mean largest attention weight" in listed and "Do not fit this checkpoint:" in listed
    assert "Digest: sha256:" in command("show", hs.assets.trained_model(), "--verbose")[1]


def test_cache_and_attention_of_a_decoder_are_counted(tmp_path: Path) -> None:
    folder = decoders.saved(tmp_path / "model", tokenizer=decoders.byte_level(), num_key_value_heads=2)
    model = hs.load(folder)
    record = model.overview().record
    site = record["sites"][0]
    own = sum(groups * width for groups, width in zip(site["groups"], site["width"], strict=True))
    assert record["cache"] == {"own": 4 * 2 * own, "cross": 0}
    sentences = [answer.sentence for answer in Overview(record).answers() if answer.question == "Key/value cache"]
    assert sentences == [f"{record['cache']['own']:,} bytes a token; half of the key/value heads save half of it"]


def test_what_is_peculiar_is_said() -> None:
    record = hs.load(hs.assets.trained_model()).overview().record
    record["sites"][0] |= {"numbers": [1, 3, 5], "windows": [{"tokens": 512, "layers": [1, 3]}], "shared": [[3, 5]]}
    record["mixing"] = [{"site": "cross", "mixing": "linear", "summary": "an alpha matrix", "layers": [0]}]
    said = {answer.question: answer.sentence for answer in Overview(record).answers()}
    assert said["Layers with attention"] == "encoder-self: 1 3 5" and said["Sliding window"].endswith("layers 1 3")
    assert said["Shared weights"].startswith("encoder-self: layers 3 5;") and said["Mixing"].startswith(
        "linear: at cross"
    )
