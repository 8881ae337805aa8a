"""Every public method says what it does, or overrides one that says it (ruff's D102 asks the second too)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

from tests.makers.modules import MODULES


def methods(name: str) -> Iterator[tuple[str, object]]:
    """The public methods and properties of the public classes of a module."""
    for cls in vars(importlib.import_module(name)).values():
        if inspect.isclass(cls) and cls.__module__ == name and not cls.__name__.startswith("_"):
            for method, value in vars(cls).items():
                kinds = (property, classmethod, staticmethod)
                if not method.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds)):
                    yield f"{name}.{cls.__name__}.{method}", getattr(cls, method)


def test_every_public_method_is_documented() -> None:
    found = dict(pair for name in set(MODULES) - {"headscope.__main__"} for pair in methods(name))  # that runs commands
    assert len(found) > 500
    assert [method for method, value in found.items() if not inspect.getdoc(value)] == []
