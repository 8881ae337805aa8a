"""The card of a folder that was written: what it is, how it was proved, what opens it and what does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headscope.files.writing import write_atomically
from headscope.version import VERSION

CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the card of a folder says; `facts` are lines, `opens` and `limits` those of what opens it and what not."""

    title: str
    command: str
    facts: tuple[str, ...]
    opens: tuple[str, ...]
    limits: tuple[str, ...]

    def text(self) -> str:
        """The card in Markdown."""
        parts = [
            f"# {self.title}\n",
            f"Written by headscope {VERSION}, `headscope {self.command}`.\n",
            _items(self.facts),
        ]
        parts += [f"## What opens it\n\n{_items(self.opens)}"] if self.opens else []
        parts += [f"## What does not\n\n{_items(self.limits)}"] if self.limits else []
        return "\n".join(parts)


def write_card(card: Card, folder: Path) -> None:
    """Write the card into a folder."""
    write_atomically(folder / CARD, lambda path: path.write_text(card.text(), encoding="utf-8"))


def _items(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)
