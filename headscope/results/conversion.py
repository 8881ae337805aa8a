"""A conversion: what `headscope convert` wrote, and how it was held against the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.results.answer import Answer, number_text
from headscope.results.result import StoredResult


@dataclass(repr=False)
class Conversion(StoredResult):
    """A checkpoint in another format, or in a file for an engine.

    `record` is what conversion.json holds, `difference` the largest one of logits, `file` what to open in the folder,
    which headscope does where it is `readable`; `pushed` is an address on the hub.
    """

    record: dict[str, Any]
    folder: Path
    architecture: str
    difference: float
    notes: tuple[str, ...] = ()
    file: str = ""
    readable: bool = True
    pushed: str = ""
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """What to open."""
        return self.folder / self.file

    def answers(self) -> list[Answer]:
        """What was written, and how far its logits are from the checkpoint's."""
        proof = f"; largest difference of logits {number_text(self.difference, 2)}"
        text = f"{self.folder.resolve().name}: {self.architecture}{proof if 'engine' not in self.record else ''}"
        return [Answer("", text), *(Answer("", note) for note in self.notes)]
