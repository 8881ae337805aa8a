"""What a sweep found: its tables, the verdicts, and what it says of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from headscope.pruning.selection import selection_signature
from headscope.pruning.sweep.cells import SweepContext
from headscope.pruning.sweep.table import sizes_with_verdicts, verdict_lines
from headscope.results.answer import Answer
from headscope.results.choices import sweep_answers
from headscope.signature import Signature


@dataclass(frozen=True)
class Sweep:
    """The table of a sweep, the heads that stay in each cell, and the verdict on every method and size.

    `baseline` says why there are no verdicts, `notes` of which cells no model is kept, and where functions are of other
    weights. Of several processes the first alone has them; the tables are empty in the others (`main` is False).
    """

    context: SweepContext
    table: pd.DataFrame
    survivors: pd.DataFrame
    verdicts: pd.DataFrame
    baseline: str | None = None
    notes: Sequence[str] = ()
    main: bool = True

    @property
    def signature(self) -> Signature:
        """What shaped the numbers."""
        return sweep_signature(self.context)

    @property
    def remarks(self) -> list[str]:
        """What the user should know."""
        verdict = [f"no verdict: {self.baseline}"] if self.baseline else []
        return [*self.context.opened.remarks, *verdict, *self.notes]

    @property
    def conclusions(self) -> list[str]:
        """By method how many heads can go, and what the text could have seen."""
        return list(verdict_lines(self.verdicts, self.context.metric_title))

    def answers(self) -> list[Answer]:
        """By method how many heads can go; then every size, and how each method ranks."""
        name, metric = self.context.config.out.resolve().name, self.context.metric_title
        rows: list[Any] = sizes_with_verdicts(self.table, self.verdicts).to_dict("records")
        return sweep_answers(self.record(), rows, name, metric)

    def to_json(self) -> dict[str, Any]:
        """What was measured, and the answers."""
        return {"record": self.record(), "answers": [answer.to_json() for answer in self.answers()]}

    def record(self) -> dict[str, Any]:
        """As JSON values; NaN becomes null."""
        tables = {"cells": self.table, "verdicts": self.verdicts}
        rows = {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}
        return {
            "signature": str(self.signature),
            "remarks": self.remarks,
            "directions": self.context.directions,
            "conclusions": self.conclusions,
            **rows,
        }


def sweep_signature(context: SweepContext) -> Signature:
    """What shaped the numbers of a sweep."""
    config, valid = context.config, context.data.corpus
    how = {"metric": context.metric}
    if context.metric == "bleu":
        how |= {
            "text": config.text,
            "tok": context.data.text.tokenize,
            **context.checkpoint.search_facts(context.data.options),
        }
    if config.trains:
        how["updates"] = f"{config.updates}+{config.tune_updates}"
    if config.allocate != "global":
        how["allocate"] = config.allocate
    if config.compensate != "none":
        how["compensate"] = config.refit.name
    how["valid"] = f"sha1={valid.digest[:12]},n={valid.count}"
    made = selection_signature("sweep", context.opened, config, **how)
    return Signature({**made.entries, "boot": str(config.bootstrap)})
