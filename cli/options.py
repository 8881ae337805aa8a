"""Options that several commands share, and `--config`, which sets any of them from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headscope.errors import ConfigError

DATA, ANALYSES, MODEL, OUTPUT = "Data", "Analyses", "Model and speed", "Output"

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
FormatName = Annotated[
    str | None,
    typer.Option("--format", help="Checkpoint format; default: found from content.", rich_help_panel=MODEL),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.", rich_help_panel=OUTPUT)]
Force = Annotated[
    bool, typer.Option("--force", help="Replace the results that the output holds.", rich_help_panel=OUTPUT)
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of bootstrap and random tokens.", rich_help_panel=ANALYSES)]


def _load_config(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        context.default_map = {**(context.default_map or {}), **read_config(path, _known(context))}
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


def _known(context: typer.Context) -> list[str]:
    return [parameter.name for parameter in context.command.params if parameter.name not in (None, "config", "help")]


def read_config(path: Path, known: list[str]) -> dict[str, Any]:
    """Options from a TOML file, dashes or underscores alike; ConfigError lists every key that is no option."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}") from None
    options = {key.replace("-", "_"): value for key, value in found.items()}
    if strange := sorted(set(options) - set(known)):
        shown = ", ".join(sorted(name.replace("_", "-") for name in known))
        raise ConfigError(f"{path}: unknown option {', '.join(strange)}; options of this command: {shown}")
    return {key: ",".join(map(str, value)) if isinstance(value, list) else value for key, value in options.items()}


def names(text: str | None) -> list[str]:
    """`a, b` as a list."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]
