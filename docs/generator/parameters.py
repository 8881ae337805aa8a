"""Descriptions of parameters in docstrings (`name: what it is`, a line or more each) shown as lists in the reference.

An extension of griffe, which reads the code for mkdocstrings (see mkdocs.yml).
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class ParameterLists(griffe.Extension):
    """Makes list items of lines that begin with names of the function's own parameters."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Rewrite the docstring of a function."""
        if func.docstring is not None:
            names = {parameter.name.lstrip("*") for parameter in func.parameters}
            func.docstring.value = as_list(func.docstring.value, names)


def as_list(text: str, names: set[str]) -> str:
    """The text, with a list where lines begin with names and a colon; what is indented belongs to its item."""
    lines: list[str] = []
    for line in text.splitlines():
        named = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if named and names.issuperset(named[1].split(", ")):
            if lines and lines[-1] and not lines[-1].startswith(("- ", "    ")):
                lines.append("")
            line = f"- {', '.join(f'`{name}`' for name in named[1].split(', '))}: {named[2]}"
        lines.append(line)
    return "\n".join(lines)
