"""Reading whole files of the user, up to a maximal size, and their sha256; TOML, also written; errors of one line."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from headscope.errors import ConfigError, DataError, HeadscopeError, reason_of

MAX_BYTES = 64 << 20  # of vocabularies, records and lists, which have a few megabytes
TOML_BYTES = 1 << 20

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""What stands in the place of a large file where a repository was cloned without Git LFS."""

Kind = type[HeadscopeError]


def read_bytes(path: Path, *, error: Kind = DataError, name: str = "", limit: int = MAX_BYTES) -> bytes:
    """The bytes of a file; `error` where it cannot be read or has more than `limit`.

    `name` is the file's name in messages, by default its path.
    """
    try:
        with path.open("rb") as handle:
            content = handle.read(limit + 1)
    except (OSError, ValueError) as exception:
        raise error(f"{name or path} cannot be read: {getattr(exception, 'strerror', None) or exception}") from None
    if len(content) > limit:
        raise error(f"{name or path} has more than {limit:,} bytes; it is another kind of file")
    if content.startswith(LFS_POINTER):
        raise error(f"{name or path} is a Git LFS pointer and not the file itself; run `git lfs pull` in its folder")
    return content


def no_path(path: str | os.PathLike[str], what: str = "file") -> str:
    """`there is no file text.en`, with the name beside it that is nearly the same, if any."""
    path = Path(path)
    try:
        near = get_close_matches(path.name, os.listdir(path.parent), n=1, cutoff=0.75)
    except (OSError, ValueError):
        near = []
    hint = "".join(f" (did you mean {path.parent / name}?)" for name in near)
    return f"there is no {what} {path}{hint}"


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a pointer of Git LFS; never fails."""
    try:
        with path.open("rb") as handle:
            return handle.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def read_text(path: Path, *, error: Kind = DataError, name: str = "", limit: int = MAX_BYTES) -> str:
    """A UTF-8 text, with `\\n` as line end and without a byte order mark. Errors as of `read_bytes`."""
    try:
        text = read_bytes(path, error=error, name=name, limit=limit).decode("utf-8-sig")
    except UnicodeDecodeError as exception:
        raise error(f"{name or path} cannot be read: byte {exception.start + 1} is not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, *, error: Kind = DataError, name: str = "", **hooks: Any) -> Any:
    """The value of a JSON file; `hooks` are arguments of `json.loads`. Errors as of `read_bytes`."""
    text = read_text(path, error=error, name=name)
    try:
        return json.loads(text, **hooks)
    except (ValueError, RecursionError) as exception:
        raise error(f"{name or path} is no JSON: {' '.join(str(exception).split())[:160]}") from None


def read_object(path: Path, *, error: Kind = DataError) -> dict[str, Any]:
    """The object in a JSON file; `error` for any other value."""
    value = read_json(path, error=error)
    if not isinstance(value, dict):
        raise error(f"{path} holds no JSON object")
    return value


def read_record(path: Path) -> dict[str, Any]:
    """`read_object` of a run's record; empty where the file is missing or broken."""
    try:
        return read_object(path)
    except DataError:
        return {}


def file_digest(files: Sequence[Path]) -> str:
    """sha256 over the bytes of files, in the order given."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as handle:
            while block := handle.read(2**20):
                digest.update(block)
    return digest.hexdigest()


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
    """A value as JSON, which TOML takes too but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
