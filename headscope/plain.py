"""Frozen config classes as plain values, and TOML files of them."""

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

from headscope.errors import ConfigError

C = TypeVar("C")
Problems = list[str]


def to_plain(config: Any) -> dict[str, Any]:
    """A config as nested dictionaries of plain values, without the fields that are None or empty tables."""
    found: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            value = to_plain(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        if value is not None and value != {}:
            found[each.name] = value
    return found


def from_plain(cls: type[C], values: Mapping[str, Any]) -> C:
    """Inverse of `to_plain`; ConfigError names every unknown, missing and ill-typed field at once."""
    problems: Problems = []
    found: C | None = _build(cls, values, "", problems)
    if problems or found is None:
        raise ConfigError("; ".join(problems))
    return found


def _build(cls: type[Any], values: Mapping[str, Any], where: str, problems: Problems) -> Any:
    """An instance of a config class, or None after adding to `problems`."""
    hints = get_type_hints(cls)
    known = {each.name for each in fields(cls)}
    before = len(problems)
    for name in sorted(set(values) - known):
        near = get_close_matches(name, sorted(known), n=1)
        problems.append(f"unknown field {where}{name}" + (f" (did you mean {near[0]}?)" if near else ""))
    for each in fields(cls):
        if each.name not in values and each.default is MISSING and each.default_factory is MISSING:
            problems.append(f"field {where}{each.name} is missing")
    given = {
        name: _value(hints[name], value, f"{where}{name}", problems) for name, value in values.items() if name in known
    }
    if len(problems) > before:
        return None
    try:
        return cls(**given)
    except ConfigError as error:
        problems.append(f"{where.rstrip('.')}: {error}" if where else str(error))
        return None


def _value(hint: Any, value: Any, name: str, problems: Problems) -> Any:
    if get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if is_dataclass(hint) and isinstance(value, Mapping):
        return _build(hint, value, f"{name}.", problems)  # type: ignore[arg-type]
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)) and all(type(part) is int for part in value):
        return tuple(value)
    if (get_origin(hint) is Literal or hint is str) and isinstance(value, str):
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (int, bool) and type(value) is hint:
        return value
    simple = isinstance(value, Mapping) and all(isinstance(part, (str, int, float)) for part in value.values())
    if get_origin(hint) not in (tuple, Literal, None) and simple:
        return dict(value)
    problems.append(f"field {name} is {str(value)[:40]!r}, which is of the wrong type")
    return None


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file; ConfigError for one that cannot be read."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {' '.join(str(error).split())[:200]}") from None


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
