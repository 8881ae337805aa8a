"""Writing by formats: files, exports without heads, conversions, and the card of a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from headscope.config.declarations import declared_engines
from headscope.errors import one_line
from headscope.files.writing import write_atomically
from headscope.model.removal_plan import RemovalPlan
from headscope.version import VERSION

CHECKPOINTS = "json safetensors toml txt py pt npz model codes bpe voc vocab jinja md"
MODEL_FILES = tuple(
    f"*.{ending}"
    for patterns in (CHECKPOINTS.split(), *(engine.endings for engine in declared_engines()))
    for ending in patterns
)
"""Patterns of the files of a folder that a model was written into: checkpoints of all formats, and files of engines."""

Build = Callable[[Any, RemovalPlan], Any]
"""Makes a checkpoint without the heads of a plan from a whole one; ConfigError if these heads cannot be removed."""


@dataclass(frozen=True)
class SavedFiles:
    """The path to open and its format; `notes` for the user; programs that open it (`opens`) or do not (`limits`).

    After a conversion `architecture` is the class that opens the files, and `logits` [2 t V] are theirs for a probe.
    """

    path: Path
    format: str
    notes: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    architecture: str = ""
    logits: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Export:
    """One way to write a checkpoint without some of its heads.

    `build` makes the checkpoint that is then saved. `whole_groups`: heads that share keys and values are removed
    together. `refine` makes this export's checkpoint from that of the format's default export. `adds_bias`: an output
    projection may have a bias that its class builds without. `padded` builds a checkpoint whose layers are filled up
    with heads of zeros to the same number. `holds`, if given, tells before the build whether a checkpoint with fewer
    heads, as many in every layer, can be written this way, as far as that is known.
    """

    name: str
    build: Build
    whole_groups: bool = True
    adds_bias: bool = False
    refine: Build | None = None
    padded: Build | None = None
    holds: Callable[[Any], bool] | None = None


SAME = Export(name="same", build=lambda checkpoint, plan: checkpoint.alter_heads(plan, "shrink"))
MASKED = Export(name="masked", build=lambda checkpoint, plan: checkpoint.alter_heads(plan, "zero"), whole_groups=False)


class Probe(NamedTuple):
    """Random ids on which two models are compared: `source` [2 s], whether each is no padding [2 s], `target` [2 t]."""

    source: Tensor
    real: Tensor
    target: Tensor


CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class Card:
    """The content of a folder's model card; the model hub reads `metadata` from its head."""

    title: str
    command: str
    facts: tuple[str, ...]
    opens: tuple[str, ...]
    limits: tuple[str, ...]
    metadata: Mapping[str, str | list[str]] = field(default_factory=dict)

    def text(self) -> str:
        """The card in Markdown."""
        head = [f"{name}: {json.dumps(value)}" for name, value in self.metadata.items()]  # JSON is YAML too
        credit = f"Written by headscope {VERSION}, `headscope {self.command}`.\n"
        parts = ["\n".join(["---", *head, "---", ""])] if head else []
        parts += [f"# {_escape(self.title)}\n", credit, _items(self.facts)]
        parts += [f"## What opens it\n\n{_items(self.opens)}"] if self.opens else []
        parts += [f"## What does not\n\n{_items(self.limits)}"] if self.limits else []
        return "\n".join(parts)


def hub_metadata(source: str, *, library: str, tags: Iterable[str]) -> dict[str, str | list[str]]:
    """The model hub's metadata of a model made of `source`, which is named as its base if it is a hub id."""
    base = {"base_model": source} if not os.path.exists(source) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) else {}
    return {"library_name": library, "tags": ["headscope", *tags], **base}


def write_card(card: Card, folder: Path) -> None:
    """Write the card into a folder."""
    write_atomically(folder / CARD, card.text())


def _items(lines: Iterable[str]) -> str:
    return "".join(f"- {_escape(line)}\n" for line in lines)


def _escape(line: str) -> str:
    """A line of Markdown that shows its text: HTML, links and tables are escaped outside of code."""
    parts = re.split(r"(?<!`)((`+)(?!`).+?(?<!`)\2(?!`))", one_line(line))
    prose = (re.sub(r"[\[\]|*]", r"\\\g<0>", escape(part, quote=False)) for part in parts[::3])
    return "".join(text for pair in zip_longest(prose, parts[1::3], fillvalue="") for text in pair)
