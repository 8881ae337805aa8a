"""Engines that models can be written for, read from the files that declare them. Imports no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from headscope.registry import Registry

ENGINES: Registry[Any] = Registry("export", package="headscope.pruning.engines", group="headscope.engines")
"""The engines by name; `headscope.pruning.engines.base.ENGINES` is the same registry with its type."""


@dataclass(frozen=True, kw_only=True)
class EngineDeclaration:
    """What an engine declares in literals: class attributes of `headscope.pruning.engines.base.EngineExport`."""

    name: str
    endings: tuple[str, ...] = ()
    allocation: str = ""


def declared_engines() -> list[EngineDeclaration]:
    """Every engine, those of other installed packages included, by name."""
    names = {entry.name for entry in fields(EngineDeclaration)}
    read = [{name: getattr(engine, name) for name in names} for engine in ENGINES.registered().values()]
    read += [{name: value for name, value in found.items() if name in names} for found in _literals()]
    unique = {attributes["name"]: EngineDeclaration(**attributes) for attributes in read}
    return sorted(unique.values(), key=lambda engine: engine.name)


def _literals() -> Iterator[dict[str, Any]]:
    """The attributes that engines assign literals to, of the files that the registry would import."""
    for _, path in ENGINES.unread():
        if re.search(r"^class \w+\(EngineExport\b", text := path.read_text(encoding="utf-8"), re.MULTILINE):
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and any("EngineExport" in ast.unparse(base) for base in node.bases):
                    found: dict[str, Any] = {}
                    for line in node.body:
                        if isinstance(line, ast.Assign):
                            with suppress(ValueError):  # no literal
                                found[ast.unparse(line.targets[0])] = ast.literal_eval(line.value)
                    if "name" in found:
                        yield found
