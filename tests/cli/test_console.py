"""What is printed for a file or a pipe is whole: no path, digest or table is cut at 80 columns."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.text import Text

import headscope as hs
from headscope.cli import console

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
    status, shown, _ = command("show", far_away)
    digest = hs.load(far_away, device="cpu").checkpoint.digest
    assert status == 0 and len(digest) > 60
    if columns is None:
        assert f" {far_away} " in shown and digest in shown and "…" not in shown
    else:
        table = shown.splitlines()[:20]
        value = "".join(line[16:].strip() for line in table)
        assert str(far_away) in value and digest in value and max(map(len, table)) <= 60


def test_lines_of_text_are_not_broken(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console.show([Text("word " * 30 + "end"), "results: " + "x" * 100])
    assert capfd.readouterr().out.splitlines() == ["word " * 30 + "end", "results: " + "x" * 100]
