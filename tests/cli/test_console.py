"""What is printed for a file or a pipe is whole: no path, digest or table is cut at 80 columns."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import headscope as hs
from headscope import progress
from headscope.cli import console, main
from headscope.progress import lines

Command = Callable[..., tuple[int, str, str]]


HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\r\x9b2Jd\u202ee [red]f[/] [/bold] :smile:"


def harmless(text: str) -> bool:
    return not any(character in text for character in "\x1b\x07\r\x9b\u202e") and "\\x1b[31m" in text


@pytest.mark.slow
def test_names_do_not_command_the_terminal(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory's name in a table, in the lines at the end, and in errors of every kind."""
    monkeypatch.setenv("COLUMNS", "400")
    folder = tmp_path / HOSTILE
    model = Path(shutil.copytree(hs.assets.trained_model(), folder / "model"))
    for arguments in (
        ("show", model),
        ("show", folder / "nothing"),
        ("plot", "heads", folder, "--out", tmp_path / "heads.png"),
        ("evaluate", model, "--source", folder / "nothing"),
        ("evaluate", model, f"--{HOSTILE}"),
        ("convert", model, folder / "native", "--to", "native"),
    ):
        _, out, err = command(*arguments)
        assert harmless(out + err), arguments
        assert "[red]f[/]" in out + err, arguments


# Progress where there is no terminal: plain lines now and then, on stderr.


def test_a_line_comes_when_the_interval_is_over_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with lines("training", 1000, unit="updates", say=said.append) as step:
        for update in range(10):
            now[0] += 7
            step(100, "loss 2" if update < 6 else "")
    assert said == ["training: 500 of 1,000 updates, loss 2", "training: 1,000 of 1,000 updates"]
    with lines("reading", None, unit="lines", say=said.append) as step:
        now[0] += progress.INTERVAL
        step(2000)
    assert said[2:] == ["reading: 2,000 lines"]


def test_lines_go_to_stderr_and_not_into_json(
    command: Command, caption_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0)
    source, target = caption_files
    words = ("--source", source, "--target", target, "--metrics", "perplexity", "--json")
    status, out, err = command("evaluate", hs.assets.trained_model(), *words)
    assert status == 0 and json.loads(out)
    assert err and all(re.fullmatch(r".+: [\d,]+ of [\d,]+ \w+", line) for line in err.splitlines())


# What a command says to OpenMP and oneDNN before torch is imported.


NAMES = (*main.WAITING, "OMP_WAIT_POLICY", "KMP_LIBRARY")


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "3"}])
def test_threads_of_a_command_soon_sleep_while_they_wait_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the command sets is taken back
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(
        main, "app", lambda: seen.append({name: os.environ[name] for name in NAMES if name in os.environ})
    )
    main.run()
    assert seen == [own or main.WAITING]


def test_json_has_null_for_what_is_no_finite_number(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"perplexity": float("inf"), "low": [float("-inf"), float("nan")], "value": 0.5})
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {"perplexity": None, "low": [None, None], "value": 0.5}
