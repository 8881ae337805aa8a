"""Commands made of config classes: their fields are the options; and `--config`, which sets any of them.

Lists that help texts name in braces, such as {metrics}, are what registries know when the help is asked for.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

from headscope.config.declarations import metric_names, objective_names
from headscope.config.engines import engine_list, export_list, goal_list, quantization_list
from headscope.config.inputs import OUTPUT, PromptFiles, ValidatedTextFiles
from headscope.config.option import check_options, declared_options, flag, flag_of, values_left_out
from headscope.errors import ConfigError, DataError
from headscope.files.output_checks import Input, check_inputs
from headscope.files.reading import no_path
from headscope.pruning.options.learn import learners

C = TypeVar("C")
STDIN = Path("-")
Command = Callable[..., None]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.", rich_help_panel=OUTPUT)]


def _load_config(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        known: Mapping[str, InFile] = getattr(context.command.callback, "in_file", {})
        names_of: dict[str, str] = {}  # by an option's long name (`--from` may set `run`) and by its parameter's own
        for parameter in context.command.params:
            name = parameter.name
            if name is not None and name not in ("config", "help"):
                long = [flag.removeprefix("--").replace("-", "_") for flag in parameter.opts if flag.startswith("--")]
                names_of |= dict.fromkeys([name, *long], name)
        read = read_config(path, {key: known.get(name, InFile(bool)) for key, name in names_of.items()})
        options = {names_of[key]: value for key, value in read.items()}
        context.default_map = {**(context.default_map or {}), **options}
    return path


RARE = "rare"
"""Marks, in its annotation, an option that --help leaves to --help-all."""
Verbose = Annotated[
    bool, RARE, typer.Option("--verbose", help="Print all answers, with details and signature.", rich_help_panel=OUTPUT)
]

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="TOML file with options by their long names; options on the command line win.",
        callback=_load_config,
        is_eager=True,
        rich_help_panel=OUTPUT,
    ),
]


def made_of(
    *classes: type[Any],
    more: Sequence[inspect.Parameter] = (),
    config: bool = True,
    json: bool = True,
    verbose: bool = False,
    typed: tuple[str, ...] = (),
) -> Callable[[Command], Command]:
    """A command whose options are those of config classes, then `more`, and as a rule `--config` and `--json`.

    `typed` are texts that may be `-`: what is typed in. The function gets a mapping of the options' values, of which
    `read` makes the configs, and `json` and `verbose` where it has them.
    """
    ending = [
        *([parameter("verbose", Verbose, False)] if verbose else []),
        *([parameter("config", Config, None)] if config else []),
        *([parameter("json", Json, False)] if json else []),
    ]

    def decorate(function: Command) -> Command:
        def command(**values: Any) -> None:
            check_config(values)
            check_texts(values, typed=typed)
            values.pop("config", None)
            given = [*(["json"] if json else []), *(["verbose"] if verbose else [])]
            function(values, **{name: values.pop(name) for name in given})

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        options = [option_of(entry, hint) for cls in classes for entry, hint in declared_options(cls)]
        options += [*more, *ending]
        is_argument = type(typer.Argument())
        arguments = [option for option in options if isinstance(get_args(option.annotation)[-1], is_argument)]
        return declared(command, [*arguments, *(option for option in options if option not in arguments)])

    return decorate


def read(cls: type[C], values: Mapping[str, Any], **made: Any) -> C:
    """A config of what typer gives for its options, and of fields that are `made` of others."""
    hints = get_type_hints(cls)
    chosen = {entry.name: value_of(entry, hints[entry.name], values[entry.name]) for entry, _ in declared_options(cls)}
    config = cls(**{**chosen, **made})
    check_options(config)
    return config


def check_config(values: Mapping[str, Any]) -> None:
    """OutputError where an output would replace the file that --config names."""
    for name in ("out", "per_sentence"):
        if values.get("config") and values.get(name):
            check_inputs(values[name], [Input(values["config"])])


def check_texts(values: Mapping[str, Any], *, typed: tuple[str, ...] = ()) -> None:
    """DataError for a text that is not there, before anything heavy is imported."""
    for entry in (*fields(ValidatedTextFiles), *fields(PromptFiles)):
        path = values.get(entry.name)
        if not isinstance(path, Path) or os.path.exists(path) or (entry.name in typed and path == STDIN):
            continue
        if path == STDIN:
            words = f"only {' and '.join(map(flag, typed))} read it" if typed else "only analyze and translate read it"
            raise DataError(f"{flag(entry.name)} - would be stdin, and {words}; give a file")
        raise DataError(no_path(path))


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """An option as typer reads it from a signature."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option_of(entry: Field[Any], hint: Any, panel: str | None = None) -> inspect.Parameter:
    """A field of a config class (`headscope.config.option`) as an option; lists and choices are text to typer."""
    about, kind, optional = entry.metadata, _kind(hint), type(None) in get_args(hint)
    choices = [str(value) for value in get_args(kind)] if get_origin(kind) is Literal else []
    default = inspect.Parameter.empty if entry.default is MISSING else entry.default
    is_list = get_origin(kind) is tuple
    if about.get("repeat"):
        kind, optional = list[get_args(kind)[0]], optional or default == ()  # type: ignore[misc]
        default = default or None
    elif is_list or choices:
        kind = str
    elif about.get("unset"):
        kind, default = str, about["unset"]
    if is_list and isinstance(default, tuple):
        optional, default = optional or not default, ",".join(map(str, default)) or None
    metavar = about.get("metavar") or ("|".join(choices) or None)
    if about.get("argument"):
        made: Any = typer.Argument(help=_help(entry), metavar=metavar)
    else:
        own = [flag_of(entry)] if about.get("name") or (kind is bool and not default) else []
        made = typer.Option(*own, help=_help(entry), metavar=metavar, rich_help_panel=about.get("panel") or panel)
    kind = kind | None if optional else kind
    words = [*([about["unset"]] if about.get("unset") else []), *values_left_out(about.get("metavar"))]
    in_file = InFile(_kind(hint), words)
    annotation = Annotated[kind, in_file, made] if about["common"] else Annotated[kind, in_file, RARE, made]
    return parameter(entry.name, annotation, default)


def _kind(hint: Any) -> Any:
    """The type of an option that may be None."""
    return next(part for part in get_args(hint) if part is not type(None)) if type(None) in get_args(hint) else hint


def _help(entry: Field[Any]) -> str:
    """The help text, with the lists that it names in braces, such as {metrics}: what registries know."""
    text: str = entry.metadata["help"]
    if "{" not in text:
        return text

    return filled(text)


def value_of(entry: Field[Any], hint: Any, value: Any) -> Any:
    """What typer, a TOML file or run.json gives, as the type of an option.

    ConfigError where it is none.
    """
    kind = _kind(hint)
    if values := values_left_out(entry.metadata.get("metavar")):
        value = {"true": values[0], "false": entry.default}.get(str(value).lower(), value)
    if value is None or value == (entry.metadata.get("unset") or None):
        return () if get_origin(hint) is tuple else None
    if isinstance(value, str) and not value.strip(" ,") and value != entry.default:
        raise ConfigError(f"{flag_of(entry)} is empty; give it a value, or leave it out")
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        texts = value if isinstance(value, (list, tuple)) else names(str(value))
        try:
            return tuple(item(text) for text in texts)
        except (TypeError, ValueError, OverflowError):
            what = "whole numbers" if item is int else "numbers"
            raise ConfigError(f"{flag_of(entry)} {repr(value)[:60]} must be {what} with commas between") from None
    if kind is bool and isinstance(value, str):
        return value.lower() in ("true", "yes", "1")
    try:
        return kind(value) if kind in (int, float, str, Path) else value
    except (TypeError, ValueError, OverflowError):
        what = {int: "a whole number", float: "a number"}.get(kind, "another value")
        other = f" or {entry.metadata['unset']}" if entry.metadata.get("unset") else ""
        raise ConfigError(f"{flag_of(entry)} is {repr(value)[:60]}; give {what}{other}") from None


def declared(function: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """A function of any keywords, with these as its signature."""
    options = list(parameters)
    function.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    function.__annotations__ = {option.name: option.annotation for option in options}
    function.in_file = {  # type: ignore[attr-defined]
        option.name: about for option in options for about in get_args(option.annotation) if isinstance(about, InFile)
    }
    function.rare = {option.name for option in options if RARE in get_args(option.annotation)}  # type: ignore[attr-defined]
    return function


def _with_nearest(name: str, allowed: list[str]) -> str:
    """An unknown option of a file, and the one that may be meant."""
    known = [option.replace("_", "-") for option in allowed]
    near = get_close_matches(name.replace("_", "-"), known, n=1)
    return name.replace("_", "-")[:60] + (f" (did you mean {near[0]}?)" if near else "")


class InFile(NamedTuple):
    """What a config file may say of an option: values of its type; `words` beside those, true and false in their place.

    Numbers may stand in quotes, as they are typed.
    """

    kind: Any
    words: Sequence[str] = ()

    def fits(self, value: Any) -> bool:
        """Whether a value of a TOML file is one of the option."""
        item = get_args(self.kind)[0] if get_origin(self.kind) is tuple else self.kind
        parts: Sequence[Any] = [value]
        if item is not self.kind and isinstance(value, (list, str)):
            parts = names(value) if isinstance(value, str) else value
        return value in self.words or all(self._fits(item, part) for part in parts)

    def _fits(self, item: Any, value: Any) -> bool:
        if isinstance(value, bool):
            return item is bool or bool(self.words)
        if isinstance(value, str) and item in (int, float):
            with suppress(ValueError):
                return math.isfinite(item(value))
            return False
        kinds: Any = {bool: (), int: int, float: (int, float), Path: str}.get(item, (str, int, float))
        return isinstance(value, kinds)

    def __str__(self) -> str:
        """What may be given."""
        is_list = get_origin(self.kind) is tuple
        item = get_args(self.kind)[0] if is_list else self.kind
        plain = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path in quotes"}
        several = {int: "whole numbers", float: "numbers", Path: "paths in quotes"}
        named = f"[…], {several.get(item, 'texts in quotes')}" if is_list else plain.get(item, "text in quotes")
        return " or ".join([named, *self.words])


def read_config(path: Path, allowed: Mapping[str, InFile]) -> dict[str, Any]:
    """Options from a TOML file, dashes or underscores alike, lists with commas.

    ConfigError lists every key that is no option, and names one that is there twice or whose value is of another type.
    """
    from headscope.files.serialize import read_toml

    if not os.path.exists(path):
        raise ConfigError(no_path(path, "config file"))
    content = read_toml(path)
    options = {key.replace("-", "_"): value for key, value in content.items()}
    if twice := [key for key in content if "-" in key and key.replace("-", "_") in content]:
        raise ConfigError(f"{path}: {twice[0]} is there twice, also as {twice[0].replace('-', '_')}; keep one")
    if strange := sorted(set(options) - set(allowed)):
        from headscope.cli.mhr_options import answer

        if advice := answer("--" + strange[0].replace("_", "-")):
            raise ConfigError(f"{path}: {advice}")
        listed = ", ".join(_with_nearest(name, [*allowed]) for name in strange[:5]) + (" …" if len(strange) > 5 else "")
        raise ConfigError(f"{path}: unknown option {listed}; --help-all shows the options of this command")
    if tables := [name for name, value in options.items() if isinstance(value, dict)]:
        raise ConfigError(f"{path}: {tables[0]} is a table; it must be the value of an option")
    for key, value in options.items():
        if not allowed[key].fits(value):
            shown = json.dumps(value, default=str, ensure_ascii=False)[:60]
            raise ConfigError(f"{path}: {key.replace('_', '-')} = {shown} is of another type; give {allowed[key]}")
    return {key: ",".join(map(str, value)) if isinstance(value, list) else value for key, value in options.items()}


def names(text: str | None) -> list[str]:
    """`a, b` as a list."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


LISTS: Mapping[str, Callable[[], list[str]]] = {
    "{objectives}": objective_names,
    "{prompt_objectives}": lambda: objective_names(prompts=True),
    "{metrics}": metric_names,
    "{learners}": lambda: list(learners()),
    "{priced}": lambda: [name for name, learner in learners().items() if learner.priced],
    "{gate_rates}": lambda: [f"{learner.gate_lr:g} ({name})" for name, learner in learners().items()],
    "{engines}": engine_list,
    "{exports}": export_list,
    "{quantizations}": quantization_list,
    "{goals}": goal_list,
}


def filled(text: str) -> str:
    """A help text with its lists."""
    for name, known in LISTS.items():
        text = text.replace(name, ", ".join(known())) if name in text else text
    return text
