"""Conversion of frozen config classes to plain values and back, and TOML files."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from headscope.errors import ConfigError, reason_of
from headscope.files.reading import read_text

C = TypeVar("C")
Problems = list[str]
TOML_BYTES, KEY_PARTS, LARGEST = 1 << 20, 32, 2**31 - 1
SHOWN = 5  # problems that an error names


def to_plain(config: Any) -> dict[str, Any]:
    """A config as nested dictionaries of plain values, without the fields that are None or empty tables."""
    values: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            value = to_plain(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        if value is not None and value != {}:
            values[field.name] = value
    return values


def from_plain(cls: type[C], values: Mapping[str, Any]) -> C:
    """Inverse of `to_plain`; ConfigError names every unknown, missing and ill-typed field at once."""
    problems: Problems = []
    config: C | None = _build(cls, values, "", problems)
    if problems or config is None:
        others = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ConfigError("; ".join([*problems[:SHOWN], *others]))
    return config


def types_of(cls: type[Any]) -> dict[str, Any]:
    """The types of a class's fields, worked out once: that takes longer than most uses of them. Not to be changed."""
    if cls not in _TYPES:
        _TYPES[cls] = get_type_hints(cls)
    return _TYPES[cls]


_TYPES: dict[type[Any], dict[str, Any]] = {}


def _build(cls: type[Any], values: Mapping[str, Any], prefix: str, problems: Problems) -> Any:
    """An instance of a config class, or None after adding to `problems`."""
    hints = types_of(cls)
    known = {field.name for field in fields(cls)}
    before = len(problems)
    for name in sorted(set(values) - known):
        near = get_close_matches(name, sorted(known), n=1) if len(problems) < SHOWN else []
        problems.append(f"unknown field {prefix}{name[:60]}" + (f" (did you mean {near[0]}?)" if near else ""))
    for field in fields(cls):
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            problems.append(f"field {prefix}{field.name} is missing")
    arguments = {
        name: _value(hints[name], value, f"{prefix}{name}", problems) for name, value in values.items() if name in known
    }
    if len(problems) > before:
        return None
    try:
        return cls(**arguments)
    except ConfigError as error:
        problems.append(f"{prefix.rstrip('.')}: {error}" if prefix else str(error))
        return None


def _value(hint: Any, value: Any, name: str, problems: Problems) -> Any:
    if get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if is_dataclass(hint) and isinstance(value, Mapping):
        return _build(hint, value, f"{name}.", problems)  # type: ignore[arg-type]
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)) and all(_is_int(part) for part in value):
        return tuple(value)
    if (get_origin(hint) is Literal or hint is str) and isinstance(value, str):
        return value
    if hint is float and type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max:
        return float(value)
    if (hint is int and _is_int(value)) or (hint is bool and type(value) is bool):
        return value
    simple = isinstance(value, Mapping) and all(isinstance(part, (str, int, float)) for part in value.values())
    if get_origin(hint) not in (tuple, Literal, None) and simple:
        return dict(value)
    problems.append(f"field {name} is {_shown(value)}, which is of the wrong type or size")
    return None


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) <= LARGEST


def _shown(value: Any) -> str:
    try:
        return repr(str(value)[:40])
    except (ValueError, RecursionError):  # a number of thousands of digits
        return f"a {type(value).__name__} that is too large to show"


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file; ConfigError where it cannot be read, or has keys of more than `KEY_PARTS` parts."""
    if sys.version_info >= (3, 11):
        import tomllib  # novm: the other branch is for 3.10
    else:
        import tomli as tomllib
    text = read_text(path, error=ConfigError, limit=TOML_BYTES)
    if _longest_key(text) > KEY_PARTS:  # the parser's time is quadratic in them
        raise ConfigError(f"{path} is no TOML of headscope: a key has more than {KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers of thousands of digits
        raise ConfigError(f"{path} is no TOML: {reason_of(error, most=200)}") from None


_TOKEN = re.compile(r"""(?P<name>[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?)|(?P<blank>[ \t]+)|.""", re.DOTALL)


def _longest_key(text: str) -> int:
    """The most parts of anything in a TOML text that looks like `a.b."c"`, in time linear in the text."""
    longest, parts, dotted = 0, 0, False
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "name":
            parts = parts + 1 if dotted else 1
            longest, dotted = max(longest, parts), False
        elif token.lastgroup is None:
            dotted = token[0] == "." and not dotted
            parts = parts if dotted else 0
    return longest


def to_toml(values: Mapping[str, Any], *, table: str = "") -> str:
    """Nested dictionaries of plain values as TOML: the values of a table first, then its tables."""
    lines = [f"{_key(name)} = {_toml(value)}" for name, value in values.items() if not isinstance(value, Mapping)]
    text = "".join(f"{line}\n" for line in ([f"[{table}]"] if table and lines else []) + lines)
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = to_toml(value, table=f"{table}.{_key(name)}" if table else _key(name))
            text += f"\n{inner}" if text else inner
    return text


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value).lower() if isinstance(value, bool) else repr(value)
