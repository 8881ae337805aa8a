"""Options that several commands share, and `--config`, which sets any of them from a TOML file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from headscope.bounds import BEAM, SEED, WHOLE
from headscope.errors import ConfigError, DataError
from headscope.files.output_checks import Input, check_inputs

DATA, ANALYSES, SEARCH, MODEL, OUTPUT = "Data", "Analyses", "Search", "Model and speed", "Output"

CheckpointName = Annotated[
    str, typer.Argument(metavar="CKPT", help="Checkpoint: a file, a directory or a hub id (owner/name).")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.", rich_help_panel=MODEL)]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto (as stored; float32 on a CPU), float32, float64, bfloat16 or float16.",
        rich_help_panel=MODEL,
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="auto|FILE",
        help="Spread a Hugging Face model over GPUs, the CPU's memory and the disk: auto, or a JSON file of modules "
        "and devices (needs headscope[large]).",
        rich_help_panel=MODEL,
    ),
]
FormatName = Annotated[
    str | None,
    typer.Option("--format", help="Checkpoint format; default: found from content.", rich_help_panel=MODEL),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.", rich_help_panel=OUTPUT)]
Force = Annotated[
    bool, typer.Option("--force", help="Replace the run of the same command in the output.", rich_help_panel=OUTPUT)
]
HubName = Annotated[
    str | None,
    typer.Option(
        metavar="USER/NAME",
        help="Push the complete folder to the model hub, with its card; a new repository is private.",
        rich_help_panel=OUTPUT,
    ),
]
HubPublic = Annotated[
    bool, typer.Option("--hub-public", help="Make a new repository on the hub public.", rich_help_panel=OUTPUT)
]
Dicts = Annotated[
    Path | None,
    typer.Option(
        "--dicts",
        metavar="DIR",
        help="Dictionaries or vocabularies of fairseq and story-of-heads files; default: beside the checkpoint.",
        rich_help_panel=MODEL,
    ),
]
HyperParameters = Annotated[
    Path | None,
    typer.Option("--hp", metavar="FILE", help="Hyper-parameters of a story-of-heads file.", rich_help_panel=MODEL),
]
Bpe = Annotated[
    Path | None,
    typer.Option(
        "--bpe",
        metavar="CODES",
        help="BPE merges or SentencePiece model that split text; default: text is already split into subwords.",
        rich_help_panel=MODEL,
    ),
]
Mask = Annotated[
    str | None,
    typer.Option(
        "--mask",
        metavar="LIST",
        help="Heads to switch off: decoder-self.1.3,cross.0.*, or a file with a name a line.",
        rich_help_panel=MODEL,
    ),
]
Beam = Annotated[
    int | None,
    typer.Option("--beam", min=1, max=BEAM, help="Beam; default: the checkpoint's own.", rich_help_panel=SEARCH),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option("--lenpen", help="Power of the length penalty; default: the checkpoint's.", rich_help_panel=SEARCH),
]
MaxLenA = Annotated[
    float | None,
    typer.Option(
        "--max-len-a",
        min=0,
        help="n source tokens give at most A · n + B; default: the checkpoint's.",
        rich_help_panel=SEARCH,
    ),
]
MaxLenB = Annotated[int | None, typer.Option("--max-len-b", min=0, help="B of it.", rich_help_panel=SEARCH)]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        min=2,
        help="Subwords a line may have, longer ones are cut; default: the model's limit, or 1024 where it has none.",
        rich_help_panel=DATA,
    ),
]
KeepBpe = Annotated[bool, typer.Option("--keep-bpe", help="Leave the subwords of words apart.", rich_help_panel=OUTPUT)]
BatchTokens = Annotated[int, typer.Option(min=1, max=WHOLE, help="Token positions in a batch.", rich_help_panel=MODEL)]
MaxSentences = Annotated[
    int | None, typer.Option(min=1, max=WHOLE, help="Use only the first N lines.", rich_help_panel=DATA)
]
Seed = Annotated[
    int, typer.Option(min=0, max=SEED, help="Seed of bootstrap and random tokens.", rich_help_panel=ANALYSES)
]


def _load_config(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        names_of = _known(context)
        options = {names_of[key]: value for key, value in read_config(path, list(names_of)).items()}
        context.default_map = {**(context.default_map or {}), **options}
    return path


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


class RunningOptions:
    """Where the model runs."""

    device: Device = "auto"
    dtype: Dtype = "auto"


class PlacementOptions:
    """Where the parts of a large model go."""

    device_map: DeviceMap = None


Source2 = Annotated[
    Path | None,
    typer.Option(
        "--source2", metavar="FILE", help="Encoders: the other text of every pair, line by line.", rich_help_panel=DATA
    ),
]
Labels = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Classifiers: the class of every line, by name or number. Models that tag words: CoNLL columns (a word "
        "and its tag a line), which are the text where --source is absent.",
        rich_help_panel=DATA,
    ),
]


Pairs = Annotated[
    bool,
    typer.Option("--pairs", help="Every line of --source is a pair of texts with a tab between.", rich_help_panel=DATA),
]


class LabelledText:
    """Pairs of texts, and what a classifier should say of them."""

    source2: Source2 = None
    pairs: Pairs = False
    labels: Labels = None


class PromptTexts:
    """Prompts, their corrupt versions, and the answers."""

    clean: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts, one a line, in the place of --source.", rich_help_panel=DATA),
    ] = None
    corrupt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The same prompts with another answer, as many subwords each.", rich_help_panel=DATA
        ),
    ] = None
    answer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What the model should say to each clean prompt, and after a tab what it should not.",
            rich_help_panel=DATA,
        ),
    ] = None


class CompanionOptions:
    """What belongs to a checkpoint and is not in it."""

    format: FormatName = None
    dicts: Dicts = None
    hp: HyperParameters = None
    bpe: Bpe = None


class Ending:
    """What every command that writes results takes last."""

    config: Config = None
    json: Json = False
    force: Force = False


Command = Callable[[dict[str, Any]], None]


def takes(*groups: type[Any] | Sequence[inspect.Parameter]) -> Callable[[Command], Callable[..., None]]:
    """The options of a command are the annotated attributes of these classes, in their order; or options as they are.

    The command itself is called with one mapping, of every option's value by its name.
    """

    def decorate(function: Command) -> Callable[..., None]:
        def command(**values: Any) -> None:
            check_config(values)
            check_texts(values)
            function(values)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return declared(command, (option for group in groups for option in _attributes(group)))

    return decorate


def check_config(values: Mapping[str, Any]) -> None:
    """OutputError where an output would replace the file that --config names."""
    for name in ("out", "per_sentence"):
        if values.get("config") and values.get(name):
            check_inputs(values[name], [Input(values["config"])])


def check_texts(values: Mapping[str, Any]) -> None:
    """DataError for a text that is not there, before anything heavy is imported."""
    from headscope.config import PromptFiles, ValidatedTextFiles
    from headscope.files.reading import exists

    for entry in (*fields(ValidatedTextFiles), *fields(PromptFiles)):
        path = values.get(entry.name)
        if isinstance(path, Path) and not exists(path):
            raise DataError(f"there is no file {path}")


def _attributes(group: type[Any] | Sequence[inspect.Parameter]) -> Iterable[inspect.Parameter]:
    if not isinstance(group, type):
        yield from group
        return
    for name, annotation in get_type_hints(group, include_extras=True).items():
        yield parameter(name, annotation, getattr(group, name, inspect.Parameter.empty))


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """An option as typer reads it from a signature."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option_of(field: Field[Any], hint: Any, panel: str | None) -> inspect.Parameter:
    """A field of an options class (`headscope.config.option`) as an option; lists and choices are text to typer."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    choices = [str(value) for value in get_args(hint)] if str(hint).startswith("typing.Literal") else []
    optional = type(None) in get_args(hint)
    kind: Any = parts[0] if optional else hint
    default = field.default
    assert default is not MISSING, f"option {field.name} needs a default"
    if choices or str(kind).startswith("tuple"):
        kind = str
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    about = typer.Option(
        help=field.metadata.get("help"),
        metavar=field.metadata.get("metavar") or ("|".join(choices) or None),
        min=field.metadata.get("minimum"),
        rich_help_panel=field.metadata.get("panel") or panel,
    )
    return parameter(field.name, Annotated[kind | None if optional else kind, about], default)


def value_of(name: str, hint: Any, value: Any) -> Any:
    """What typer, a TOML file or run.json gives, as the type of an option.

    ConfigError where it is none.
    """
    from headscope.config import flag

    parts = [part for part in get_args(hint) if part is not type(None)]
    kind = parts[0] if type(None) in get_args(hint) else hint
    if value is None:
        return None
    if str(kind).startswith("tuple"):
        item = get_args(kind)[0]
        texts = value if isinstance(value, (list, tuple)) else [part.strip() for part in str(value).split(",") if part]
        try:
            return tuple(item(text) for text in texts)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{flag(name)} {repr(value)[:60]} must be {item.__name__} numbers with commas") from None
    if kind is bool and isinstance(value, str):
        return value.lower() in ("true", "yes", "1")
    try:
        return kind(value) if kind in (int, float, str, Path) else value
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{flag(name)} is {repr(value)[:60]}, which is of the wrong type") from None


def declared(function: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """A function of any keywords, with these as its signature."""
    options = list(parameters)
    function.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    function.__annotations__ = {option.name: option.annotation for option in options}
    return function


def settings_of(values: Mapping[str, Any], *, lists: Sequence[str] = ()) -> tuple[bool, dict[str, Any]]:
    """Whether the result is wanted as JSON, and the fields of the command's config: lists as tuples of names."""
    settings = {name: value for name, value in values.items() if name not in ("config", "json")}
    return values["json"], settings | {name: tuple(names(settings[name])) for name in lists}


def _known(context: typer.Context) -> dict[str, str]:
    """The parameter that every option sets, by the option's long name (`--from` may set `run`) and by its own."""
    parameters: dict[str, str] = {}
    for parameter in context.command.params:
        name = parameter.name
        if name is not None and name not in ("config", "help"):
            long = [flag.removeprefix("--").replace("-", "_") for flag in parameter.opts if flag.startswith("--")]
            parameters |= dict.fromkeys([name, *long], name)
    return parameters


def read_config(path: Path, allowed: list[str]) -> dict[str, Any]:
    """Options from a TOML file, dashes or underscores alike; ConfigError lists every key that is no option."""
    from headscope.files.reading import exists
    from headscope.files.serialize import read_toml

    if not exists(path):
        raise ConfigError(f"there is no config file {path}")
    options = {key.replace("-", "_"): value for key, value in read_toml(path).items()}
    if strange := sorted(set(options) - set(allowed)):
        from headscope.cli.mhr_options import answer

        if advice := answer("--" + strange[0].replace("_", "-")):
            raise ConfigError(f"{path}: {advice}")
        shown = ", ".join(sorted(name.replace("_", "-") for name in allowed))
        unknown_names = ", ".join(name[:60] for name in strange[:5]) + (" …" if len(strange) > 5 else "")
        raise ConfigError(f"{path}: unknown option {unknown_names}; options of this command: {shown}")
    if tables := [name for name, value in options.items() if isinstance(value, dict)]:
        raise ConfigError(f"{path}: {tables[0]} is a table; it must be the value of an option")
    return {key: ",".join(map(str, value)) if isinstance(value, list) else value for key, value in options.items()}


def names(text: str | None) -> list[str]:
    """`a, b` as a list."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]
