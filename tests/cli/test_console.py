"""What is printed for a file or a pipe is whole: no path, digest or table is cut at 80 columns."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import headscope as hs
from headscope.cli import console

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def far_away(tmp_path: Path) -> Path:
    """The small model at a path of more than 200 characters."""
    folder = tmp_path.joinpath(*["a-folder-with-a-name-of-some-length"] * 6, "model")
    return Path(shutil.copytree(hs.assets.trained(), folder))


HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\r\x9b2Jd\u202ee [red]f[/] [/bold] :smile:"


def harmless(text: str) -> bool:
    return not any(character in text for character in "\x1b\x07\r\x9b\u202e") and "\\x1b[31m" in text


@pytest.mark.slow
def test_names_do_not_command_the_terminal(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory's name in a table, in the lines at the end, and in errors of every kind."""
    monkeypatch.setenv("COLUMNS", "400")
    folder = tmp_path / HOSTILE
    model = Path(shutil.copytree(hs.assets.trained(), folder / "model"))
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


def test_tables_in_a_pipe_keep_to_their_columns(
    command: Command, far_away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentences are broken, words and paths are not, and no line ends in blanks."""
    monkeypatch.delenv("COLUMNS", raising=False)
    for arguments in (("list", "analyses"), ("list", "criteria")):
        lines = command(*arguments)[1].splitlines()
        table = [line for line in lines if line.startswith(" ") and str(far_away) not in line]
        assert len(table) > 20 and max(map(len, table)) <= console.WIDTH, arguments
        assert lines == [line.rstrip() for line in lines], arguments
