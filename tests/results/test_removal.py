"""What a removal says of itself: the verdict first, in memory as from the folder, and what would tell more."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta

from headscope.evaluation.non_inferiority import OPEN, groups_needed, judge
from headscope.results.removal import Removal


def small(verdict: dict[str, Any] | None = None, **more: Any) -> Removal:
    """A removal of two of eight heads, as its record has it."""
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


def tried(*names: str) -> dict[str, Any]:
    """The record of a choice, the last of which was taken."""
    measured = {"value": 1.0, "damage": 0.1, "harm": 0.5}
    rows = [{"name": name, "held_out": measured, "check": measured} for name in ("none", *names)]
    return {"candidates": rows, "taken": rows[-1]["name"], "text": "x", "sentences": 3, "objective": "loss"}


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("non-inferior", "AS GOOD, within 1 %"),
        ("worse", "WORSE, by more than 1 %"),
        ("not established", "NOT SHOWN TO BE AS GOOD"),
        (None, "QUALITY NOT MEASURED"),
    ],
)
def test_the_verdict_is_the_first_line(verdict: str | None, said: str) -> None:
    first, second, *rest = small(verdict and {"verdict": verdict}).answers()  # type: ignore[arg-type]
    assert first.sentence == f"small: 2 of 8 heads removed   {said}"
    assert first.caution == (verdict != "non-inferior") and not second.detail
    assert any("40 % of this model's parameters: 2 heads can save at most 10 %" in each.sentence for each in rest)
    assert (second.table is not None and second.table.rows[0][-1] == "100 lines") == (verdict is not None)
    assert not any("/home/me" in each.sentence for each in rest)
    assert any("cross.0: 1; cross.1: all" in each.sentence for each in rest), "heads by layer are a detail"


@pytest.mark.parametrize(
    ("verdict", "refit", "advised"),
    [
        ("worse", {"feed_forward": False, "choice": None}, ["--feed-forward", "more heads"]),
        ("worse", {"feed_forward": False, "choice": tried("mean")}, ["--feed-forward"]),
        ("worse", {"feed_forward": False, "choice": tried("mean", "least-squares, feed-forward")}, ["with more heads"]),
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
def test_what_to_do_next_is_said_with_the_numbers(verdict: str, refit: Any, advised: list[str]) -> None:
    fixed = {
        "method": "mean",
        "choice": None,
        "calibration": {"sentences": 9},
        "held_out": {"text": "", "sentences": 2},
    }
    performance = {name: {"objective": "loss", "value": 1.0, "damage": 0.0} for name in ("intact", "removed")}
    compensation = refit and {**fixed, "performance": performance, **refit}
    said = small({"verdict": verdict}, compensation=compensation).answers()[1].sentence
    assert all(words in said for words in advised) and bool(said) == bool(advised)
    assert ("--feed-forward" in said) == ("--feed-forward" in advised)


@pytest.mark.parametrize("sentences", [64, 100, 250])
def test_lines_that_are_needed_where_nothing_differs_are_those_of_the_rule_of_three(sentences: int) -> None:
    """Clopper and Pearson's limit of no loss in n lines (SciPy's beta) is within the margin from so many on."""
    margin = 0.01
    exact = next(n for n in range(1, 10_000) if beta.ppf(0.95, 1, n) <= margin)
    found = judge([0.0] * (1 + sentences), margin=margin, largest=1.0, max_loss=1.0)  # type: ignore[arg-type]
    needed = groups_needed(found, sentences)
    assert found.verdict == OPEN and needed is not None and exact <= needed + 5 and needed <= 1.05 * exact


def without_loss(lines: int, seed: int, *, centred: bool = False) -> Any:
    """Losses of lines that are 0 in the mean: of all of them, and without each [1 + lines]."""
    losses = np.random.default_rng(seed).normal(0, 0.2, lines)
    losses -= losses.mean() * centred
    return np.append(losses.mean(), (losses.sum() - losses) / (lines - 1))


@pytest.mark.slow
def test_lines_that_are_needed_are_enough_and_half_of_them_are_not() -> None:
    """A model without any loss is called as good on so many lines in about 80 % of the texts, on half in far fewer."""
    margin, lines = 0.02, 100
    found = judge(without_loss(lines, 1, centred=True), margin=margin, largest=-math.inf)
    needed = groups_needed(found, lines)
    assert needed is not None and needed > 2 * lines

    def share(count: int) -> float:
        texts = (without_loss(count, seed) for seed in range(60))
        return sum(judge(each, margin=margin, largest=-math.inf).verdict == "non-inferior" for each in texts) / 60

    assert share(needed) >= 0.65 > share(needed // 2) + 0.05


def test_whole_layers_are_told_with_what_they_save() -> None:
    layers = {
        "layers": ("3", "7"),
        "parameters": 53,
        "flops": 0.125,
        "cache": 0.25,
        "quality": 71.25,
        "elsewhere": 49.5,
    }
    before = small().record["before"] | {"cache": 9}
    said = [
        answer.sentence
        for answer in small({"verdict": "worse"}, layers=layers, before=before).answers()
        if "layers" in answer.question
    ]
    assert said[0].startswith(
        "without layers 3, 7 (5.3 % of the parameters, 12.5 % of the FLOPs, 25.0 % of the cache), not refitted: "
        "accuracy 71.25"
    )
