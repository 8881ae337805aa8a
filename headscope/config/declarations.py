"""What analyses declare (options, columns, functions of heads, figures), read without importing torch.

`--help` and figures need these declarations, and importing the analyses takes too long for them. So the file of an
analysis is run with stand-ins for all imports but `LIGHT` ones. Where that fails, the analysis is imported.
"""

from __future__ import annotations

import builtins
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal, TypeVar

from headscope.config.option import NoOptions, take_config, types_of
from headscope.errors import ConfigError, flag, flags
from headscope.registry import Registry, unknown

REGISTRY: Registry[Any] = Registry("analysis", package="headscope.analyses")
"""The analyses by name; `headscope.engine.base.ANALYSES` is the same registry with its type."""


@dataclass(frozen=True)
class Measure:
    """A column of heads.csv: how figures show it, and which end of it matters when heads are ranked by it.

    `title` (default: the name in words) and `unit` label the colour scale. The scale has the colours `cmap` of
    matplotlib and covers `range`, in which None is the smallest or largest value. The scale of a `signed` column has
    zero in its middle. `overview` is the column's rank among the maps that are drawn of every run, 0 if it has none.

    `keep` says which heads stay when heads are ranked by the column: those with the "highest" or the "lowest" values.
    `why` completes "the others are removed first, as …". Of a column with an empty `keep` the user gives the direction.
    `needs` is what the column needs beyond the needs of its analysis, such as "parse".

    Values `within_layer`, such as shares of a layer, compare the heads of one layer only. Heads of several layers are
    ranked by the column `across` instead, if there is one.
    """

    name: str
    title: str = ""
    unit: str = ""
    range: tuple[float | None, float | None] = (None, None)
    cmap: str = ""
    overview: int = 0
    keep: Literal["", "highest", "lowest"] = ""
    why: str = ""
    signed: bool = False
    needs: str = ""
    within_layer: bool = False
    across: str = ""

    def __post_init__(self) -> None:
        if not self.cmap:
            object.__setattr__(self, "cmap", "RdBu_r" if self.signed else "viridis")

    @property
    def words(self) -> str:
        """The title, or the name in words."""
        return (self.title or self.name.replace("_", " ")) + ", within its layer" * self.within_layer

    @property
    def orders(self) -> bool:
        """Whether the column orders the heads of all layers."""
        return bool(self.keep) and not self.within_layer

    @property
    def label(self) -> str:
        """The title with the unit."""
        return f"{self.words} ({self.unit})" if self.unit else self.words


@dataclass(frozen=True)
class HeadFunction:
    """A kind of function that heads have; `name` begins its labels (`positional` in `positional:-1`).

    Figures mark its heads with `glyph` and `letter` in `color`, and explain it by `meaning`; `order` sorts legends.
    `detail` is the kind of text after the colon: a number of tokens ("offset"), a dependency relation ("relation"), or
    one that figures leave out ("").
    """

    name: str
    glyph: str
    letter: str
    color: str
    meaning: str
    order: int = 100
    detail: Literal["", "offset", "relation"] = ""


@dataclass(frozen=True)
class AnalysisFigure:
    """A figure of one analysis: `headscope plot NAME`, `study.plot(NAME)`, and in the figures folder of a run.

    `draw(run, sheet, options)` draws a run (`headscope.results.study.Study`) into a `headscope.report.sheet.Sheet`;
    `options` is an instance of `Options`. It is "module:function", or a function in the analysis' own file that imports
    matplotlib in its body. It raises MissingTable where the run lacks the data. `file` is the figure's name in the
    folder (default: `name`). `from_pickle` and `from_checkpoint` ("module:function") read a run from another file.
    """

    name: str
    summary: str
    draw: Callable[..., Any] | str
    file: str = ""
    Options: type[Any] = NoOptions
    from_pickle: str = ""
    from_checkpoint: str = ""

    @property
    def stem(self) -> str:
        """The file's name without its ending."""
        return self.file or self.name


class Declared:
    """What every class in a registry declares by attributes that can be read without importing torch."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    Options: ClassVar[type[Any]] = NoOptions


class Declaration(Declared):
    """The declaration of an analysis; `headscope.engine.base.Analysis` explains the attributes."""

    group: ClassVar[str] = ""
    order: ClassVar[int] = 100
    needs: ClassVar[frozenset[str]] = frozenset()
    measures: ClassVar[tuple[Measure, ...]] = ()
    pairs: ClassVar[tuple[Measure, ...]] = ()
    functions: ClassVar[tuple[HeadFunction, ...]] = ()
    figures: ClassVar[tuple[AnalysisFigure, ...]] = ()


D = TypeVar("D", bound=Declared)


@dataclass(frozen=True)
class DeclaredOption:
    """An option of one or several analyses: its field (`headscope.config.option.option`), its type and its owners."""

    field: Field[Any]
    type: Any
    analyses: tuple[str, ...]


def declarations(*attributes: str) -> tuple[type[Declaration], ...]:
    """The declarations of analyses with any of these attributes, in the order of their columns in heads.csv."""
    analyses = read_declarations(Declaration, REGISTRY, *attributes)
    return tuple(sorted(analyses, key=lambda declaration: (declaration.order, declaration.name)))


def read_declarations(cls: type[D], registry: Registry[Any], *attributes: str) -> tuple[type[D], ...]:
    """The classes of a registry that declare any of these attributes (default: `name`), read without torch."""
    base: Any = cls
    modules = read_sources(registry, rf"(?m)^    ({'|'.join(attributes or ('name',))})\b.*= ", base)
    variants = {variant.name: variant for module in modules for variant in module.get("registered", ())}
    return tuple((variants | registry.loaded_variants()).values())


def measured_columns() -> dict[str, tuple[type[Declaration], Measure]]:
    """The analysis and the measure of every declared column of heads.csv, by the column's name."""
    return {measure.name: (analysis, measure) for analysis in declarations("measures") for measure in analysis.measures}


def measure_of(column: str) -> Measure:
    """The measure of a column of heads.csv; one with defaults if no analysis declares the column."""
    measures = measured_columns()
    return measures[column][1] if column in measures else Measure(column)


def head_functions() -> dict[str, HeadFunction]:
    """The functions of heads by name, in the order of legends."""
    functions = (function for analysis in declarations("functions") for function in analysis.functions)
    return {function.name: function for function in sorted(functions, key=lambda function: function.order)}


def import_target(target: Callable[..., Any] | str) -> Callable[..., Any]:
    """A function, or the one that "module:function" names; one from a module with stand-ins is imported properly."""
    if not isinstance(target, str):
        if not target.__module__.endswith(WITH_STAND_INS):
            return target
        target = f"{target.__module__.removesuffix(WITH_STAND_INS)}:{target.__qualname__}"
    module, _, name = target.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def analysis_options() -> dict[str, DeclaredOption]:
    """The options of all analyses by name; ConfigError where two analyses give a name different types or defaults."""
    options: dict[str, DeclaredOption] = {}
    for analysis in declarations("Options"):
        hints = types_of(analysis.Options)
        for option in fields(analysis.Options):
            first = options.get(option.name)
            if first and (first.type, first.field.default) != (hints[option.name], option.default):
                raise ConfigError(f"{first.analyses[0]} and {analysis.name} both have {flag(option.name)}; rename one")
            owners = (*(first.analyses if first else ()), analysis.name)
            options[option.name] = DeclaredOption(option, hints[option.name], owners)
    return options


def checked_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all options of analyses by name: checked ones, and defaults for the others.

    Paths may be text, as in run.json. ConfigError for an option that no analysis has, and for a value that is not
    allowed.
    """
    options = analysis_options()
    for name in values:
        if name not in options:
            raise ConfigError(unknown("option of analyses", name, sorted(options)))
    values_by_name: dict[str, Any] = {}
    for analysis in declarations("Options"):
        values_by_name |= vars(take_config(analysis.Options, values))
    return values_by_name


def refuse_idle_options(values: Mapping[str, Any], running: Sequence[str], why: Mapping[str, str]) -> None:
    """ConfigError for options whose analyses are not `running`, so that their values would be ignored.

    `why` says for every other analysis why it does not run, or how to run it.
    """
    idle: dict[str, list[str]] = {}
    for name, option in analysis_options().items():
        owners = [owner for owner in option.analyses if owner in why]
        is_idle = owners and not {*running} & {*option.analyses}
        if is_idle and values.get(name, option.field.default) != option.field.default:
            idle.setdefault(owners[0], []).append(name)
    for analysis, names in idle.items():
        verb = "are" if len(names) > 1 else "is"
        raise ConfigError(f"{flags(*names)} {verb} about the analysis {analysis}; {why[analysis]}")


def rankable_columns() -> dict[str, Measure]:
    """The columns of heads.csv that `prune rank` can measure; it has no parses and no prompts."""
    unavailable = {"contrast", "exclude_sinks", "parse", "template", "word_times"}
    columns = measured_columns().items()
    return {
        name: measure
        for name, (analysis, measure) in columns
        if unavailable.isdisjoint({*analysis.needs, measure.needs})
    }


def criterion_names() -> list[str]:
    """Names of criteria, read from the files that register them."""
    folder = "headscope.pruning.ranking.criteria"
    criteria: Registry[Any] = Registry("criterion", package=folder, group="headscope.criteria")
    return sorted(criterion.name for criterion in read_declarations(Declared, criteria))


LIGHT = {"headscope.config", "headscope.config.declarations", "headscope.errors", "headscope.heads"}
"""Modules that import no torch; declarations may use these and the standard library."""
WITH_STAND_INS = ":declared"
"""Suffix of the name of a module that was run with stand-ins."""


class StandIn:
    """Replaces an import that is not light: attributes, items and results are itself; as a base class it is `base`."""

    def __init__(self, base: type | None) -> None:
        self.base = base

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *values: Any, **options: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return () if self.base is None else (self.base,)


@lru_cache(maxsize=32)
def read_sources(registry: Registry[Any], pattern: str, base: type | None = None) -> list[dict[str, Any]]:
    """The namespaces of a registry's modules that were not imported yet and whose source matches a pattern.

    Their classes inherit from `base` instead of a class that was not imported.
    """
    sources, modules = dict(registry.unimported_modules()), list[dict[str, Any]]()
    for name, path in sources.items():
        if re.search(pattern, path.read_text(encoding="utf-8")):
            try:
                modules.append(read_module(name, sources, registry.kind, base))
            except Exception:  # its statements need more than stand-ins, and may raise anything
                registry.names()  # raises an error that names the package, if it cannot be imported either
                modules.append(vars(importlib.import_module(name)))
    return modules


def read_module(name: str, sources: Mapping[str, Path], kind: str, base: type | None) -> dict[str, Any]:
    """The namespace of a module that is run with stand-ins; its "registered" are the classes decorated with `@kind`."""
    module: Any = ModuleType(name + WITH_STAND_INS)
    sys.modules[name + WITH_STAND_INS] = module
    stand_in, module.registered = StandIn(base), []

    def register(cls: type) -> type:
        module.registered.append(cls)
        return cls

    def import_light(other: str, *details: Any) -> Any:
        if other in sources:
            return SimpleNamespace(**{**read_module(other, sources, kind, base), kind: register})
        is_light = other in LIGHT or other.partition(".")[0] in sys.stdlib_module_names
        return __import__(other, *details) if is_light else stand_in

    setattr(stand_in, kind, register)
    module.__builtins__ = {**vars(builtins), "__import__": import_light}
    code: Any = SourceFileLoader(name, str(sources[name])).get_code(name)
    exec(code, vars(module))
    return vars(module)


ENGINES: Registry[Any] = Registry("engine", package="headscope.export", group="headscope.engines")
"""The engines by name; `headscope.export.base.ENGINES` is the same registry with its type."""


class EngineDeclaration(Declared):
    """The declaration of an engine; `headscope.export.base.EngineExport` explains the attributes."""

    endings: ClassVar[tuple[str, ...]] = ()
    allocation: ClassVar[str] = ""


def declared_engines() -> list[type[EngineDeclaration]]:
    """Every engine by name, other installed packages' included."""
    return sorted(read_declarations(EngineDeclaration, ENGINES), key=lambda engine: engine.name)
