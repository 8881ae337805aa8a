"""Engines that models can be written for, read from the files that declare them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headscope.config.declarations import Declared, read_declarations
from headscope.registry import Registry

ENGINES: Registry[Any] = Registry("engine", package="headscope.export", group="headscope.engines")
"""The engines by name; `headscope.export.base.ENGINES` is the same registry with its type."""


@dataclass(frozen=True)
class EngineDeclaration(Declared):
    """What an engine declares: class attributes of `headscope.export.base.EngineExport`."""

    endings: tuple[str, ...] = ()
    allocation: str = ""


def declared_engines() -> list[EngineDeclaration]:
    """Every engine, those of other installed packages included, by name."""
    return sorted(read_declarations(EngineDeclaration, ENGINES), key=lambda engine: engine.name)
