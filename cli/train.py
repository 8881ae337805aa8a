"""`headscope train VARIANT`: a sub-command per registered variant, its options made from config classes."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from headscope.cli import console
from headscope.cli.answers import show_result
from headscope.cli.failures import Application, PlainGroup, build_command, unknown_command
from headscope.cli.next_commands import command_line
from headscope.cli.options import options_from, read
from headscope.config import option

if TYPE_CHECKING:
    from headscope.progress import Timer
    from headscope.results.training import Training
    from headscope.training.variant import Variant


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """What becomes of an earlier run in the same directory."""

    resume: bool = option(
        False,
        "Go on with the run in DIR, exactly. Options that are not given are those it has. Another --updates or "
        "--max-epochs moves its end, not its schedules. Begins one where there is none.",
        panel="Validation and checkpoints",
        common=True,
    )
    force: bool = option(
        False, "Replace the run of the same command in the output.", panel="Validation and checkpoints", common=True
    )


class Variants(PlainGroup):
    """The registered variants as commands, and combinations of them; imported when one is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of variants, the baseline first."""
        from headscope.training.variant import VARIANTS

        return sorted(VARIANTS.names(), key=lambda name: (name != "baseline", name))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a variant, or of several (`mixing+swap`); ConfigError where there is none of that name."""
        from headscope.training.config import TrainConfig
        from headscope.training.variant import find_variant

        if os.path.exists(cmd_name) and cmd_name not in (names := self.list_commands(ctx)):
            raise unknown_command("variant", cmd_name, names, ctx)
        variant = find_variant(cmd_name)
        text = inspect.getdoc(variant) or ""
        about = f"{variant.summary}\n\n{text}" if text and text != variant.summary else variant.summary
        classes = (TrainConfig, variant.Options, EarlierRun)
        return build_command(
            options_from(*classes, panel=variant.name.capitalize())(partial(_run, variant)), variant.name, about
        )


app = Application(
    cls=Variants,
    epilog="Variants combine:  headscope train mixing+swap+disagreement",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def train() -> None:
    """Train a Transformer, plain or in one of the variants, on raw parallel text or as a language model."""


def _run(variant: type[Variant], values: Mapping[str, Any], *, json: bool) -> None:
    from headscope.training.checkpoints import with_defaults
    from headscope.training.config import TrainConfig, remarks_on
    from headscope.training.trainer import train as run_training

    earlier = read(EarlierRun, values)
    resume, force = earlier.resume, earlier.force
    values = with_defaults(values, variant.name, resume=resume)
    config, options = read(TrainConfig, values), variant(read(variant.Options, values))
    main = os.environ.get("RANK", "0") == "0"
    with _display(main, remarks_on(config)) as display:
        result = run_training(config, options, resume=resume, force=force, listener=display, command=sys.argv[1:])
    if main:
        _show(result, json=json)
        if resume and result.update == result.begun_at and result.reason != "interrupted":
            console.say(f"the run in {result.folder} was complete; to go on, give it more --updates or --max-epochs")
    if result.reason == "interrupted":
        instead = " instead of --force" if force else ""
        console.say(
            f"interrupted after update {result.update}; the same command with --resume{instead} goes on from there"
        )
        raise typer.Exit(130)


def _show(result: Training, *, json: bool) -> None:
    if json:
        console.print_json({"out": str(result.folder), **result.to_json()})
        return
    curves = command_line("plot", "training", result.folder, "--out", f"{result.folder}-training.png")
    cite = f"Results: {result.folder}   Cite: {result.folder / 'run.json'}"
    show_result(result, files=[cite], commands=[("Curves of the training", curves)])


@contextmanager
def _display(main: bool, notes: Sequence[str]) -> Iterator[TrainingLines]:
    """Where training is shown, by the first of several processes only; `notes` once it has begun."""
    from headscope.progress import Timer

    screen = console.err()
    if not main or not screen.is_terminal:
        yield TrainingLines(console.say if main else lambda text: None, notes=notes)
        return
    with screen.status("") as status:
        yield TrainingLines(status.update, Timer(interval=0.5), notes=notes, note=console.say)


class TrainingLines:
    """A line now and then: update, loss, rate, time left; before the first one the notes."""

    def __init__(
        self,
        say: Callable[[str], None],
        timer: Timer | None = None,
        *,
        notes: Sequence[str] = (),
        note: Callable[[str], None] | None = None,
    ) -> None:
        from headscope.progress import Timer

        self.say, self.note, self.notes = say, note or say, list(notes)
        self.timer = timer or Timer()
        self.updates = self.tokens = self.since = 0
        self.loss, self.valid = 0.0, ""

    def after_update(self, run: Any, sums: Any) -> None:
        """After every update."""
        from headscope.progress import duration
        from headscope.training.config import length

        while self.notes:
            self.remark(self.notes.pop(0))
        self.updates, self.since = self.updates + 1, self.since + sums.tokens
        self.tokens, self.loss = self.tokens + sums.tokens, self.loss + sums.loss
        if not self.timer.due():
            return
        update, seconds = run.position.update, max(self.timer.elapsed(), 1e-9)
        total = length(run.config.updates, run.config.epochs, run.position.updates_per_epoch)
        time_left = [f"{duration(max(total - update, 0) * seconds / self.updates)} left"] if total else []
        parts = [
            f"update {update:,}" + (f" of {total:,}" if total else ""),
            f"epoch {run.position.epoch}",
            f"loss {self.loss / max(self.since, 1):.3f}",
            *([self.valid] if self.valid else []),
            f"{self.tokens / seconds:,.0f} tokens/s",
            *time_left,
        ]
        self.say("training: " + ", ".join(parts))
        self.loss, self.since = 0.0, 0

    def after_validation(self, run: Any, validation: Any, *, best: bool) -> None:
        """After every validation."""
        self.valid = _scores(validation)

    def remark(self, text: str) -> None:
        """Before the first update."""
        self.note(f"note: {text}")


def _scores(validation: Any) -> str:
    parts = [f"valid {validation.nll:.3f}" if validation.nll is not None else ""]
    parts.append(f"BLEU {validation.bleu:.1f}" if validation.bleu is not None else "")
    return " ".join(part for part in parts if part)
