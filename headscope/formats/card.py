"""The card of a folder that was written: what it is, how it was proved, what opens it and what does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headscope.files.reading import exists
from headscope.files.writing import write_atomically
from headscope.version import VERSION

CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the card of a folder says; `facts` are lines, `opens` and `limits` those of what opens it and what not.

    `metadata` is for the model hub, which reads it from the head of the card.
    """

    title: str
    command: str
    facts: tuple[str, ...]
    opens: tuple[str, ...]
    limits: tuple[str, ...]
    metadata: Mapping[str, str | list[str]] = field(default_factory=dict)

    def text(self) -> str:
        """The card in Markdown."""
        parts = [
            *self._head(),
            f"# {self.title}\n",
            f"Written by headscope {VERSION}, `headscope {self.command}`.\n",
            _items(self.facts),
        ]
        parts += [f"## What opens it\n\n{_items(self.opens)}"] if self.opens else []
        parts += [f"## What does not\n\n{_items(self.limits)}"] if self.limits else []
        return "\n".join(parts)

    def _head(self) -> list[str]:
        """The metadata as YAML: JSON is YAML too."""
        lines = [f"{name}: {json.dumps(value)}" for name, value in self.metadata.items()]
        return ["\n".join(["---", *lines, "---", ""])] if lines else []


def hub_metadata(source: str, *, library: str, tags: Iterable[str]) -> dict[str, str | list[str]]:
    """What the hub is told of a model made of `source`, which is named as its base where it is on the hub too."""
    base = {"base_model": source} if not exists(source) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) else {}
    return {"library_name": library, "tags": ["headscope", *tags], **base}


def write_card(card: Card, folder: Path) -> None:
    """Write the card into a folder."""
    write_atomically(folder / CARD, lambda path: path.write_text(card.text(), encoding="utf-8"))


def _items(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)
