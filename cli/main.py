"""The `headscope` command: one file per sub-command, heavy imports only inside them."""

from __future__ import annotations

import signal
import sys

import typer

from headscope.cli.analyze import analyze
from headscope.cli.convert import convert
from headscope.cli.demo import demo
from headscope.cli.evaluate import evaluate
from headscope.cli.plot import app as plot
from headscope.cli.prune import app as prune
from headscope.cli.show import show
from headscope.cli.train import app as train
from headscope.cli.translate import translate
from headscope.errors import HeadscopeError

EPILOG = """\
Start here:  headscope demo

Your own:  headscope show CKPT,  headscope analyze CKPT --source text.en --out run,
headscope plot heads run --out heads.pdf"""

app = typer.Typer(
    name="headscope",
    help="What the attention heads of a trained Transformer do, how much each one matters, and which can go.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(show)
app.command()(analyze)
app.add_typer(train, name="train")
app.add_typer(plot, name="plot")
app.add_typer(prune, name="prune")
app.command()(evaluate)
app.command()(translate)
app.command()(convert)
app.command()(demo)


def _version(wanted: bool) -> None:
    if wanted:
        import headscope

        print(f"headscope {headscope.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", help="Print the version and end.", callback=_version, is_eager=True
    ),
) -> None:
    """What the attention heads of a trained Transformer do, how much each one matters, and which can go."""


def run() -> None:
    """Entry point: errors that the user can fix end with one line and status 2, Ctrl-C with 130."""
    pressed: list[int] = []

    def press(number: int, _: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        app()
    except BaseException as error:
        if _interrupted(error) or (pressed and not isinstance(error, SystemExit)):
            print("interrupted before there was anything to keep", file=sys.stderr)
            sys.exit(130)
        if isinstance(error, HeadscopeError):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(2)
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: typer makes a status of it, lazy imports a missing module."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    run()
