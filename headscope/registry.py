"""Registries of named variants: modules of a folder, and entry points of installed packages.

Duplicate names are errors; an unknown name gives an error with the nearest ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar

from headscope.errors import ConfigError

T = TypeVar("T")
_WALKING = RLock()
"""Held while modules are imported; one lock for all registries, as their modules look names up in one another."""


class Registry(Generic[T]):
    """Maps names to variants of one kind, filled by importing every module of one package.

    `kind` is what errors call a variant ("analysis"). The first look-up imports all modules of `package`, then the
    entry points of `group` (default: `package`) of other installed packages; these modules register their variants.
    Registering a name twice is an error that names both modules. Where a variant has a folder of its own in `package`,
    only its module `main` is imported; that imports the others when it needs them.
    """

    def __init__(self, kind: str, *, package: str, group: str = "", main: str = "") -> None:
        self.kind = kind
        self.package = package
        self.group = group or package
        self.main = main
        self._variants: dict[str, T] = {}
        self._modules: dict[str, str] = {}
        self._is_walked = False
        self._failure: Exception | None = None

    def register(self, name: str, variant: T, *, where: str) -> T:
        """Add `variant` under `name`; `where` is its module, for the error of a duplicate."""
        if name in self._variants:
            raise ConfigError(
                f"{self.kind} {name!r} is registered twice: in {self._modules[name]} and in {where}; rename one of them"
            )
        self._variants[name] = variant
        self._modules[name] = where
        return variant

    def add(self, variant: T) -> T:
        """Register a class or an object under its `name`; also as a decorator."""
        entry: Any = variant
        return self.register(entry.name, variant, where=entry.__module__)

    def names(self) -> list[str]:
        """All names, sorted."""
        self._walk()
        return sorted(self._variants)

    def get(self, name: str) -> T:
        """The variant called `name`; an unknown name raises ConfigError with the nearest one."""
        self._walk()
        if name not in self._variants:
            raise ConfigError(unknown(self.kind, name, self.names()))
        return self._variants[name]

    def loaded_variants(self) -> dict[str, T]:
        """The variants registered so far; imports nothing."""
        return dict(self._variants)

    def __iter__(self) -> Iterator[tuple[str, T]]:
        self._walk()
        return iter(sorted(self._variants.items()))

    def unimported_modules(self) -> Iterator[tuple[str, Path]]:
        """Names and files of the modules that the first look-up will import; nothing after it."""
        if self._is_walked:
            return
        spec = importlib.util.find_spec(self.package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(set(Path(folder).rglob("*.py")) - set(Path(folder).rglob("__init__.py"))):
                yield ".".join((self.package, *path.relative_to(folder).with_suffix("").parts)), path
        for point in entry_points(group=self.group):
            with suppress(ModuleNotFoundError):  # the first look-up raises an error that names the package
                spec = importlib.util.find_spec(point.module)
                if spec and spec.origin and spec.origin.endswith(".py"):
                    yield point.module, Path(spec.origin)

    def _walk(self) -> None:
        """Import all modules once, in any thread; an error is raised again at every later look-up."""
        with _WALKING:
            if not self._is_walked:
                self._is_walked = True  # first, as an imported module may look a name up
                try:
                    self._import_all()
                except Exception as error:
                    self._failure = error
            if self._failure is not None:
                raise self._failure

    def _import_all(self) -> None:
        package = importlib.import_module(self.package)
        for module in pkgutil.walk_packages(package.__path__, f"{self.package}."):
            folder, _, name = module.name.removeprefix(f"{self.package}.").rpartition(".")
            if not (self.main and folder) or name == self.main:
                importlib.import_module(module.name)
        for point in entry_points(group=self.group):
            try:
                point.load()
            except Exception as error:
                source = point.dist.name if point.dist else point.value
                raise ConfigError(
                    f"the {self.kind} {point.name!r} of the installed package {source} cannot be loaded "
                    f"({type(error).__name__}: {error}); repair or uninstall {source}"
                ) from error


MAX_LISTED = 12  # names that an error lists
PLURALS = {"analysis": "analyses", "criterion": "criteria", "method": "criteria"}
"""Names of kinds in `headscope list`, which errors with long lists refer to."""


def unknown(kind: str, name: str, available: list[str]) -> str:
    """The message for a name that is not in `available`: the nearest names, and all of them if they are few."""
    near = get_close_matches(str(name), available, n=1 if len(available) <= MAX_LISTED else 3)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    if len(available) > MAX_LISTED and (near or kind in PLURALS or kind.startswith("option")):
        listing = f"`headscope list {PLURALS[kind]}` has all" if kind in PLURALS else f"there are {len(available)}"
        return f"unknown {kind} {name!r}; {hint}{listing}"
    return f"unknown {kind} {name!r}; {hint}available: {', '.join(available) or 'none'}"
