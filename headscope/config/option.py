"""Options, declared once as fields of frozen dataclasses, and configs made of checked values. Imports no torch.

Commands, TOML files, keywords of Python, records of runs, `examples/config`, the reference pages and the protection of
inputs all read these fields. pydantic is imported only to check a value, so that `--help` stays fast.
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
"""A text: the path of its file, or (from Python) the list of its sentences."""
WHOLE, REAL = 2**31 - 1, 1e38
"""Largest whole number and largest number of an option that declares no `maximum`."""
SEED = 2**63 - 2**31  # the largest one: tables take 63 bits, and commands add a little to a seed
BEAM, RESAMPLES = 1000, 10_000  # the largest ones; a 95 % interval needs about 1,000 resamples
POWER, RATIO, STEPS = 100.0, 100.0, 65_536  # largest lenpen, max_len_a, and length of a translation
MAX_LAYERS, MAX_HEADS, MAX_WIDTH = 2000, 1024, 2**20  # largest layers of a stack, heads of a layer, and any dimension
BOUNDS = {"minimum": "ge", "maximum": "le", "above": "gt", "below": "lt"}
PLAIN_WORDS = {
    **{"Value error, ": "", "Input should": "it must", "greater than or equal to": "at least", "greater": "more"},
    **{"less than or equal to": "at most", "a valid integer": "a whole number", "a valid number": "a number"},
    **{"Unable to parse input string as an integer, exceeded maximum size": "it must be a smaller number"},
    **{"a valid boolean": "True or False", "a valid string": "text"},
}
"""Phrases of pydantic's messages, and those that headscope's messages have instead."""
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
    needs: str = "",
    excludes: str = "",
    is_output: bool = False,
    identity: bool = True,
    unset: str = "",
) -> Any:
    """A field of an options class; it becomes `--the-name`, the TOML key `the-name` and a keyword of Python.

    Types: bool, int, float, str, Path, Literal, any of them `| None`, `tuple[…, ...]` (written with commas), and
    `TextLines` for texts.

    panel: the heading in --help. name: the option's name where it is not the field's (`from` for the field `run`).
    argument: it is positional. repeat: a tuple is given by repeating the option, not with commas.
    common: --help lists it; other options are in --help-all alone.
    flagless: it has no flag of its own, and is set by `--set NAME=VALUE`, in TOML or in Python.
    minimum, maximum, above, below: bounds of numbers, the last two exclusive.
    needs: the option that it requires ("faithfulness"), one of several ("source|labels"), or a value ("parse=stanza").
    excludes: the options that it cannot be combined with ("keep|max_drop").
    is_output: a path that is written. Every other path is an input, which no output may replace.
    identity: False if it does not change what is computed. unset: a word for a number's default None ("auto").
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    metadata |= {"common": common or argument or default is MISSING, "identity": identity and not is_output}
    return field(default=default, metadata=metadata)


types_of: Callable[[Any], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))
"""The types of a class's fields, by name; cached, so callers must not change the dictionary."""


def declared_options(cls: type[Any]) -> Iterator[tuple[Field[Any], Any]]:
    """The options of a config class with their types: its fields that have a help text. Code sets the other fields."""
    hints = types_of(cls)
    return ((entry, hints[entry.name]) for entry in fields(cls) if entry.metadata.get("help"))


def make_config(cls: type[C], values: Mapping[str, Any], *, what: str = "", extra_names: Iterable[str] = ()) -> C:
    """A config with checked values, which come from the command line, a TOML file, Python or the record of a run.

    `what` ("prune rank") is whose options errors say these are, `extra_names` further options that it has.
    ConfigError for an unknown or missing name, a value of a wrong type or out of bounds, an option without the one that
    it requires, and options that exclude each other.
    """
    hints, entries = types_of(cls), {entry.name: entry for entry in fields(cls)}  # type: ignore[arg-type]
    if unknown_names := sorted(set(values) - set(entries)):
        kind = f"option of {what}" if what else "option"
        raise ConfigError(unknown(kind, unknown_names[0], sorted({*entries, *extra_names})))
    field_values = {name: checked_value(entries[name], hints[name], value) for name, value in values.items()}
    for entry in entries.values():
        if entry.default is MISSING and entry.default_factory is MISSING and entry.name not in values:
            explanation = first_sentence(entry.metadata.get("help", "")).rstrip(".")
            raise ConfigError(f"{flag_of(entry)} is missing" + (f" ({explanation})" if explanation else ""))
    config = cls(**field_values)
    _check_companions(config)
    return config


def take_config(cls: type[C], values: Mapping[str, Any]) -> C:
    """A config of the values that are named like its fields; other values are ignored."""
    return pop_config(cls, dict(values))


def pop_config(cls: type[C], values: dict[str, Any]) -> C:
    """A config of the values that are named like its fields, which are removed from `values`."""
    names = [entry.name for entry in fields(cls) if entry.name in values]  # type: ignore[arg-type]
    return make_config(cls, {name: values.pop(name) for name in names})


def checked_value(entry: Field[Any], hint: Any, value: Any) -> Any:
    """A value, converted to the type of its field; ConfigError where that or its bounds forbid it."""
    metadata = entry.metadata
    if isinstance(value, str):
        value = None if value == (metadata.get("unset") or None) else value
        if value is not None and not value.strip(" ,") and value != entry.default:
            raise ConfigError(f"{flag_of(entry)} is empty; give it a value, or leave it out")
    if value is None and get_origin(hint) is tuple:
        return ()
    bounds = tuple((BOUNDS[name], metadata[name]) for name in BOUNDS if metadata.get(name) is not None)
    return convert_value(flag_of(entry), hint, value, bounds=bounds, word=metadata.get("unset", ""))


def check_fields(config: Any) -> None:
    """ConfigError for values that the fields' types do not allow, in a config that was made without `make_config`."""
    hints = types_of(type(config))
    for entry in fields(config):
        checked_value(entry, hints[entry.name], getattr(config, entry.name))
    _check_companions(config)


def convert_value(
    name: str, hint: Any, value: Any, *, bounds: tuple[tuple[str, float], ...] = (), word: str = ""
) -> Any:
    """A value, converted to a type; the ConfigError for another one calls it `name` and also allows `word`."""
    from pydantic import ValidationError

    try:
        return _adapter(hint, bounds).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{name} is {format_value(value)}; {_demand(error)}{f' or {word}' if word else ''}") from None


def _demand(error: ValidationError) -> str:
    """What the value must be, by pydantic's error, and the allowed word that is nearest to it."""
    first = error.errors()[0]
    text = re.sub(r", (unable|got) .*", "", first["msg"])
    for phrase, replacement in PLAIN_WORDS.items():
        text = text.replace(phrase, replacement)
    if indices := [part for part in first["loc"] if isinstance(part, int)]:
        text = text.replace("it must", f"its entry {indices[0] + 1} must", 1)
    words = re.findall(r"'([^']+)'", text)
    near = get_close_matches(first["input"], words, n=1) if words and isinstance(first["input"], str) else []
    return text + (f"; did you mean {near[0]!r}?" if near else "")


@cache
def _adapter(hint: Any, bounds: tuple[tuple[str, float], ...]) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(_for_pydantic(hint, dict(bounds)))


def _for_pydantic(hint: Any, bounds: Mapping[str, float]) -> Any:
    """The type for pydantic, which also converts text with commas to tuples, text to paths and numpy's numbers."""
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
    """The tuple of an iterable, or of text with commas; a number or a path becomes a tuple of one."""
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
    """The path of a text, or the list of its sentences; tables are refused, as they iterate over names of columns."""
    if value is None:
        return None
    if isinstance(value, (str, PathLike)):
        return value if isinstance(value, Path) else Path(value)
    if isinstance(value, (bytes, Mapping, Set)) or hasattr(value, "columns") or not isinstance(value, Iterable):
        raise ValueError("give a file's path or a list of sentences")
    return list(value)


def format_value(value: object) -> str:
    """A value for a message: in one line, cut off if it is long."""
    if isinstance(value, int) and abs(value) >= 10**24:
        return f"a number of {value.bit_length()} bits"
    text = " ".join((str(value) if isinstance(value, (int, float)) else repr(value)).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _check_companions(config: Any) -> None:
    """ConfigError for an option given beside one that it `excludes`, or without one that it `needs`."""
    entries = {entry.name: entry for entry in fields(config)}
    for entry in entries.values():
        if getattr(config, entry.name) in (entry.default, ()):
            continue
        for rival in filter(None, entry.metadata.get("excludes", "").split("|")):
            if getattr(config, rival) not in (None, False, ()):
                raise ConfigError(f"{flag_of(entry)} and {flag_of(entries[rival])} exclude each other; give one")
        required, _, words = entry.metadata.get("needs", "").partition("=")
        names, choices = required.split("|"), words.split("|")
        values = [getattr(config, name, None) for name in names]
        if required and not (str(values[0]) in choices if words else any(values)):
            companion_flag = flag_of(entries[names[0]]) if names[0] in entries else flag(names[0])
            word = f" {choices[0]}" if words else ""
            raise ConfigError(f"{flag_of(entry)} requires {companion_flag}{word}")


def first_sentence(text: str) -> str:
    """The first sentence of a text."""
    return re.split(r"(?<=\.) (?=[A-Z-])", text, maxsplit=1)[0]


def identity(config: Any) -> dict[str, Any]:
    """The options that change what is computed, as JSON values; without files, which digests identify."""
    hints = types_of(type(config))
    names = [entry.name for entry in fields(config) if entry.metadata.get("identity", True)]
    not_files = [name for name in names if hints[name] is not Path and Path not in get_args(hints[name])]
    return {name: plain_value(getattr(config, name)) for name in not_files}


def changed_options(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The names of options whose values differ from those `before`."""
    return [name for name, value in now.items() if before.get(name) != value]


def option_name(entry: Field[Any]) -> str:
    """An option's name, with underscores; the field's own unless it declares another one."""
    return (entry.metadata.get("name") or entry.name).replace("-", "_")


def flag_of(entry: Field[Any]) -> str:
    """An option as messages call it: `--max-length` or `max_length`."""
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
    """A value for JSON: tuples become lists, paths text, configs dictionaries, and a text in memory (a list) None."""
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
    """A config and the configs in its fields as nested dictionaries, without fields that are None or empty."""
    values = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    plain = {name: plain_config(value) if is_dataclass(value) else plain_value(value) for name, value in values.items()}
    return {name: value for name, value in plain.items() if value is not None and value != {}}


@dataclass(frozen=True)
class NoOptions:
    """The options of an analysis, figure or criterion that has none."""


MIN_UNITS = 10
"""Fewest sentences that a test of labels needs; also the fewest with mixed outcomes from which it takes a variance."""


@dataclass(frozen=True)
class LabelOptions:
    """Options of analyses that label heads (`headscope.engine.evidence.report`); their own may inherit them."""

    min_instances: int = option(
        20, "Instances that a label needs; with relations=all rarer relations are left out.", metavar="N", minimum=1
    )


@dataclass(frozen=True)
class PublishedLabelOptions(LabelOptions):
    """Options of analyses whose labels a paper defines: whether its estimates alone decide."""

    label_rule: Literal["tested", "published"] = option(
        "tested", "Labels of positional, syntactic and rare heads: by tests, or by estimates (Voita et al. 2019)."
    )
