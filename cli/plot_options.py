"""Options that all commands of `headscope plot` share: where a figure goes, and how it is set."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from headscope.cli.options import declared, parameter

if TYPE_CHECKING:  # matplotlib takes a second to import: only inside the commands
    from matplotlib.figure import Figure

LOOK = "Size and looks"
FORCE = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
JSON = Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")]
SHARED: dict[str, tuple[Any, Any]] = {
    "width": (
        Annotated[
            float | None,
            typer.Option(
                "--width",
                metavar="INCHES",
                help="Width of the figure; default: what its panels need. A column of a paper has 3.3, a page 6 to 7.",
                rich_help_panel=LOOK,
            ),
        ],
        None,
    ),
    "style": (
        Annotated[
            str,
            typer.Option(
                "--style",
                metavar="screen|paper",
                help="screen: letters of 8 to 14 points; paper: of 6 to 10 points, PNG with 300 dots per inch.",
                rich_help_panel=LOOK,
            ),
        ],
        "screen",
    ),
    "signature": (
        Annotated[
            bool,
            typer.Option(
                "--signature/--no-signature",
                help="Write below the figure what the numbers depend on.",
                rich_help_panel=LOOK,
            ),
        ],
        True,
    ),
    "title": (
        Annotated[
            bool,
            typer.Option(
                "--title/--no-title", help="Write title, model and data above the figure.", rich_help_panel=LOOK
            ),
        ],
        True,
    ),
    "dpi": (
        Annotated[
            int | None,
            typer.Option(
                "--dpi",
                min=30,
                max=2400,
                help="Dots per inch of PNG; default: 150, with --style paper 300.",
                rich_help_panel=LOOK,
            ),
        ],
        None,
    ),
    "force": (FORCE, False),
    "as_json": (JSON, False),
}


@dataclass(frozen=True)
class FigureOutput:
    """Where figures go, and how they are written and told."""

    out: Path
    dpi: int | None
    force: bool
    as_json: bool

    def check(self) -> None:
        """ConfigError or OutputError before any work, where a single figure cannot be written."""
        from headscope.report.layout.save import check_path

        check_path(self.out, force=self.force)

    def write(self, name: str, runs: Sequence[str], figure: Figure) -> None:
        """Write a single figure and say so."""
        from headscope.report.layout.save import write_figure

        self.say(name, [(list(runs), write_figure(figure, self.out, dpi=self.dpi, force=self.force))])

    def say(self, figure: str, written: Sequence[tuple[list[str], Path]]) -> None:
        """One line on stdout about the files written."""
        say(figure, written, as_json=self.as_json)


Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="PATH",
        help="File to write: .png, .svg or .pdf. For several runs a directory, or a name with {run} in it.",
    ),
]


def drawing(function: Callable[..., None]) -> Callable[..., None]:
    """A command of what `function` takes and the shared options, which reach it as `output`, in their style."""
    hints = get_type_hints(function, include_extras=True)
    own = [option for option in inspect.signature(function).parameters.values() if option.name != "output"]
    return shared_command(function, [parameter(option.name, hints[option.name], option.default) for option in own])


def shared_command(function: Callable[..., None], own: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """The same, of these parameters."""
    required = inspect.Parameter.empty
    needed = [option for option in own if option.default is required]
    optional = [option for option in own if option.default is not required]
    common = [parameter(name, *about) for name, about in SHARED.items()]

    def command(**values: Any) -> None:
        from headscope.files.output_checks import check_inputs, inputs_of
        from headscope.report.layout.style import FigureStyle, figure_style

        if values["out"].is_file():
            check_inputs(values["out"], inputs_of({name: values[name] for name in values.keys() - {"out"}}))
        shared = {name: values.pop(name) for name in (*SHARED, "out")}
        style = FigureStyle(shared["style"], shared["width"], title=shared["title"], signature=shared["signature"])
        with figure_style(style):
            function(**values, output=FigureOutput(shared["out"], shared["dpi"], shared["force"], shared["as_json"]))

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return declared(command, [*needed, parameter("out", Out, required), *optional, *common])


def say(figure: str, written: Sequence[tuple[list[str], Path]], *, as_json: bool) -> None:
    """One line on stdout about the files written."""
    if as_json:
        files: list[dict[str, Any]] = [{"figure": figure, "runs": names, "path": str(path)} for names, path in written]
        typer.echo(json.dumps({"written": files}))
        return
    from rich.text import Text

    from headscope.cli import console

    line = Text("wrote ").append(", ".join(str(path) for _, path in written), style="bold")
    console.out().print(line, soft_wrap=True)
