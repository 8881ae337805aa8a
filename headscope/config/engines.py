"""What models can be written as, read from the files that declare it: engines, and formats. Imports no torch.

`--help` lists them, and every command that writes a model knows the endings of their files.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from headscope.registry import Registry

ENGINES: Registry[Any] = Registry("export", package="headscope.pruning.engines", group="headscope.engines")
"""The engines by name; `headscope.pruning.engines.base.ENGINES` is the same registry with its type."""
FORMATS: Registry[Any] = Registry("checkpoint format", package="headscope.formats", group="headscope.formats")


@dataclass(frozen=True, kw_only=True)
class EngineDeclaration:
    """What an engine declares in literals: class attributes of `headscope.pruning.engines.base.EngineExport`."""

    name: str
    summary: str = ""
    quantizations: Mapping[str, str] = field(default_factory=dict)
    endings: tuple[str, ...] = ()
    allocation: str = ""


def declared_engines() -> list[EngineDeclaration]:
    """Every engine, those of other installed packages included, by name."""
    names = {entry.name for entry in fields(EngineDeclaration)}
    read = [{name: getattr(engine, name) for name in names} for engine in ENGINES.registered().values()]
    read += [{name: found[name] for name in names & set(found)} for found in _literals(ENGINES, "EngineExport")]
    unique = {attributes["name"]: EngineDeclaration(**attributes) for attributes in read}
    return sorted(unique.values(), key=lambda engine: engine.name)


def engine_list() -> list[str]:
    """`gguf (one file for llama.cpp …)`."""
    return [f"{engine.name} ({engine.summary})" for engine in declared_engines()]


def quantization_list() -> list[str]:
    """`q8_0 (gguf: matrices in 8 bits)`."""
    return [
        f"{kind} ({each.name}: {about})" for each in declared_engines() for kind, about in each.quantizations.items()
    ]


def goal_list() -> list[str]:
    """Formats that checkpoints can be converted to, headscope's own first."""
    names = {found["name"] for found in _literals(FORMATS, "CheckpointFormat") if found.get("converts")}
    return sorted(names, key=lambda name: (name != "native", name))


def export_list() -> list[str]:
    """`self-contained, native, masked (huggingface)`: how heads can be taken out, defaults first."""
    own = [
        f"{', '.join(found['export_names'])} ({found['name']})"
        for found in _literals(FORMATS, "CheckpointFormat")
        if "export_names" in found
    ]
    return [*own, "same, masked (the other formats)"]


def _literals(registry: Registry[Any], base: str) -> Iterator[dict[str, Any]]:
    """The attributes that classes made of `base` assign literals to, of the files that a registry would import."""
    of_base = re.compile(rf"^class \w+\({base}\b", re.MULTILINE)
    for _, path in registry.unread():
        if of_base.search(text := path.read_text(encoding="utf-8")):
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and any(base in ast.unparse(each) for each in node.bases):
                    found: dict[str, Any] = {}
                    for line in node.body:
                        if isinstance(line, (ast.Assign, ast.AnnAssign)) and line.value is not None:
                            target = line.targets[0] if isinstance(line, ast.Assign) else line.target
                            with suppress(ValueError):  # no literal
                                found[ast.unparse(target)] = ast.literal_eval(line.value)
                    if "name" in found:
                        yield found
