"""An option: a field of a config class, with all that there is to know about it. Imports no torch.

Commands, keys of TOML files, keywords of the API, `examples/config`, the reference pages and the protection of inputs
are made of these fields; so is what a run that goes on compares with the options that it was begun with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from headscope.bounds import check_numbers
from headscope.errors import ConfigError
from headscope.files.serialize import types_of

C = TypeVar("C")


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
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    of: str = "",
    written: bool = False,
    identity: bool = True,
    unset: str = "",
) -> Any:
    """A field of an options class; it becomes `--the-name`, the TOML key `the-name` and a keyword of the API.

    Types that an option may have: bool, int, float, str, Path, Literal, any of them `| None`, and
    `tuple[int, ...]`, `tuple[float, ...]`, `tuple[str, ...]`, which are written with commas. Without a default it
    must be given. `panel` is the heading in --help (default: that of what has the option), `name` the option's name
    where it is not the field's (`from` of `run`); an `argument` has none. Where a command has many options, --help has
    those that are `common` or must be given, --help-all the others too. Values of a tuple that may `repeat` are given
    by one, not with commas. `minimum` and `maximum` bound numbers, `above` and `below` leave the bound itself out. An
    option that is `of` another one ("faithfulness"), of one or the other ("source|labels", as far as there are such),
    or of some of its values ("parse=stanza"), is refused, not ignored, where that is not given. A path that is
    `written` is an output; every other path is an input, which no output replaces. `identity` False: it does not change
    what is computed, only where, how fast, or what is kept. `unset` is a word that says the default None of a number.
    """
    about: dict[str, Any] = {"help": help, "metavar": metavar, "panel": panel, "name": name, "argument": argument}
    about["common"] = common or argument or default is MISSING
    about |= {"minimum": minimum, "maximum": maximum, "above": above, "below": below}
    about |= {"repeat": repeat, "of": of, "unset": unset}
    return field(default=default, metadata={**about, "written": written, "identity": identity and not written})


def declared_options(cls: type[Any]) -> Iterator[tuple[Field[Any], Any]]:
    """The options of a config class with their types: fields that have a help text; the others are set by code."""
    hints = types_of(cls)
    return ((entry, hints[entry.name]) for entry in fields(cls) if entry.metadata.get("help"))


def identity(config: Any) -> dict[str, Any]:
    """The options that shape what is computed, as JSON values; files are not among them, which digests identify."""
    hints = types_of(type(config))
    entries = [entry for entry in fields(config) if entry.metadata.get("identity", True)]
    return {
        entry.name: plain_value(getattr(config, entry.name)) for entry in entries if not names_file(hints[entry.name])
    }


def changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The options that are others than `before`."""
    return [name for name, value in now.items() if before.get(name) != value]


def names_file(hint: Any) -> bool:
    """Whether options of a type are paths."""
    return hint is Path or Path in get_args(hint)


@dataclass(frozen=True)
class NoOptions:
    """For what takes no options. Options classes check themselves in `__post_init__` (ConfigError)."""


@dataclass(frozen=True)
class LabelOptions:
    """Options of analyses that label heads (`headscope.engine.evidence.labels`); their own may inherit them."""

    min_instances: int = option(
        20,
        "Instances that a label of a head needs; with --relations all rarer relations are left out.",
        metavar="N",
        minimum=1,
    )


@dataclass(frozen=True)
class PublishedLabelOptions(LabelOptions):
    """Options of analyses whose labels are those of a paper, with the rule that it gives them by."""

    label_rule: Literal["tested", "published"] = option(
        "tested",
        "How positional, syntactic and rare heads are labelled: on tested evidence, or by the estimate alone, as Voita "
        "et al. (2019) do.",
    )


def check_options(options: Any) -> None:
    """ConfigError for a number of an options class that is out of bounds, and for a word that is none of a Literal.

    Also for an option that is about another one (`of`), which is not given.
    """
    flags = {entry.name: flag_of(entry) for entry in fields(options)}
    check_numbers(options, flags=flags)
    for entry in fields(options):
        other, _, words = entry.metadata.get("of", "").partition("=")
        names = other.split("|") if other and getattr(options, entry.name) != entry.default else []
        values = [getattr(options, name, None) for name in names]
        if names and not (str(values[0]) in words.split("|") if words else any(values)):
            needed = " ".join([flags.get(names[0]) or flag(names[0]), *words.split("|")[:1]]).strip()
            raise ConfigError(f"{flags[entry.name]} is about {needed}; give that too")
    for name, allowed, strange in _strange_choices(options):
        *others, last = words = [str(word) for word in allowed if word]
        choices = f"{', '.join(others)} or {last}" if others else last
        near = get_close_matches(str(strange), words, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{flags[name]} {strange!r} is not known; {hint}choose {choices}")


def flag_of(entry: Field[Any]) -> str:
    """An option as the command line has it."""
    return flag(entry.metadata.get("name") or entry.name)


def values_left_out(metavar: str | None) -> list[str]:
    """Values of an option that may be given without one, the one that is meant then first: `[cheap|all]`."""
    return metavar.strip("[]").split("|") if metavar and metavar.startswith("[") else []


def flag(name: str) -> str:
    """A field's name as the command line has it."""
    return f"--{name.replace('_', '-')}"


def _strange_choices(options: Any) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Name, allowed words and value of every Literal field that has another value."""
    for name, hint in types_of(type(options)).items():
        value = getattr(options, name, None)
        inner = [part for part in get_args(hint) if get_origin(part) is Literal] or [hint]
        allowed = get_args(inner[0]) if get_origin(inner[0]) is Literal else ()
        values = value if isinstance(value, tuple) else (value,)
        strange = [part for part in values if part not in allowed and not (part is None and inner != [hint])]
        if allowed and strange:
            yield name, allowed, strange[0]


def plain_options(config: Any) -> dict[str, Any]:
    """The fields of a config as JSON values."""
    return {field.name: plain_value(getattr(config, field.name)) for field in fields(config)}


def plain_value(value: Any) -> Any:
    """The value of an option as JSON has it: tuples as lists, paths as text."""
    if isinstance(value, tuple):
        return [plain_value(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def restored(cls: type[C], values: Mapping[str, Any]) -> C:
    """The config that `plain_options` gave the values of; fields that they lack have their defaults."""
    hints = types_of(cls)
    own = {field.name: values[field.name] for field in fields(cls) if field.name in values}  # type: ignore[arg-type]
    for name, value in own.items():
        if isinstance(value, list):
            own[name] = tuple(value)
        elif isinstance(value, str) and names_file(hints[name]):
            own[name] = Path(value)
    return cls(**own)
