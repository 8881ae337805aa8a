"""Which heads change places before which epoch: files of the MHR fork (JSON), and ours (TOML).

JSON: {"3": [{"s_layer": "0", "s_head": 1, "s_layer_module": "encoder_attn", "s_transformer_module": "decoder",
"d_layer": …}]}, epochs from 1, layers and heads from 0. TOML: tables [[swap]] with epoch, first and second, heads
written as everywhere (`cross.1.0`); `cross.1.*` stands for every head of a layer, matched by number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headscope.bounds import WHOLE
from headscope.errors import ConfigError
from headscope.files.reading import read_json
from headscope.files.serialize import read_toml
from headscope.heads import HeadId, Layout, select_heads
from headscope.training.swaps.swaps import MODULES, ForkHead, ForkSwap, Swap, check_swap

FIELDS = tuple(f"{end}_{name}" for end in "sd" for name in ("layer", "head", "layer_module", "transformer_module"))
SITE = {names: site for site, names in MODULES.items()}
Schedule = Mapping[int, list[Swap]]


def read_schedule(path: Path, layout: Layout) -> Schedule:
    """The swaps of every epoch of a file; ConfigError with file, epoch and entry for what does not fit the model."""
    schedule: dict[int, list[Swap]] = {}
    for location, epoch, swap in _toml(path, layout) if path.suffix == ".toml" else _json(path):
        if problem := check_swap(swap, layout):
            raise ConfigError(f"{location}: {problem}")
        schedule.setdefault(epoch, []).append(swap)
    if not schedule:
        raise ConfigError(f"{path} names no swap")
    return schedule


def read_fork_schedule(path: Path) -> Mapping[int, list[ForkSwap]]:
    """The swaps of a JSON file in the fork's words: anything that the fork itself would try."""
    schedule: dict[int, list[ForkSwap]] = {}
    for _, epoch, first, second in fork_entries(path):
        schedule.setdefault(epoch, []).append(ForkSwap(first, second))
    return schedule


def fork_entries(path: Path) -> Iterator[tuple[str, int, ForkHead, ForkHead]]:
    """Place, epoch and both ends of every entry of a JSON file; ConfigError names file, epoch, entry and field."""
    content = read_json(path, error=ConfigError, name=f"--swap-schedule {path}", object_pairs_hook=_unrepeated)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {_kind(content)}; it must be an object of epochs, each with a list of swaps")
    for key, entries in content.items():
        if not (_is_number(key) and int(key) >= 1):
            raise ConfigError(f'{path}: epoch {key!r} is no number from 1 in quotes, such as "3"')
        if not isinstance(entries, list):
            raise ConfigError(f"{path}: epoch {key} holds {_kind(entries)}; it must be a list of swaps")
        for number, entry in enumerate(entries, start=1):
            location = f"{path}: epoch {key}, swap {number}"
            if not isinstance(entry, dict):
                raise ConfigError(f"{location} is {_kind(entry)}; it must be an object with {', '.join(FIELDS)}")
            if missing := [name for name in FIELDS if name not in entry]:
                raise ConfigError(f"{location} lacks {', '.join(missing)}")
            if extra := sorted(set(entry) - set(FIELDS)):
                raise ConfigError(f"{location} has unknown fields {', '.join(extra)}; it must have {', '.join(FIELDS)}")
            yield location, int(key), _end(location, entry, "s"), _end(location, entry, "d")


def _end(location: str, entry: Mapping[str, Any], end: str) -> ForkHead:
    layer, head = entry[f"{end}_layer"], entry[f"{end}_head"]
    layer = str(layer) if type(layer) is int else layer
    if not (isinstance(layer, str) and _is_number(layer)):
        raise ConfigError(f'{location}: {end}_layer is {layer!r}; it must be a layer from 0 in quotes, such as "0"')
    if type(head) is not int or not 0 <= head <= WHOLE:
        raise ConfigError(f"{location}: {end}_head is {head!r}; it must be a number from 0")
    stack, module = entry[f"{end}_transformer_module"], entry[f"{end}_layer_module"]
    for name, value, allowed in (
        ("transformer_module", stack, ("encoder", "decoder")),
        ("layer_module", module, ("self_attn", "encoder_attn")),
    ):
        if value not in allowed:
            raise ConfigError(f"{location}: {end}_{name} is {value!r}; it must be {' or '.join(allowed)}")
    return ForkHead(stack, module, layer, head)


def _json(path: Path) -> Iterator[tuple[str, int, Swap]]:
    for location, epoch, *ends in fork_entries(path):
        heads = []
        for end in ends:
            if (end.stack, end.module) not in SITE:
                raise ConfigError(
                    f"{location}: an encoder has no encoder_attn; cross attention is decoder, encoder_attn"
                )
            heads.append(HeadId(SITE[end.stack, end.module], int(end.layer), end.head))
        yield location, epoch, Swap(*heads)


def _toml(path: Path, layout: Layout) -> Iterator[tuple[str, int, Swap]]:
    content = read_toml(path)
    entries = content.get("swap")
    if set(content) != {"swap"} or not isinstance(entries, list):
        raise ConfigError(f"{path} must hold tables [[swap]] with epoch, first and second, and nothing else")
    for number, entry in enumerate(entries, start=1):
        location = f"{path}: swap {number}"
        if not isinstance(entry, dict) or set(entry) != {"epoch", "first", "second"}:
            raise ConfigError(f"{location} must have epoch, first and second, and nothing else")
        epoch = entry["epoch"]
        if type(epoch) is not int or not 1 <= epoch <= WHOLE:
            raise ConfigError(f"{location}: epoch is {epoch!r}; it must be a number from 1")
        firsts, seconds = (_heads(location, entry[name], layout) for name in ("first", "second"))
        if len(firsts) != len(seconds):
            raise ConfigError(
                f"{location}: {entry['first']} is {len(firsts)} heads and {entry['second']} {len(seconds)}"
            )
        for first, second in zip(firsts, seconds, strict=True):
            yield location, epoch, Swap(first, second)


def _heads(location: str, text: Any, layout: Layout) -> list[HeadId]:
    try:
        if isinstance(text, str) and text.endswith(".*") and text.count("*") == 1:
            return sorted(select_heads(text, layout))
        return [HeadId.parse(str(text))]
    except ConfigError as error:
        raise ConfigError(f"{location}: {error}") from None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d{1,9}", text, re.ASCII) is not None


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Epochs written "3" and "3" again would lose the first."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return unique


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
    return names[type(value)] if type(value) in names else repr(value)
