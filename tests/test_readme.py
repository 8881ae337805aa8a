"""What the README tells a newcomer to type runs as it stands, a test for each section."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.commands import ran

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = (". .venv/bin/activate", "headscope demo --out demo --force")
"""Not run here: this process has its environment,
`cli/test_cli.py` runs the demonstration on its first sentences."""


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)```", text, flags=re.DOTALL | re.MULTILINE)


def sections() -> dict[str, list[str]]:
    """The commands of every section that has some, in the order of the page."""
    parts = re.split(r"^##+ (.+)$", README, flags=re.MULTILINE)[1:]
    commands = {
        title: [line for block in blocks("sh", text) for line in block.splitlines() if line not in ELSEWHERE]
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {title: lines for title, lines in commands.items() if lines}


SECTIONS = sections()


class Newcomer:
    """Somebody who types the commands from the top of the page on, in a folder that looks like the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables: dict[str, str] = {}
        self.typed: set[str] = set()
        for name in ("headscope", "examples"):
            (folder / name).symlink_to(ROOT / name)

    def types(self, title: str) -> None:
        """The commands of a section, after those before it; each once."""
        for earlier in [*list(SECTIONS)[: list(SECTIONS).index(title)], title]:
            if earlier not in self.typed:
                self.typed.add(earlier)
                for line in SECTIONS[earlier]:
                    self._type(line)

    def _type(self, line: str) -> None:
        if assigned := re.fullmatch(r"(\w+)=\$\((.+)\)", line):
            self.variables[assigned[1]] = self._python(shlex.split(assigned[2]))
            return
        program, *arguments = [self.variables.get(word.removeprefix("$"), word) for word in shlex.split(line)]
        if program == "python":
            self._python([program, *arguments])
            return
        assert program == "headscope"
        finished = ran(arguments)
        assert finished.status == 0 and finished.crash is None, (line, finished)

    def _python(self, words: list[str]) -> str:
        assert words[0] == "python"
        done = subprocess.run([sys.executable, *words[1:]], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("readme")
        patch.chdir(folder)
        yield Newcomer(folder)


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_the_commands_of_a_section_run(title: str, newcomer: Newcomer) -> None:
    newcomer.types(title)
    if title == "headscope plot":
        assert len(list((newcomer.folder / "figures").iterdir())) == 8
        assert (newcomer.folder / "run" / "heads.csv").is_file()


def test_no_command_is_forgotten() -> None:
    assert {"headscope show", "headscope analyze", "headscope plot", "headscope prune"} <= set(SECTIONS)
    assert sum(map(len, SECTIONS.values())) >= 14


@pytest.mark.slow
def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert tuple(names["weights"].shape) == (1, 12, 9, 9)


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists()
