"""What is printed for a file or a pipe is whole: no path, digest or table is cut at 80 columns."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

import headscope as hs
from headscope.cli import console
from headscope.progress import console_for_text

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def far_away(tmp_path: Path) -> Path:
    """The small model at a path of more than 200 characters."""
    folder = tmp_path.joinpath(*["a-folder-with-a-name-of-some-length"] * 6, "model")
    return Path(shutil.copytree(hs.assets.trained(), folder))


@pytest.mark.parametrize("columns", [None, "60"])
def test_paths_and_digests_are_shown_whole(
    command: Command, far_away: Path, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    """Without a terminal each in a line; in a narrow window folded, with every character."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    status, shown, _ = command("show", far_away, "--verbose")
    digest = hs.load(far_away, device="cpu").checkpoint.digest
    assert status == 0 and len(digest) > 60
    assert f"headscope analyze {far_away} " in shown and digest in shown


@pytest.mark.parametrize("terminal", [False, True])
def test_tables_without_room_are_folded_not_cut(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen = console_for_text(force_terminal=terminal, width=40)
    monkeypatch.setattr(console, "console_for_text", lambda **given: console_for_text(**given) if given else screen)
    columns = ("head", "integrated_gradients", "95 %")
    row = ("encoder-self.10.11", "0.0123456", "0.0100001 to 0.0200002")
    console.show([console.table(columns, [row], numbers=columns[1:], whole=columns)])
    shown = capfd.readouterr().out
    assert "…" not in shown
    for word in ("encoder", "0.0123456", "0.0100001", "0.0200002"):
        assert word in shown


def test_lines_of_text_are_not_broken(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console.show([Text("word " * 30 + "end"), "results: " + "x" * 100])
    assert capfd.readouterr().out.splitlines() == ["word " * 30 + "end", "results: " + "x" * 100]


HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\r\x9b2Jd\u202ee [red]f[/] [/bold] :smile:"


def harmless(text: str) -> bool:
    return not any(character in text for character in "\x1b\x07\r\x9b\u202e") and "\\x1b[31m" in text


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


def test_consoles_draw_and_texts_do_not(capfd: pytest.CaptureFixture[str]) -> None:
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE, style="bold"))
    console_for_text(force_terminal=True, width=200, color_system="standard").print(table, HOSTILE)
    shown = capfd.readouterr().out
    assert "\x1b[1m" in shown and "\x1b[31m" not in shown and ":smile:" in shown and shown.count("\\x1b[31m") == 4


def test_titles_of_bars_are_texts(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = console_for_text(stderr=True, force_terminal=True, width=200)
    monkeypatch.setattr(console, "err", lambda: screen)
    with console.progress(HOSTILE, 2) as step:
        step(1)
    with console.progress(HOSTILE, None) as step:
        step(1)
    shown = capfd.readouterr().err
    assert "[red]f" in shown and "\x1b[31m" not in shown and "\x1b]0" not in shown


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
