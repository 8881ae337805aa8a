"""Register what tests/plugin adds to headscope for the time of a test, without installing it."""

import copy
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headscope.registry import Registry


@contextmanager
def register_plugin(registry: Registry[Any], module: str) -> Iterator[None]:
    """Within the block `registry` has what a module of the package registers; afterwards what it had before."""
    registry.names()
    before = {name: copy.copy(value) for name, value in vars(registry).items()}
    name = f"tests.plugin.headscope_plugin.{module}"
    try:
        importlib.import_module(name)
        yield
    finally:
        sys.modules.pop(name, None)
        vars(registry).update(before)
