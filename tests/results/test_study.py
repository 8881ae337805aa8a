"""Answers of a study and of a removal."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import beta

import headscope as hs
from headscope.cli.console import answer_lines
from headscope.config.declarations import measure_of
from headscope.evaluation.non_inferiority import OPEN, groups_needed, judge
from headscope.report.page.write import gather
from headscope.results.answer import interval_text, number_text
from headscope.results.overview import Overview
from headscope.results.removal import Removal
from headscope.results.study import Study
from headscope.results.study_answers import IMPORTANCES, main_importance
from headscope.results.study_tables import MissingTable, RunError
from tests.makers import decoders
from tests.makers.shared import Command

TEXT = ["A dog runs.", "Two men sit on the grass.", "We saw it there."]


@pytest.fixture(scope="module")
def study() -> Study:
    return hs.load(hs.assets.trained_model()).analyze(
        TEXT, target=["Ein Hund rennt.", "Zwei sitzen im Gras.", "Wir sahen es dort."], importance=True, bootstrap=19
    )


@pytest.mark.slow
def test_memory_folder_and_page_say_the_same(study: Study, tmp_path: Path) -> None:
    folder = study.save(tmp_path / "run", figures=False)
    copy = Study.open(folder)
    assert copy.answers() == study.answers() == gather([folder]).blocks[0].answers
    assert copy.record == json.loads(json.dumps(study.record)) and copy.labels == study.labels
    assert next(iter(copy.tables)) == "heads" and set(copy.tables) == set(study.tables)
    for name, table in study.tables.items():
        pd.testing.assert_frame_equal(copy.tables[name], table.fillna(copy.tables[name]), check_dtype=False)
    assert copy.arrays.keys() == study.arrays.keys()
    np.testing.assert_array_equal(copy.arrays["cross/1/cka"], study.arrays["cross/1/cka"])
    again = copy.save(tmp_path / "again", figures=False)
    assert (again / "heads.csv").read_bytes() == (folder / "heads.csv").read_bytes()


def test_the_headline_is_first_by_the_best_measure_that_compares_layers(study: Study) -> None:
    measure = main_importance(study)
    assert measure is not None and measure.name == next(name for name in IMPORTANCES if name in study.heads)
    assert not measure_of(measure.name).within_layer
    subject, short, need = study.answers()[:3]
    assert short.caution and short.sentence == "3 sentences cannot tell what a head does; 10 or more can"
    assert "What the heads seem to do (not tested)" in [answer.question for answer in study.answers()]
    assert "72 heads" in subject.sentence and need.question.startswith("Which heads the model needs")
    order = study.heads.sort_values(measure.name, ascending=False)
    first = order.iloc[0]
    assert need.heads[0] == f"{first['site']}.{first['layer']}.{first['head']}"


def test_answers_fit_a_screen(study: Study) -> None:
    lines = [line.plain for line in answer_lines(study.answers(), verbose=False, width=100)]
    assert len(lines) <= 25 and not any("no number" in line or "nan" in line for line in lines)
    assert len([line.plain for line in answer_lines(study.answers(), verbose=True, width=100)]) > len(lines)


@pytest.mark.slow
def test_of_one_sentence_no_column_is_empty() -> None:
    """One sentence has no intervals."""
    one = hs.load(hs.assets.trained_model()).analyze(
        ["A dog runs."], target=["Ein Hund rennt."], only="confidence,ablation"
    )
    tables = [answer.table for answer in one.answers() if answer.table is not None]
    assert tables and all(
        any(row[column] for row in table.rows) for table in tables for column in range(len(table.columns))
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


def test_a_screen_has_it(command: Command) -> None:
    status, screen, _ = command("show", hs.assets.trained_model())
    lines = screen.splitlines()
    assert status == 0 and len(lines) <= 40 and lines[0].startswith("en-de: 72 heads, Transformer")
    assert "attention is 39 % of the parameters: half of the heads save 20 % at most" in screen
    assert [shlex.split(line.partition(":  ")[2])[:2] for line in lines[-3:]] == [
        *(["headscope", "analyze"], ["headscope", "analyze"], ["headscope", "prune"])
    ]
    assert "accuracy" in screen and "needs" not in screen
    analyses = command("list", "analyses", hs.assets.trained_model())[1]
    assert "mean largest attention weight" in analyses and "Do not fit this checkpoint:" in analyses
    assert "Digest: sha256:" in command("show", hs.assets.trained_model(), "--verbose")[1]


def test_cache_and_attention_of_a_decoder_are_counted(tmp_path: Path) -> None:
    folder = decoders.save_decoder(tmp_path / "model", tokenizer=decoders.byte_level(), num_key_value_heads=2)
    model = hs.load(folder)
    record = model.overview().record
    site = record["sites"][0]
    size = sum(groups * width for groups, width in zip(site["groups"], site["width"], strict=True))
    assert record["cache"] == {"own": 4 * 2 * size, "cross": 0}
    sentences = [answer.sentence for answer in Overview(record).answers() if answer.question == "Key/value cache"]
    assert sentences == [f"{record['cache']['own']:,} bytes a token; half of the key/value heads save half of it"]


def test_what_is_peculiar_is_said() -> None:
    record = hs.load(hs.assets.trained_model()).overview().record
    record["sites"][0] |= {"numbers": [1, 3, 5], "windows": [{"tokens": 512, "layers": [1, 3]}], "shared": [[3, 5]]}
    record["mixing"] = [{"site": "cross", "mixing": "linear", "summary": "an alpha matrix", "layers": [0]}]
    facts = {answer.question: answer.sentence for answer in Overview(record).answers()}
    assert facts["Layers with attention"] == "encoder-self: 1 3 5" and facts["Sliding window"].endswith("layers 1 3")
    assert facts["Shared weights"].startswith("encoder-self: layers 3 5;") and facts["Mixing"].startswith(
        "linear: at cross"
    )


def small(verdict: dict[str, Any] | None = None, **more: Any) -> Removal:
    """A removal of two of eight heads from its record."""
    size = dict.fromkeys(("bytes", "flops", "cache", "attention_flops", "output_flops", "read"), 0)
    before = size | {"cross_cache": 0, "parameters": 1000, "attention_heads": 8, "attention_parameters": 400}
    quality = verdict and {
        **{"metric": "accuracy", "title": "accuracy", "text": "/home/me/test.txt", "sentences": 100, "margin": "1 %"},
        **{"before": {"value": 0.8}, "after": {"value": 0.75}, "loss": (0.5, 0.625), "why": "", "needed": 370},
        "verdict": {"worse": 0.05, "worse_limit": 0.125, "margin": 0.008, **verdict},
    }
    record = {
        **{"removed": ["cross.0.1", "cross.1.0"], "kept": {"cross": {"0": [0], "1": []}}, "merged": {}, "notes": []},
        **{"before": before, "after": before | {"parameters": 900, "attention_heads": 6}, "times": [], "engines": []},
        **{"quality": quality, "elsewhere": None, "layers": None, "compensation": None, "opens": [], "signature": ""},
        "output": {"format": "native", "export": "same", "file": "."},
        "source": {"path": "models/big", "format": "native", "digest": 64 * "0"},
        "verified": {"difference": 1e-7, "tolerance": 1e-5, "reloaded": 0.0, "sentences": 8, "cached": None}
        | {"searches": 0, "searched": 0},
    }
    return Removal(record | more, Path("small"))


def trial(*names: str) -> dict[str, Any]:
    """The record of a choice among candidates, of which the last was taken."""
    scores = {"value": 1.0, "damage": 0.1, "harm": 0.5}
    rows = [{"name": name, "held_out": scores, "check": scores} for name in ("none", *names)]
    return {"candidates": rows, "taken": rows[-1]["name"], "text": "x", "sentences": 3, "objective": "loss"}


@pytest.mark.parametrize(
    ("verdict", "phrase"),
    [
        ("non-inferior", "AS GOOD, within 1 %"),
        ("worse", "WORSE, by more than 1 %"),
        ("not established", "NOT SHOWN TO BE AS GOOD"),
        (None, "QUALITY NOT MEASURED"),
    ],
)
def test_the_verdict_is_the_first_line(verdict: str | None, phrase: str) -> None:
    first, second, *details = small(verdict and {"verdict": verdict}).answers()  # type: ignore[arg-type]
    assert first.sentence == f"small: 2 of 8 heads removed   {phrase}"
    assert first.caution == (verdict != "non-inferior") and not second.detail
    assert any("40 % of this model's parameters: 2 heads can save at most 10 %" in a.sentence for a in details)
    assert (second.table is not None and second.table.rows[0][-1] == "100 lines") == (verdict is not None)
    assert not any("/home/me" in a.sentence for a in details)
    assert any("cross.0: 1; cross.1: all" in a.sentence for a in details), "heads by layer are a detail"


@pytest.mark.parametrize(
    ("verdict", "refit", "advice"),
    [
        ("worse", {"feed_forward": False, "choice": None}, ["--feed-forward", "more heads"]),
        ("worse", {"feed_forward": False, "choice": trial("mean")}, ["--feed-forward"]),
        ("worse", {"feed_forward": False, "choice": trial("mean", "least-squares, feed-forward")}, ["with more heads"]),
        ("worse", {"feed_forward": True}, ["more heads"]),
        ("worse", None, ["more heads"]),
        (
            "not established",
            None,
            ["100 held-out lines cannot tell a loss of 0.008 in accuracy from none; about 370 could"],
        ),
        ("non-inferior", None, []),
    ],
)
def test_what_to_do_next_is_said_with_the_numbers(verdict: str, refit: Any, advice: list[str]) -> None:
    fixed: Any = {"method": "mean", "choice": None, "calibration": {"sentences": 9}}
    fixed["held_out"] = {"text": "", "sentences": 2}
    performance = {name: {"objective": "loss", "value": 1.0, "damage": 0.0} for name in ("intact", "removed")}
    compensation = refit and {**fixed, "performance": performance, **refit}
    sentence = small({"verdict": verdict}, compensation=compensation).answers()[1].sentence
    assert all(words in sentence for words in advice) and bool(sentence) == bool(advice)
    assert ("--feed-forward" in sentence) == ("--feed-forward" in advice)


@pytest.mark.parametrize("sentences", [64, 100, 250])
def test_lines_that_are_needed_where_nothing_differs_are_those_of_the_rule_of_three(sentences: int) -> None:
    """Clopper and Pearson's limit of no loss in n lines (SciPy's beta) is within the margin from so many on."""
    margin = 0.01
    exact = next(n for n in range(1, 10_000) if beta.ppf(0.95, 1, n) <= margin)
    judgement = judge([0.0] * (1 + sentences), margin=margin, largest=1.0, max_loss=1.0)  # type: ignore[arg-type]
    count = groups_needed(judgement, sentences)
    assert judgement.verdict == OPEN and count is not None and exact <= count + 5 and count <= 1.05 * exact


def without_loss(lines: int, seed: int, *, centred: bool = False) -> Any:
    """Losses of lines with a mean of 0: of all lines, and without each line [1 + lines]."""
    losses = np.random.default_rng(seed).normal(0, 0.2, lines)
    losses -= losses.mean() * centred
    return np.append(losses.mean(), (losses.sum() - losses) / (lines - 1))


@pytest.mark.slow
def test_lines_that_are_needed_are_enough_and_half_of_them_are_not() -> None:
    """A model without any loss is called as good on so many lines in about 80 % of the texts, on half in far fewer."""
    margin, lines = 0.02, 100
    judgement = judge(without_loss(lines, 1, centred=True), margin=margin, largest=-math.inf)
    lines_needed = groups_needed(judgement, lines)
    assert lines_needed is not None and lines_needed > 2 * lines

    def share(count: int) -> float:
        texts = (without_loss(count, seed) for seed in range(60))
        return sum(judge(losses, margin=margin, largest=-math.inf).verdict == "non-inferior" for losses in texts) / 60

    assert share(lines_needed) >= 0.65 > share(lines_needed // 2) + 0.05


def test_whole_layers_are_told_with_what_they_save() -> None:
    layers = {"layers": ("3", "7"), "parameters": 53, "flops": 0.125, "cache": 0.25, "quality": 71.25}
    layers["elsewhere"] = 49.5
    before = small().record["before"] | {"cache": 9}
    answers = small({"verdict": "worse"}, layers=layers, before=before).answers()
    sentences = [answer.sentence for answer in answers if "layers" in answer.question]
    assert sentences[0].startswith(
        "without layers 3, 7 (5.3 % of the parameters, 12.5 % of the FLOPs, 25.0 % of the cache), not refitted: "
        "accuracy 71.25"
    )
