"""The metrics of a run by update: metrics.csv, and event files for TensorBoard."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headscope.errors import CheckpointError, ConfigError
from headscope.files.reading import read_text
from headscope.files.writing import write_atomically, write_errors

FILE = "metrics.csv"
COLUMNS = (
    *("update", "epoch", "sentences", "tokens", "seconds", "tokens_per_second", "lr", "loss", "nll", "gradient_norm"),
    *("valid_nll", "valid_perplexity", "bleu", "best"),
)


class History:
    """Lines of metrics.csv, each written as soon as it is known; the columns are set by the first line."""

    def __init__(self, folder: Path, *, update: int, tensorboard: bool) -> None:
        """Lines after `update` are of a process that was killed, and are taken out."""
        self.path = folder / FILE
        self.columns: list[str] = []
        if self.path.exists():
            self._cut(update)
        self.board = _board(folder, update) if tensorboard else None

    def add(self, row: Mapping[str, float | int | None]) -> None:
        """Write a line; NaN and None stay empty."""
        if not self.columns:
            self.columns = [*COLUMNS, *(name for name in row if name not in COLUMNS)]
            write_atomically(self.path, lambda path: path.write_text(_line(self.columns), encoding="utf-8"))
        with write_errors(self.path):
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line([_cell(row.get(name)) for name in self.columns]))
            if self.board is not None:
                for name, value in row.items():
                    if value is not None and value == value and name not in ("update", "epoch"):
                        self.board.add_scalar(name, value, int(row["update"] or 0))
                self.board.flush()

    def close(self) -> None:
        """Close the event files."""
        if self.board is not None:
            self.board.close()

    def _cut(self, update: int) -> None:
        try:
            rows = list(csv.reader(read_text(self.path, error=CheckpointError).splitlines()))
        except csv.Error as error:
            raise CheckpointError(f"{self.path} is damaged ({error}); train anew with --force") from None
        self.columns = rows[0] if rows else []
        complete = [row for row in rows[1:] if len(row) == len(self.columns) > 0]
        rows = [row for row in complete if re.fullmatch(r"[0-9]{1,12}", row[0]) and int(row[0]) <= update]
        text = "".join(map(_line, [self.columns, *rows]))
        write_atomically(self.path, lambda path: path.write_text(text, encoding="utf-8"))


def _cell(value: float | int | None) -> str:
    if value is None or value != value:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.7g}"


def _line(cells: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _board(folder: Path, update: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        raise ConfigError("--tensorboard needs its package: pip install 'headscope[train]'") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=update + 1)
