"""What all results are: tables, a record and answers, which four renderers show without knowing a measure by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from headscope.results.answer import Answer, AnswerTable

if TYPE_CHECKING:
    import pandas as pd


CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")


class Result:
    """What a command found.

    `tables` are what its CSV files hold, by name; `record` is what its JSON file holds.
    """

    tables: Mapping[str, pd.DataFrame]
    record: dict[str, Any]
    signature: Any
    """Everything that the numbers depend on, in one line, to cite with them."""

    def answers(self) -> list[Answer]:
        """What the result says, most asked first; those with `detail` come last."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The record and the answers."""
        return {"record": dict(self.record), "answers": [answer.to_json() for answer in self.answers()]}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.answers()[0].sentence}>"

    def _repr_html_(self) -> str:
        """The answers, for a notebook."""
        answers = "".join(answer_html(answer) for answer in self.answers() if not answer.detail)
        return f"<div>{answers}<p><small>{text_html(self.signature)}</small></p></div>"


class StoredResult(Result):
    """A result whose record has its signature, as in its folder."""

    @property
    def signature(self) -> str:
        """As the record says it."""
        return str(self.record.get("signature", ""))


def answer_html(answer: Answer) -> str:
    """An answer as inert HTML."""
    heading = f"<strong>{text_html(answer.question)}</strong> " if answer.question else ""
    table = "" if answer.table is None else _table_html(answer.table)
    sentence = f"<p>{text_html(answer.sentence)}</p>" if answer.sentence else ""
    return f"<div>{heading}{table}{sentence}</div>"


def _table_html(table: AnswerTable) -> str:
    head = "".join(f"<th>{text_html(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr><td>{'</td><td>'.join(map(text_html, row))}</td></tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def text_html(value: object) -> str:
    """Text for HTML, also in attributes; control characters as the sign for what cannot be shown."""
    return escape(CONTROL.sub("\ufffd", str(value)))
