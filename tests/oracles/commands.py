"""Every option of every command in the program itself, and a run of each command that works."""

import io
import itertools
import random
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from headscope.cli import main
from headscope.cli.options import kind_of
from headscope.config.option import declared_options
from headscope.formats.native import NATIVE
from tests.oracles import checkpoints, lessons


@dataclass(frozen=True)
class Option:
    """One option: how it is written, and the kind of value that it takes ("" for a switch)."""

    flag: str
    kind: str

    @property
    def number(self) -> bool:
        """Whether its value is one number."""
        return self.kind in ("integer", "float")


@dataclass(frozen=True)
class Command:
    """The words that name a command, and its options."""

    words: tuple[str, ...]
    options: tuple[Option, ...] = field(repr=False)


def commands() -> list[Command]:
    """All commands but the demonstration, which takes minutes and has no option of its own."""
    root = typer.main.get_command(main.app)
    return [command for command in _below(root, ()) if command.words != ("demo",)]


def _below(command: Any, words: tuple[str, ...]) -> Iterator[Command]:
    if not hasattr(command, "list_commands"):
        yield Command(words, tuple(_options(command)))
        return
    context = command.context_class(command)
    for name in command.list_commands(context):
        yield from _below(command.get_command(context, name), (*words, name))


def _options(command: Any) -> Iterator[Option]:
    """Options of the command and of its analyses; an option without a flag is `--set=NAME`."""
    for entry, hint in command.callback.entries:
        name = (entry.metadata["name"] or entry.name).replace("_", "-")
        if not entry.metadata["argument"]:
            yield Option(f"--set={name}" if entry.metadata["flagless"] else f"--{name}", kind(hint))
    for owner, cls in (command.callback.owners or dict)().items():
        for entry, hint in declared_options(cls):
            yield Option(f"--set={owner}.{entry.name}", kind(hint))


def kind(hint: Any) -> str:
    """integer, float, another word, or "" of a switch."""
    words = {int: "integer", float: "float", bool: ""}
    return words.get(kind_of(hint), "text")


@dataclass(frozen=True)
class CommandResult:
    """The end of a command: its status, its stdout and stderr, and the exception that nobody caught."""

    status: int
    stdout: str
    error: str
    crash: BaseException | None = None

    @property
    def orderly(self) -> bool:
        """Success, or one line of error."""
        line = self.error.count("\n") == 1 and self.error.startswith("error: ")
        return self.crash is None and (self.status == 0 or (self.status == 2 and line))


def run_cli(arguments: list[str], *, stdin: bytes = b"") -> CommandResult:
    """A command in this process."""
    before, out, err = (sys.argv, sys.stdin), _Bytes(), io.StringIO()
    sys.argv, sys.stdin = ["headscope", *arguments], io.TextIOWrapper(io.BytesIO(stdin))
    status, crash = 0, None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main.run()
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException as error:
        status, crash = 1, error  # any error at all is what is looked for
    finally:
        sys.argv, sys.stdin = before
    return CommandResult(status, out.getvalue(), err.getvalue(), crash)


class _Bytes(io.StringIO):
    """Standard output that takes bytes too."""

    @property
    def buffer(self) -> io.BytesIO:
        return io.BytesIO()


class Stage:
    """A folder with what commands need: a small checkpoint, texts, and runs of other commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        NATIVE.save(checkpoints.small(), folder / "model")
        chance = random.Random(5)
        for side, lines in (("source", checkpoints.SOURCES), ("target", checkpoints.TARGETS)):
            text = "".join(f"{chance.choice(lines)}\n" for _ in range(6))
            (folder / side).write_text(text, encoding="utf-8")
        (folder / "lessons").mkdir()
        lessons.texts(folder / "lessons", lines=12)
        self.finished_runs: set[str] = set()
        self.numbers = itertools.count()

    def arguments(self, words: tuple[str, ...], out: Path) -> list[str]:
        """A command that works, writing to `out`."""
        model, text = str(self.folder / "model"), ["--source", str(self.folder / "source")]
        pair = [*text, "--target", str(self.folder / "target")]
        learning = [*pair, "--max-sentences", "4", "--valid-sentences", "2", "--out", str(out)]
        plain: dict[tuple[str, ...], list[str]] = {
            ("show",): [model],
            ("list",): ["metrics", model],
            ("analyze",): [model, *pair, *shlex.split("--only confidence --no-figures --bootstrap 10 --out"), str(out)],
            ("evaluate",): [model, *pair, "--bootstrap", "10"],
            ("translate",): [model],
            ("convert",): [model, str(out), "--to", "native"],
            ("prune", "remove"): [model, "--heads", "cross.0.0", "--out", str(out), "--rounds", "0"],
            ("prune", "rank"): [model, "--by", "magnitude", "--keep", "3", *learning],
            ("prune", "l0"): [model, "--keep", "3", "--updates", "2", *learning],
            ("prune", "subset"): [model, "--keep", "3", "--updates", "2", *learning],
            ("prune", "sweep"): [model, "--methods", "magnitude", "--keep", "3", "--bootstrap", "10", *learning],
            ("prune", "shrink"): [model, *self._shrink(out)],
        }
        if words[0] == "train":
            return [*words, *self._training(out)]
        if words[0] == "plot":
            return [*words, *self._plot(words[1]), "--out", str(out.with_suffix(".svg"))]
        return [*words, *plain[words]]

    def _shrink(self, out: Path) -> list[str]:
        texts = self.folder / "lessons"
        sides = ["--source", str(texts / "source.txt"), "--target", str(texts / "target.txt"), "--rounds", "0"]
        ranking = ["--by", "magnitude", "--allocate", "global", "--compensate", "none", "--keep", "3"]
        return [*sides, *ranking, "--out", str(out)]

    def _training(self, out: Path) -> list[str]:
        texts = self.folder / "lessons"
        sizes = {
            **{"encoder-layers": 1, "decoder-layers": 1, "d-model": 8, "d-ffn": 8, "heads": 2, "vocab-size": 40},
            **{"max-tokens": 60, "updates": 2, "beam": 1, "bleu-every": 0, "max-sentences": 8, "device": "cpu"},
            **{"source": texts / "source.txt", "target": texts / "target.txt", "out": out},
        }
        return [part for name, value in sizes.items() for part in (f"--{name}", str(value))]

    def _plot(self, figure: str) -> list[str]:
        run = self.run("analyze", "--also", "similarity,positional")
        special = {
            "training": [self.run_of(("train", "baseline"))],
            "pruning": [self.run_of(("prune", "rank"))],
            "compare": [run, run],
            "attention": [run, "--heads", "encoder-self.0.*", "--index", "0"],
        }
        return special.get(figure, [run])

    def run(self, name: str, *more: str) -> str:
        """The folder of a run of a command, made once."""
        return self.run_of((name,), *more)

    def run_of(self, words: tuple[str, ...], *more: str) -> str:
        """The folder of a run of a command of several words, made once."""
        folder = self.folder / "-".join(words)
        if folder.name not in self.finished_runs:
            result = run_cli([*self.arguments(words, folder), *more])
            assert result.status == 0 and result.crash is None, result
            self.finished_runs.add(folder.name)
        return str(folder)
