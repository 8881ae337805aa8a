"""`headscope train VARIANT`: a sub-command per registered variant, its options made from config classes."""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.console import Printer
from headscope.cli.lazy_commands import LazyGroup, build_command
from headscope.cli.next_commands import command_line
from headscope.cli.options import options_from
from headscope.config import option
from headscope.config.option import take_config

if TYPE_CHECKING:
    from headscope.training.config import TrainConfig
    from headscope.training.variant import Variant


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """What to do with an earlier run in the output directory."""

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


class Variants(LazyGroup):
    """The commands of variants, also of several at once."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a variant, or of several (`mixing+swap`); ConfigError where there is none of that name."""
        return command_of(cmd_name) if "+" in cmd_name else super().get_command(ctx, cmd_name)


def group(**settings: Any) -> LazyGroup:
    """The group of the commands of variants, `baseline` first."""
    from headscope.training.variant import VARIANTS

    variants = sorted(VARIANTS, key=lambda entry: (entry[0] != "baseline", entry[0]))
    summaries = {name: variant.summary for name, variant in variants}
    epilog = "Variants combine:  headscope train mixing+swap+disagreement"
    return Variants(summaries, command_of, kind="variant", epilog=epilog, **settings)


def command_of(name: str) -> Any:
    """The command of a variant, or of several."""
    from headscope.training.config import TrainConfig
    from headscope.training.variant import find_variant

    variant = find_variant(name)
    text = inspect.getdoc(variant) or ""
    about = f"{variant.summary}\n\n{text}" if text and text != variant.summary else variant.summary
    classes = (TrainConfig, variant.Options, EarlierRun)
    panel, read = variant.name.capitalize(), partial(read_values, variant)
    return build_command(options_from(*classes, panel=panel, read=read)(_run), variant.name, about)


def read_values(variant: type[Variant], values: dict[str, Any]) -> tuple[TrainConfig, Variant, EarlierRun]:
    """The configs of a training; options that are not given are those of the run that `--resume` continues."""
    from headscope.training.checkpoints import with_defaults
    from headscope.training.config import TrainConfig

    earlier = take_config(EarlierRun, values)
    values = with_defaults(values, variant.name, resume=earlier.resume)
    return take_config(TrainConfig, values), variant(take_config(variant.Options, values)), earlier


def _run(config: TrainConfig, variant: Variant, earlier: EarlierRun, printer: Printer) -> None:
    from headscope.training.trainer import train as run_training

    result = run_training(
        config,
        variant,
        resume=earlier.resume,
        force=earlier.force,
        progress=console.progress,
        remark=lambda text: console.say(f"note: {text}"),
        command=sys.argv[1:],
    )
    if os.environ.get("RANK", "0") == "0":
        curves = command_line("plot", "training", result.folder, "--out", f"{result.folder}-training.png")
        files = [f"Results: {result.folder}   Cite: {result.folder / 'run.json'}"]
        printer.show(result, out=result.folder, files=files, commands=[("Curves of the training", curves)])
        if earlier.resume and result.update == result.begun_at and result.reason != "interrupted":
            console.say(f"the run in {result.folder} was complete; to go on, give it more --updates or --max-epochs")
    if result.reason == "interrupted":
        instead = " instead of --force" if earlier.force else ""
        advice = f"the same command with --resume{instead} goes on from there"
        console.end_interrupted(f" after update {result.update}; {advice}")
