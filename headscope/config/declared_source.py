"""What the source of a module declares, read without importing it: its constants, dataclasses and class attributes."""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LIGHT = {"dataclasses", "typing", "pathlib", "math", "headscope.config", "headscope.errors", "headscope.heads"}
LIGHT |= {"headscope.config.declarations"}
"""What declarations may import: modules that import no torch."""


def names_of_module(module: str, sources: Mapping[str, Path], kind: str, declares: type[Any]) -> dict[str, Any]:
    """Names that the declarations of a module define, and as "registered" the attributes of what `@kind` registers."""
    names: dict[str, Any] = {"__name__": module, "registered": []}
    classes: dict[str, SimpleNamespace] = {}
    for node in ast.parse(sources[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module in sources:
            imported_names = names_of_module(node.module, sources, kind, declares)
            names |= {
                alias.asname or alias.name: imported_names[alias.name]
                for alias in node.names
                if alias.name in imported_names
            }
        elif isinstance(node, ast.ClassDef) and "dataclass" not in _names(node.decorator_list):
            base_attributes = [vars(classes[base]) for base in _names(node.bases) if base in classes]
            about = {"about": ast.get_docstring(node) or ""}
            classes[node.name] = SimpleNamespace(
                **ChainMap(_attributes(node, names, declares), about, *base_attributes)
            )
            if kind in _names(node.decorator_list):
                names["registered"].append(classes[node.name])
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = f"{module}:{node.name}"
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.ClassDef)) or _is_light(node):
            with suppress(NameError, TypeError):  # no declaration, or one that fails where a class uses it
                _execute(node, names)
    return names


def _is_light(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name in LIGHT for alias in node.names)
    return isinstance(node, ast.ImportFrom) and node.module in LIGHT


def _attributes(node: ast.ClassDef, names: dict[str, Any], declares: type[Any]) -> dict[str, Any]:
    """The values that a class assigns to attributes that `declares` has."""
    attributes = {attribute.name for attribute in fields(declares)}
    values: dict[str, Any] = {}
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if {target.id for target in targets if isinstance(target, ast.Name)} & attributes:
            _execute(statement, names, values)
    return values


def _execute(node: ast.stmt, names: dict[str, Any], values: dict[str, Any] | None = None) -> None:
    """One statement; annotations are evaluated, whatever the module says of them."""
    exec(compile(ast.Module([node], []), "<declarations>", "exec", dont_inherit=True), names, values)


def _names(nodes: list[ast.expr]) -> set[str]:
    """The names of decorators or bases, without their arguments."""
    bare = [node.func if isinstance(node, ast.Call) else node for node in nodes]
    return {node.id for node in bare if isinstance(node, ast.Name)}
