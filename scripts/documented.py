"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
FIRST_HOUR = ROOT / "examples" / "first_hour.sh"
NOT_RUN = re.compile(r"<!-- not run: ([^\n]+) -->\n")
BLOCK = re.compile(rf"^(?:{NOT_RUN.pattern})?```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
PROGRAMS = ("headscope", "python", "torchrun", "make", "pip", "lm-eval", "git", "cd", ".", "set", "echo")
"""What a line of a `sh` block may begin with, beside an assignment."""


@dataclass(frozen=True)
class Block:
    """A code block: its language, its text, and why it is not run where a comment above it says so."""

    language: str
    text: str
    not_run: str = ""


@dataclass(frozen=True)
class Command:
    """A line of a `sh` block in words, with what is read from and written to; `variable` is what it is assigned to."""

    line: str
    words: tuple[str, ...]
    source: str = ""
    out: str = ""
    variable: str = ""
    not_run: str = ""

    @property
    def arguments(self) -> list[str]:
        """What follows `headscope`, also under torchrun; empty for other programs."""
        return list(self.words[self.words.index("headscope") + 1 :]) if self.is_headscope else []

    @property
    def is_headscope(self) -> bool:
        """Whether the line starts headscope, by itself or under torchrun."""
        return self.words[0] == "headscope" or (self.words[0] == "torchrun" and "headscope" in self.words)


def pages() -> list[Path]:
    """README and all pages, those first that others build on."""
    return [README, *sorted(DOCS.rglob("*.md"))]


def name(page: Path) -> str:
    """A page as tests call it."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[Block]:
    """The code blocks of a page in one language."""
    matches = (Block(match[2], match[3], match[1] or "") for match in BLOCK.finditer(page.read_text(encoding="utf-8")))
    return [block for block in matches if block.language == language]


def commands(page: Path) -> list[Command]:
    """The lines of a page's `sh` blocks, or of a script, without comments; a backslash at the end joins lines."""
    script = page.suffix == ".sh"
    return [
        _command(line, block.not_run)
        for block in ([Block("sh", page.read_text(encoding="utf-8"))] if script else blocks(page, "sh"))
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _command(line: str, not_run: str) -> Command:
    if match := re.fullmatch(r"(\w+)=\$\((.+)\)", line):
        return Command(line, tuple(shlex.split(match[2])), variable=match[1], not_run=not_run)
    words = shlex.split(line, comments=True)
    files = {}
    for sign in "<>":
        if sign in words:
            index = words.index(sign)
            files[sign] = words[index + 1]
            del words[index : index + 2]
    assert words[0] in PROGRAMS, line
    return Command(line, tuple(words), source=files.get("<", ""), out=files.get(">", ""), not_run=not_run)
