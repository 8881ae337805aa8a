"""TOML files: read within limits, and written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headscope.errors import ConfigError, reason_of
from headscope.files.reading import read_text

TOML_BYTES = 1 << 20


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file; ConfigError where it cannot be read."""
    if sys.version_info >= (3, 11):
        import tomllib  # novm: the other branch is for 3.10
    else:
        import tomli as tomllib
    text = read_text(path, error=ConfigError, limit=TOML_BYTES)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers of thousands of digits
        raise ConfigError(f"{path} is no TOML: {reason_of(error, max_length=200)}") from None


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
