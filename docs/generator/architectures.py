"""A hook of MkDocs: the page of architectures, made from the list that the contract tests go through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib
from mkdocs.structure.files import File

LIST = Path(__file__).parents[2] / "tests" / "contracts" / "architectures.toml"
HEAD = """# Architectures of transformers

Each of these is built small, opened, masked and cut in headscope's tests. The cut model computes what the masked one
does, to 1e-9 in double precision, or to single precision where the model's own code rounds to it. Many others work too;
opening one tells.
"""
KINDS = {
    "masked": "encoders",
    "causal": "decoders",
    "seq2seq": "encoder–decoders",
    "picture": "encoders of pictures",
    "picture states": "encoders of pictures",
    "BertForMultipleChoice": "encoders",
}
REASONS = {
    "its own code": "computes attention in its own code, past the interface of transformers 5",
    "calls attention": "subtracts two attentions, so no head has a context of its own",
    "takes input": "reads sound",
    "passes 'indices'": "chooses keys by an index of its own",
}


def on_files(files: Any, config: Any) -> Any:
    """The files of the site, with this page."""
    files.append(File.generated(config, "architectures.md", content=f"{HEAD}\n{architectures()}"))
    return files


def architectures() -> str:
    """Rows of every outcome, by kind of model: those that work, those that can only be masked, those refused."""
    listed = tomllib.loads(LIST.read_text(encoding="utf-8"))["architectures"]
    lines = ["| `model_type` | kind | analysed, masked | heads removed | |", "| --- | --- | --- | --- | --- |"]
    for outcome in ("works", "masked only", "refused"):
        rows = {name: row for name, row in listed.items() if row.get("outcome", "works") == outcome}
        lines += _noted(rows, outcome)
        lines += _plain(rows, outcome)
    return "\n".join([*lines, ""])


def _noted(rows: dict[str, Any], outcome: str) -> Iterator[str]:
    """Architectures of which something is to be said, those of one note in one row."""
    notes = dict.fromkeys((_kind(row), _note(row)) for row in rows.values() if _note(row))
    for kind, note in notes:
        names = [name for name, row in rows.items() if (_kind(row), _note(row)) == (kind, note)]
        yield _row(names, kind, outcome, note)


def _plain(rows: dict[str, Any], outcome: str) -> Iterator[str]:
    for kind in dict.fromkeys(_kind(row) for row in rows.values()):
        if names := [name for name, row in rows.items() if _kind(row) == kind and not _note(row)]:
            yield _row(names, kind, outcome, "")


def _row(names: list[str], kind: str, outcome: str, note: str) -> str:
    listed = ", ".join(f"`{name}`" for name in names)
    analysed = "no" if outcome == "refused" else "yes"
    return f"| {listed} | {kind} | {analysed} | {'yes' if outcome == 'works' else 'no'} | {note} |"


def _kind(row: dict[str, Any]) -> str:
    return KINDS.get(row["task"], "models of sound")


def _note(row: dict[str, Any]) -> str:
    reason = next((text for start, text in REASONS.items() if row.get("because", "").startswith(start)), "")
    return str(row.get("note") or reason)
