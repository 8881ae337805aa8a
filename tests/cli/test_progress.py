"""Progress where there is no terminal: plain lines now and then, on stderr, by a clock of the tests' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headscope as hs
from headscope import progress
from headscope.cli import console
from headscope.cli.train import TrainingLines
from headscope.progress import Timer, lines
from headscope.training.losses import Sums

Command = Callable[..., tuple[int, str, str]]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_comes_when_the_interval_is_over_and_not_before() -> None:
    clock, said = Clock(), list[str]()
    with lines("analysing", 1000, unit="sentences", say=said.append, timer=Timer(interval=30, clock=clock)) as step:
        for _ in range(10):
            clock.now += 7
            step(100)
    assert said == [
        "analysing: 500 of 1,000 sentences, 14 sentences/s, 35 s left",
        "analysing: 1,000 of 1,000 sentences, 14 sentences/s, 0 s left",
    ]


def run_at(update: int, *, updates: int | None) -> Any:
    position = SimpleNamespace(update=update, epoch=3, updates_per_epoch=None)
    return SimpleNamespace(position=position, config=SimpleNamespace(updates=updates, epochs=None))


@pytest.mark.parametrize(("total", "of", "left"), [(5000, " of 5,000", ", 7 min left"), (None, "", "")])
def test_training_says_update_loss_rate_and_time_left(total: int | None, of: str, left: str) -> None:
    """From update 4,001 on, as after --resume: 100 tokens and 0.5 seconds an update, loss 2 a token, later 1."""
    clock, said = Clock(), list[str]()
    display = TrainingLines(said.append, Timer(interval=30, clock=clock))
    for update in range(1, 131):
        clock.now += 0.5
        if update == 100:
            display.validated(None, SimpleNamespace(nll=1.25, bleu=20.04), best=True)
        sums = Sums()._replace(tokens=100, loss=200.0 if update <= 60 else 100.0)
        display.updated(run_at(4000 + update, updates=total), sums)
    later = ", 7 min left" if total else ""
    assert said == [
        f"training: update 4,060{of}, epoch 3, loss 2.000, 200 tokens/s{left.replace('7', '8')}",
        f"training: update 4,120{of}, epoch 3, loss 1.000, valid 1.250 BLEU 20.0, 200 tokens/s{later}",
    ]


def test_lines_go_to_stderr_and_not_into_json(
    command: Command, caption_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.Timer, "due", lambda self: True)
    source, target = caption_files
    words = ("--source", source, "--target", target, "--metrics", "perplexity", "--json")
    status, out, err = command("evaluate", hs.assets.trained(), *words)
    assert status == 0 and json.loads(out)
    assert err and all(": " in line and line.endswith(" left") for line in err.splitlines())


def test_a_terminal_has_a_bar_instead(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    monkeypatch.setattr(progress.Timer, "due", lambda self: True)
    with console.progress("analysing", 3) as step:
        step(3)
    assert " left" not in capfd.readouterr().err
