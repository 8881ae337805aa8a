"""What the README tells a newcomer to type runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like the checkout, without its virtual environment."""
    (tmp_path / "headscope").symlink_to(ROOT / "headscope")
    (tmp_path / "bin").mkdir()
    for name, arguments in (("python", ""), ("headscope", "-m headscope")):
        starter = tmp_path / "bin" / name
        starter.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        starter.chmod(0o755)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
def test_every_command_runs(folder: Path) -> None:
    """All but the demonstration as it stands, which `make demo` runs and `cli/test_cli.py` on its first sentences."""
    commands = [line for block in blocks("sh") for line in block.splitlines() if not line.startswith(". ")]
    commands.remove("headscope demo --out demo --force")
    assert len(commands) >= 10
    script = "\n".join(["set -euo pipefail", *commands])
    ran = subprocess.run(["bash", "-c", script], cwd=folder, env=environment(folder), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert len(list((folder / "figures").iterdir())) == 8
    assert (folder / "run" / "heads.csv").is_file()


@pytest.mark.slow
def test_the_python_example_runs(folder: Path) -> None:
    (code,) = blocks("python")
    command = [sys.executable, "-c", code + "\nprint(tuple(weights.shape))"]
    ran = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "(1, 12, 9, 9)"


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists()
