"""Every public method says what it does, or overrides one that says it (ruff's D102 asks the second too)."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tests.makers.modules import MODULES


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"headscope.__main__"}))  # importing that runs the command line
def test_every_public_method_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
    methods = {
        f"{cls.__name__}.{method}": getattr(cls, method)
        for cls in classes
        if not cls.__name__.startswith("_")
        for method, value in vars(cls).items()
        if not method.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod)))
    }
    assert [method for method, value in methods.items() if not inspect.getdoc(value)] == []
