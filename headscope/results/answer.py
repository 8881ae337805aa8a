"""An answer: one sentence to one question, the heads that it is about, and at most one short table.

Numbers are rounded here and nowhere after: console, page, card and notebook print the texts of an answer as they are.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


MAX_ROWS = 12
"""Rows of the table of an answer."""


@dataclass(frozen=True)
class AnswerTable:
    """Rows of texts under names of columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Answer:
    """The answer of a result to one question.

    `question` is a heading; the first answer of a result has none, as it names the model and the text. `heads` are the
    full names of heads in the sentence or the table. `caution` marks what may be wrong or missing. A `detail` is shown
    in files and in verbose output only.
    """

    question: str
    sentence: str = ""
    table: AnswerTable | None = None
    heads: tuple[str, ...] = ()
    caution: bool = False
    detail: bool = False


def number_text(value: Any, digits: int = 3) -> str:
    """A number with `digits` significant digits, 1,234 for large ones; "not measured" for NaN and infinities."""
    number = float(value)
    if not math.isfinite(number):
        return "not measured"
    text = f"{number:,.0f}" if abs(number) >= 10**digits - 0.5 else f"{number:.{digits}g}"
    return text.replace("e-0", "e-").replace("-", "−")


def signed_text(value: Any, digits: str = ".4f") -> str:
    """A number with its sign: `+0.12`, `−0.33`."""
    return f"{value:+{digits}}".replace("-", "−")


def interval_text(low: Any, high: Any, digits: int = 3) -> str:
    """`0.31 to 0.55`; empty where there is no interval, or one without width."""
    ends = float(low), float(high)
    has_width = all(map(math.isfinite, ends)) and ends[0] != ends[1]
    return " to ".join(number_text(end, digits) for end in ends) if has_width else ""


def filled_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> AnswerTable:
    """A table without the columns that are empty in every row."""
    filled = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    return AnswerTable(tuple(columns[n] for n in filled), tuple(tuple(row[n] for n in filled) for row in rows))


def list_text(names: Sequence[str], room: int = 100) -> str:
    """As many names as fit `room` letters, at least one, and the number of the others."""
    for count in range(len(names), 0, -1):
        hidden = len(names) - count
        text = " ".join(names[:count]) + (f" and {hidden:,} more" if hidden else "")
        if len(text) <= room or count == 1:
            return text
    return ""


def remark_answers(remarks: Sequence[str], file: str) -> list[Answer]:
    """The warnings among remarks, and the number of other remarks in `file`; these are details."""
    warnings = [remark for remark in remarks if remark.startswith("warning")]
    notes = [remark for remark in remarks if remark not in warnings]
    summary = [Answer("Notes", f"{len(notes)}, in {file}")] if notes else []
    return [
        *(Answer("", remark, caution=True) for remark in warnings),
        *summary,
        *(Answer("note", remark, detail=True) for remark in notes),
    ]


CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")


class Result(ABC):
    """The result of a command.

    `tables` are what its CSV files hold, by name; `record` is what its JSON file holds. `pushed` is the address on the
    hub, "" where it is not there.
    """

    tables: Mapping[str, pd.DataFrame]
    record: dict[str, Any]
    pushed = ""
    signature: Any
    """Everything that the numbers depend on, in one line, to cite with them."""

    @abstractmethod
    def answers(self) -> list[Answer]:
        """The answers, the most important first, details last."""

    def to_json(self) -> dict[str, Any]:
        """The record and the answers."""
        return {"record": dict(self.record), "answers": list(map(asdict, self.answers()))}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.answers()[0].sentence}>"

    def _repr_html_(self) -> str:
        """The answers, for a notebook."""
        answers = "".join(answer_html(answer) for answer in self.answers() if not answer.detail)
        html = f"<div>{answers}<p><small>{escape(str(self.signature))}</small></p></div>"
        return CONTROL.sub("\ufffd", html)


def record_entry(name: str, about: str) -> Any:
    """A property that is an entry of the record."""
    return property(lambda result: result.record[name], doc=about)


class StoredResult(Result):
    """A result whose record has its signature."""

    def __init__(self, record: dict[str, Any], folder: Path = Path()) -> None:
        self.record, self.tables = record, dict[str, Any]()
        self.folder: Any = folder

    @property
    def signature(self) -> str:
        """Everything that the numbers depend on, as the record says it."""
        return str(self.record.get("signature", ""))


def answer_html(answer: Answer) -> str:
    """An answer as HTML, with all texts escaped; control characters stay."""
    heading, table = f"<strong>{escape(answer.question)}</strong> " if answer.question else "", ""
    if answer.table is not None:
        head = "".join(f"<th>{escape(name)}</th>" for name in answer.table.columns)
        rows = "".join(f"<tr><td>{'</td><td>'.join(map(escape, row))}</td></tr>" for row in answer.table.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    sentence = f"<p>{escape(answer.sentence)}</p>" if answer.sentence else ""
    return f"<div>{heading}{table}{sentence}</div>"
