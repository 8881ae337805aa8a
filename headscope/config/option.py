"""An option: a field of a frozen dataclass, declared once; and configs of values of any origin. Imports no torch.

Commands, TOML files, keywords of Python, records of runs, `examples/config`, the reference pages and the protection of
inputs are made of these fields. pydantic checks values when there are some: `--help` imports none of it.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from headscope.errors import ConfigError, command_flag, flag
from headscope.registry import unknown

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

C = TypeVar("C")
TextLines = Path | list[str]
"""A text: its file, or from Python its sentences."""
WHOLE, REAL = 2**31 - 1, 1e38
"""Largest whole number and largest number of an option that declares no `maximum`."""
SEED = 2**63 - 2**31  # tables take 63 bits, and commands add a little to a seed
BEAM = 1000
RESAMPLES = 10_000  # an interval of 95 % needs about 1,000
POWER, RATIO, STEPS = 100.0, 100.0, 65_536  # of a length penalty, of a translation's length
MAX_LAYERS, MAX_HEADS, MAX_WIDTH = 2000, 1024, 2**20  # of a stack, of a layer, of anything in it
BOUNDS = {"minimum": "ge", "maximum": "le", "above": "gt", "below": "lt"}
WORDS = {
    **{"Value error, ": "", "Input should": "it must", "greater than or equal to": "at least", "greater": "more"},
    **{"less than or equal to": "at most", "a valid integer": "a whole number", "a valid number": "a number"},
    **{"Unable to parse input string as an integer, exceeded maximum size": "it must be a smaller number"},
    **{"a valid boolean": "True or False", "a valid string": "text"},
}
"""What pydantic says in its messages, and what headscope does."""
MAX_SHOWN = 60  # characters of a wrong value in a message


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    metavar: str | None = None,
    panel: str | None = None,
    name: str = "",
    argument: bool = False,
    common: bool = False,
    repeat: bool = False,
    flagless: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    of: str = "",
    excludes: str = "",
    is_output: bool = False,
    identity: bool = True,
    unset: str = "",
) -> Any:
    """A field of an options class; it becomes `--the-name`, the TOML key `the-name` and a keyword of Python.

    Types: bool, int, float, str, Path, Literal, any of them `| None`, `tuple[…, ...]`, written with commas, and
    `TextLines` of texts.

    panel: the heading in --help. name: the option's name where it is not the field's (`from` of `run`).
    argument: it has no name. repeat: entries of a tuple are given one by one, not with commas.
    common: --help has it, not --help-all alone. flagless: it is set by `--set NAME=VALUE`, in TOML and in Python.
    minimum, maximum, above, below: bounds of numbers, the last two exclusive.
    of: another option ("faithfulness"), several ("source|labels") or a value of one ("parse=stanza") without which it
        is refused. excludes: other options ("keep|max_drop") with which it is refused.
    is_output: a path that is an output; every other path is an input, which no output replaces.
    identity: False if it does not change what is computed. unset: a word for the default None of a number.
    """
    about = {name: value for name, value in locals().items() if name != "default"}
    about |= {"common": common or argument or default is MISSING, "identity": identity and not is_output}
    return field(default=default, metadata=about)


types_of: Callable[[Any], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))
"""The types of a class's fields. Not to be changed."""


def declared_options(cls: type[Any]) -> Iterator[tuple[Field[Any], Any]]:
    """The options of a config class with their types: fields that have a help text; the others are set by code."""
    hints = types_of(cls)
    return ((entry, hints[entry.name]) for entry in fields(cls) if entry.metadata.get("help"))


def make_config(cls: type[C], values: Mapping[str, Any], *, what: str = "", extra_names: Iterable[str] = ()) -> C:
    """A config of values from the command line, a TOML file, Python or a record of a run.

    ConfigError for an unknown or missing name (of `what`, which also has `extra_names`), a value of a wrong type or out
    of bounds, and an option that is about another one which is not given.
    """
    hints, entries = types_of(cls), {entry.name: entry for entry in fields(cls)}  # type: ignore[arg-type]
    if strange := sorted(set(values) - set(entries)):
        kind = f"option of {what}" if what else "option"
        raise ConfigError(unknown(kind, strange[0], sorted({*entries, *extra_names})))
    field_values = {name: checked_value(entries[name], hints[name], value) for name, value in values.items()}
    for entry in entries.values():
        if entry.default is MISSING and entry.default_factory is MISSING and entry.name not in values:
            about = first_sentence(entry.metadata.get("help", ""))
            raise ConfigError(f"{flag_of(entry)} is missing" + (f" ({about.rstrip('.')})" if about else ""))
    config = cls(**field_values)
    _check_companions(config)
    return config


def take_config(cls: type[C], values: Mapping[str, Any]) -> C:
    """A config of those values that are of its fields; fields that they lack have their defaults."""
    return pop_config(cls, dict(values))


def pop_config(cls: type[C], values: dict[str, Any]) -> C:
    """A config of those values that are of its fields, which are taken out."""
    names = [entry.name for entry in fields(cls) if entry.name in values]  # type: ignore[arg-type]
    return make_config(cls, {name: values.pop(name) for name in names})


def checked_value(entry: Field[Any], hint: Any, value: Any) -> Any:
    """A value as the type of its field; ConfigError in one line."""
    about = entry.metadata
    if isinstance(value, str):
        value = None if value == (about.get("unset") or None) else value
        if value is not None and not value.strip(" ,") and value != entry.default:
            raise ConfigError(f"{flag_of(entry)} is empty; give it a value, or leave it out")
    if value is None and get_origin(hint) is tuple:
        return ()
    bounds = tuple((BOUNDS[name], about[name]) for name in BOUNDS if about.get(name) is not None)
    return convert_value(flag_of(entry), hint, value, bounds=bounds, word=about.get("unset", ""))


def check_fields(config: Any) -> None:
    """ConfigError for a value that its field's type does not allow, of a config that Python made."""
    hints = types_of(type(config))
    for entry in fields(config):
        checked_value(entry, hints[entry.name], getattr(config, entry.name))
    _check_companions(config)


def convert_value(
    name: str, hint: Any, value: Any, *, bounds: tuple[tuple[str, float], ...] = (), word: str = ""
) -> Any:
    """A value as a type has it; ConfigError that calls it `name`, and says that `word` may stand for it."""
    from pydantic import ValidationError

    try:
        return _adapter(hint, bounds).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{name} is {format_value(value)}; {_demand(error)}{f' or {word}' if word else ''}") from None


def _demand(error: ValidationError) -> str:
    """pydantic's complaint as a demand, with the nearest of a few words."""
    first = error.errors()[0]
    text = re.sub(r", (unable|got) .*", "", first["msg"])
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    if place := [part for part in first["loc"] if isinstance(part, int)]:
        text = text.replace("it must", f"its entry {place[0] + 1} must", 1)
    words = re.findall(r"'([^']+)'", text)
    near = get_close_matches(first["input"], words, n=1) if words and isinstance(first["input"], str) else []
    return text + (f"; did you mean {near[0]!r}?" if near else "")


@cache
def _adapter(hint: Any, bounds: tuple[tuple[str, float], ...]) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(_for_pydantic(hint, dict(bounds)))


def _for_pydantic(hint: Any, bounds: Mapping[str, float]) -> Any:
    """A type that also takes equivalents: lists as text with commas, paths as text, numbers of numpy."""
    from pydantic import BeforeValidator, Field, InstanceOf, Strict

    origin, parts = get_origin(hint), get_args(hint)
    if list[str] in parts:
        return Annotated[Any, BeforeValidator(_text)] | None
    if origin in (Union, types.UnionType):
        (inner,) = (part for part in parts if part is not type(None))
        return _for_pydantic(inner, bounds) | None
    if origin is Annotated:
        return Annotated[(_for_pydantic(parts[0], bounds), *parts[1:])]
    if origin is tuple:
        entry: Any = _for_pydantic(parts[0], bounds)
        return Annotated[tuple[entry, ...], BeforeValidator(_entries)]
    if hint is bool:
        return Annotated[bool, Strict()]
    if hint in (int, float):
        limits: dict[str, Any] = {"ge": -WHOLE, "le": WHOLE}
        if hint is float:
            limits = {"ge": -REAL, "le": REAL, "allow_inf_nan": False}
        return Annotated[hint, BeforeValidator(_number), Field(**{**limits, **bounds})]
    if hint is str:
        return Annotated[str, BeforeValidator(lambda value: fspath(value) if isinstance(value, PathLike) else value)]
    if is_dataclass(hint):
        config: Any = hint
        instance: Any = InstanceOf
        restore = BeforeValidator(lambda value: make_config(config, value) if isinstance(value, Mapping) else value)
        return Annotated[instance[config], restore]
    return hint


def _entries(value: Any) -> Any:
    """Text with commas, or whatever can be gone through, as a tuple; one number is a tuple of it."""
    if isinstance(value, (int, float, PathLike)):
        return (value,)
    if isinstance(value, (Mapping, bytes)) or not isinstance(value, Iterable):
        raise ValueError("give a list")
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("give a number")
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _text(value: Any) -> Any:
    """A text is a file, or the list of its sentences. A table would give the names of its columns."""
    if value is None:
        return None
    if isinstance(value, (str, PathLike)):
        return value if isinstance(value, Path) else Path(value)
    if isinstance(value, (bytes, Mapping, Set)) or hasattr(value, "columns") or not isinstance(value, Iterable):
        raise ValueError("give a file's path or a list of sentences")
    return list(value)


def format_value(value: object) -> str:
    """A value in a message, short and in one line."""
    if isinstance(value, int) and abs(value) >= 10**24:
        return f"a number of {value.bit_length()} bits"
    text = " ".join((str(value) if isinstance(value, (int, float)) else repr(value)).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _check_companions(config: Any) -> None:
    """ConfigError for an option that is given beside one it excludes, or without one that it is about (`of`)."""
    entries = {entry.name: entry for entry in fields(config)}
    for entry in entries.values():
        if getattr(config, entry.name) in (entry.default, ()):
            continue
        for rival in filter(None, entry.metadata.get("excludes", "").split("|")):
            if getattr(config, rival) not in (None, False, ()):
                raise ConfigError(f"{flag_of(entry)} and {flag_of(entries[rival])} exclude each other; give one")
        other, _, words = entry.metadata.get("of", "").partition("=")
        names, choices = other.split("|"), words.split("|")
        values = [getattr(config, name, None) for name in names]
        if other and not (str(values[0]) in choices if words else any(values)):
            companion_flag = flag_of(entries[names[0]]) if names[0] in entries else flag(names[0])
            word = f" {choices[0]}" if words else ""
            raise ConfigError(f"{flag_of(entry)} is about {companion_flag}{word}; give that too")


def first_sentence(text: str) -> str:
    """The first sentence of an explanation."""
    return re.split(r"(?<=\.) (?=[A-Z-])", text, maxsplit=1)[0]


def identity(config: Any) -> dict[str, Any]:
    """The options that shape the results, as JSON values, but for files, which digests identify."""
    hints = types_of(type(config))
    names = [entry.name for entry in fields(config) if entry.metadata.get("identity", True)]
    computing = [name for name in names if hints[name] is not Path and Path not in get_args(hints[name])]
    return {name: plain_value(getattr(config, name)) for name in computing}


def changed_options(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The options that are others than `before`."""
    return [name for name, value in now.items() if before.get(name) != value]


def option_name(entry: Field[Any]) -> str:
    """An option's name, which its field may not have."""
    return (entry.metadata.get("name") or entry.name).replace("-", "_")


def flag_of(entry: Field[Any]) -> str:
    """An option in a message."""
    return flag(option_name(entry)) if entry.metadata else entry.name


def typed_words(name: str, value: Any, *, flagless: bool) -> list[str]:
    """An option with its value as words of a command line: `--keep 3`, `--set long=truncate`."""
    text = "true" if value is True else ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    if flagless:
        return [command_flag("set"), f"{name.replace('_', '-')}={text}"]
    return [command_flag(name), *([] if value is True else [text])]


def plain_options(config: Any) -> dict[str, Any]:
    """The fields of a config as JSON values."""
    return {field.name: plain_value(getattr(config, field.name)) for field in fields(config)}


def plain_value(value: Any) -> Any:
    """A value as JSON has it: tuples as lists, paths as text, configs as tables, None for a text in memory (a list)."""
    if isinstance(value, list):
        return None
    if isinstance(value, tuple):
        return [plain_value(entry) for entry in value]
    if isinstance(value, Mapping):
        return {name: plain_value(entry) for name, entry in value.items()}
    if is_dataclass(value):
        return plain_options(value)
    return str(value) if isinstance(value, Path) else value


def plain_config(config: Any) -> dict[str, Any]:
    """A config, and those within it, as tables of plain values, without fields that are None or empty tables."""
    values = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    plain = {name: plain_config(value) if is_dataclass(value) else plain_value(value) for name, value in values.items()}
    return {name: value for name, value in plain.items() if value is not None and value != {}}


@dataclass(frozen=True)
class NoOptions:
    """For what takes no options. Options classes check in `__post_init__` what several options say together."""


MIN_UNITS = 10
"""Sentences that a test needs, and that must be divided in themselves before instances count for more than one each."""


@dataclass(frozen=True)
class LabelOptions:
    """Options of analyses that label heads (`headscope.engine.evidence.report`); their own may inherit them."""

    min_instances: int = option(
        20, "Instances that a label needs; with relations=all rarer relations are left out.", metavar="N", minimum=1
    )


@dataclass(frozen=True)
class PublishedLabelOptions(LabelOptions):
    """Options of analyses with a paper's labels, with the rule for giving them."""

    label_rule: Literal["tested", "published"] = option(
        "tested", "Labels of positional, syntactic and rare heads: by tests, or by estimates (Voita et al. 2019)."
    )
