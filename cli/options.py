"""Commands whose options are the fields of config classes; `--config` and `--set` set any of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from headscope.cli.console import Printer
from headscope.config.inputs import OUTPUT, ValidatedTextFiles
from headscope.config.option import checked_value, declared_options, option_name, take_config
from headscope.errors import ConfigError, DataError, command_flag, flag, restate
from headscope.files.output_checks import Input, check_inputs
from headscope.files.reading import no_path
from headscope.registry import unknown

STDIN = "-"
Command = Callable[..., None]
Entry = tuple[Field[Any], Any]
"""A field of a config class with its type."""
Owners = Callable[[], Mapping[str, type[Any]]]
"""Options classes by the name of their owner, such as an analysis."""
SET_ANY = "Any option without a flag; repeatable."
SET_OWN = "An option of an analysis, such as induction.sequences=32 (`headscope list analyses NAME`); repeatable."
CONFIG = "TOML file with options by their long names; options on the command line win."
SWITCHES = ("json", "verbose")
KEYWORD = inspect.Parameter.KEYWORD_ONLY
METAVARS = {int: "N", float: "N", bool: "true|false", str: "NAME", Path: "FILE"}


def options_from(
    *classes: type[Any],
    config: bool = True,
    json: bool = True,
    verbose: bool = False,
    stdin_texts: tuple[str, ...] = (),
    owners: Owners | None = None,
    panel: str | None = None,
    read: Callable[[dict[str, Any]], Sequence[Any]] | None = None,
) -> Callable[[Command], Command]:
    """Decorate a function as a command with the options of config classes, `--config`, `--json` and `--verbose`.

    The function is called with a config of each class, or with what `read` returns for the given values; then with a
    `Printer`. `stdin_texts` are options whose value `-` means stdin. `owners` have further options, which `--set
    OWNER.OPTION=VALUE` and the tables of a config file set. `panel` is the heading of options without one.
    """
    entries: list[Entry] = [entry for cls in classes for entry in declared_options(cls)]
    with_flag = [entry for entry in entries if not entry[0].metadata["flagless"]]
    with_flag.sort(key=lambda entry: not entry[0].metadata["argument"])
    options = [parameter_of(*entry, panel) for entry in with_flag]
    rare = {field.name for field, _ in with_flag if not field.metadata["common"]}
    if verbose:
        options.append(own_option("verbose", bool, "Print all answers, with details and signature."))
        rare.add("verbose")
    if owners:
        options.append(own_option("set", list[str] | None, SET_OWN, "NAME.OPTION=VALUE"))
    elif len(with_flag) < len(entries):
        options.append(own_option("set", list[str] | None, SET_ANY, "NAME=VALUE"))
        rare.add("set")
    options += [own_option("config", list[str] | None, CONFIG, "FILE.toml")] if config else []
    options += [own_option("json", bool, "Print the result as JSON on stdout.")] if json else []

    def decorate(function: Command) -> Command:
        def command(**typed_values: Any) -> None:
            with flag.spelling(partial(typed_option, entries, owners)):
                values = given_values(typed_values, entries, owners)
                if config:  # figures and the like have no texts; their --target is a sentence
                    check_texts(values, stdin_texts=stdin_texts)
                printer = Printer(**{name: values.pop(name, False) for name in SWITCHES})
                function(*(read(values) if read else [take_config(cls, values) for cls in classes]), printer)

        runner: Any = command
        runner.__doc__, runner.entries, runner.owners, runner.rare = function.__doc__, entries, owners, rare
        runner.__signature__ = inspect.Signature(options)
        runner.__annotations__ = {option.name: option.annotation for option in options}
        return command

    return decorate


def own_option(name: str, kind: Any, help: str, metavar: str | None = None) -> inspect.Parameter:
    """An option that no config class declares: a switch, or one that takes text."""
    info = typer.Option(f"--{name}", metavar=metavar, help=help, rich_help_panel=OUTPUT)
    return inspect.Parameter(name, KEYWORD, default=False if kind is bool else None, annotation=Annotated[kind, info])


def set_names(entries: Iterable[Entry], owners: Owners | None) -> dict[str, str]:
    """The names that `--set` takes, by option without a flag: `integrated_gradients.ig-steps` for `ig_steps`."""
    flagless_entries = [("", entry) for entry, _ in entries if entry.metadata["flagless"]]
    flagless_entries += [
        (f"{owner}.", entry) for owner, cls in (owners or dict)().items() for entry, _ in declared_options(cls)
    ]
    return {option_name(entry): owner + option_name(entry).replace("_", "-") for owner, entry in flagless_entries[::-1]}


def typed_option(entries: Iterable[Entry], owners: Owners | None, name: str, value: object = None) -> str:
    """An option as it is typed in a command: `--keep 3`, `--set long=truncate`."""
    has_flag = any(option_name(entry) == name and not entry.metadata["flagless"] for entry, _ in entries)
    names = {} if has_flag else set_names(entries, owners)
    if name not in names:
        return command_flag(name, value)
    return f"--set {names[name]}" + ("" if value is None else f"={value}")


def given_values(command_values: Mapping[str, Any], entries: Sequence[Entry], owners: Owners | None) -> dict[str, Any]:
    """The given values by field: those of the command line, and for other fields those of the config file."""
    repeatable = {"set", *(entry.name for entry, _ in entries if entry.metadata["repeat"])}
    values = {
        name: value if name in repeatable or not isinstance(value, list) else only_one(name, value)
        for name, value in command_values.items()
        if value is not None and value != [] and not (name in SWITCHES and value is False)
    }
    path, sets = values.pop("config", None), values.pop("set", None) or ()
    owner_classes = owners() if owners and (path or sets) else {}
    owner_entries = {name: dict(declared_options(cls)) for name, cls in owner_classes.items()}
    values = {**set_values(sets, entries, owner_entries), **values}
    if path is None:
        return values
    values = {**read_config(Path(path), entries, owner_entries), **values}
    for name in ("out", "per_sentence"):
        if values.get(name):
            check_inputs(Path(values[name]), [Input(Path(path))])
    return values


def only_one(name: str, values: Sequence[str]) -> str:
    """The value of an option that must be given once: a list (else its last part alone would count), or `--config`."""
    if len(values) > 1:
        instead = f", as a list: {flag(name)} a,b,c" if name != "config" else ""
        raise ConfigError(f"{flag(name)} is given {len(values)} times; give it once{instead}")
    return values[0]


def set_values(sets: Iterable[str], entries: Sequence[Entry], owner_entries: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `--set`, by field."""
    values: dict[str, Any] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: give NAME=VALUE")
        values |= fields_of({name.strip(): {"true": True, "false": False}.get(value, value)}, entries, owner_entries)
    return values


def read_config(path: Path, entries: Sequence[Entry], owner_entries: Mapping[str, Any]) -> dict[str, Any]:
    """The values in a TOML file, by field; names may have dashes or underscores. ConfigError names the file."""
    from headscope.files.reading import read_toml

    if not os.path.exists(path):
        raise ConfigError(no_path(path, "config file"))
    content = read_toml(path)
    with restate(ConfigError, f"{path}: {{why}}"), flag.spelling(lambda name, _: name.replace("_", "-")):
        return fields_of(content, entries, owner_entries)


def fields_of(content: Mapping[str, Any], entries: Sequence[Entry], owner_entries: Mapping[str, Any]) -> dict[str, Any]:
    """Checked values by field; keys of `content` are names of options, OWNER.OPTION, or an owner with a table."""
    entry_of: dict[str, Entry | None] = dict.fromkeys(SWITCHES)
    entry_of |= {entry.name: (entry, hint) for options in owner_entries.values() for entry, hint in options.items()}
    for entry, hint in entries:
        entry_of |= dict.fromkeys((entry.name, option_name(entry)), (entry, hint))
    values: dict[str, Any] = {}
    for key, value in content.items():
        owner, _, name = key.rpartition(".")
        if isinstance(value, Mapping):
            values |= fields_of({f"{key}.{inner}": entry for inner, entry in value.items()}, entries, owner_entries)
            continue
        name = name.replace("-", "_")
        if owner and owner not in owner_entries:
            kind, unknown_name = ("analysis", owner) if owner_entries else ("option", key)
            raise ConfigError(unknown(kind, unknown_name, sorted(owner_entries)))
        options = {entry.name: (entry, hint) for entry, hint in owner_entries[owner].items()} if owner else entry_of
        if name not in options:
            from headscope.cli.mhr_options import counterpart_message

            names = sorted(option.replace("_", "-") for option in options)
            raise ConfigError(counterpart_message(command_flag(name)) or unknown("option", key, names))
        pair = options[name]
        field = name if pair is None else pair[0].name
        if field in values:
            raise ConfigError(f"{key} is there twice; keep one")
        values[field] = value if pair is None else checked_value(pair[0], pair[1], value)
    return values


def check_texts(values: Mapping[str, Any], *, stdin_texts: tuple[str, ...] = ()) -> None:
    """DataError for a text whose file is missing, before anything heavy is imported."""
    for name in ("clean", "corrupt", "answer", *(entry.name for entry in fields(ValidatedTextFiles))):
        path, readable = values.get(name), (STDIN,) if name in stdin_texts else ()
        if isinstance(path, (str, Path)) and str(path) not in readable and not os.path.exists(path):
            no_stdin = "; only --source and --target of analyze, and translate, read stdin"
            raise DataError(no_path(path) + no_stdin * (str(path) == STDIN))


def parameter_of(entry: Field[Any], hint: Any, panel: str | None = None) -> inspect.Parameter:
    """The parameter of the typer command for a field: a switch, or an option or argument that takes text."""
    metadata, kind = entry.metadata, kind_of(hint)
    metavar = metavar_of(entry, hint)
    text = metadata["help"] + default_words(entry)
    is_list = metadata["repeat"] or metavar in ("LIST", "NAMES") or "," in metavar
    value_type: Any = bool if kind is bool else list[str] if is_list else str
    if metadata["argument"]:
        is_required = entry.default is MISSING
        parameter_info: Any = typer.Argument(help=text, metavar=metavar, show_default=False)
        default = inspect.Parameter.empty if is_required else None
    else:
        name, default = command_flag(option_name(entry)), None
        names = f"{name}/--no-{name[2:]}" if kind is bool and entry.default is True else name
        settings: dict[str, Any] = {"help": text, "rich_help_panel": metadata["panel"] or panel, "show_default": False}
        parameter_info = typer.Option(names, metavar=None if kind is bool else metavar, **settings)
    if default is None:
        value_type = value_type | None
    return inspect.Parameter(entry.name, KEYWORD, default=default, annotation=Annotated[value_type, parameter_info])


def metavar_of(entry: Field[Any], hint: Any) -> str:
    """The placeholder of an option's value, also on the pages of commands."""
    kind = kind_of(hint)
    choices = [str(word) for word in get_args(kind) if word] if get_origin(kind) is Literal else []
    return entry.metadata["metavar"] or "|".join(choices) or METAVARS.get(kind, "LIST")


def default_words(entry: Field[Any]) -> str:
    """The default as it ends a help text: `  [default: 3]`."""
    default = entry.metadata["unset"] or entry.default
    if default is MISSING:
        return "" if entry.metadata["argument"] else "  [required]"
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    word = entry.name.replace("_", "-") if default is True else default
    return "" if word is None or word is False or word == "" else f"  [default: {word}]"


def kind_of(hint: Any) -> Any:
    """The type of an option, without `| None`."""
    return next(part for part in get_args(hint) if part is not type(None)) if type(None) in get_args(hint) else hint
