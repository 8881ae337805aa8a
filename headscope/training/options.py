"""Fields of option classes: how they appear on the command line, and checks of their values; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from headscope.errors import ConfigError
from headscope.heads import SITES, Site

T = TypeVar("T")


def option(default: Any, help: str, *, metavar: str | None = None, panel: str | None = None) -> Any:
    """A field of an Options class; it becomes `--the-name` and the TOML key `the-name`.

    Types that an option may have: bool, int, float, str, Path, Literal, any of them `| None`, and
    `tuple[int, ...]`, `tuple[float, ...]`, `tuple[str, ...]`, which are written with commas. `panel` is the
    heading in --help (default: the variant's name).
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, "panel": panel})


def check_choices(options: Any) -> None:
    """ConfigError for a value of a Literal field (or one of several) that is not among its words."""
    for name, hint in get_type_hints(type(options)).items():
        value = getattr(options, name, None)
        inner = [part for part in get_args(hint) if get_origin(part) is Literal] or [hint]
        allowed = get_args(inner[0]) if get_origin(inner[0]) is Literal else ()
        values = value if isinstance(value, tuple) else (value,)
        strange = [each for each in values if each not in allowed and not (each is None and inner != [hint])]
        if allowed and strange:
            words = ", ".join(map(str, allowed))
            raise ConfigError(f"--{name.replace('_', '-')} {strange[0]!r} is not known; choose from {words}")


def per_site(flag: str, values: Sequence[T]) -> dict[Site, T]:
    """Values of an option by site: one for all, or one each for encoder-self, decoder-self and cross.

    ConfigError for another number of values, which names the option.
    """
    if len(values) == 1:
        return dict.fromkeys(SITES, values[0])
    if len(values) != len(SITES):
        raise ConfigError(
            f"{flag} has {len(values)} values; give one for all sites, or three for {', '.join(map(str, SITES))}"
        )
    return dict(zip(SITES, values, strict=True))
