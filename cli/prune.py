"""`headscope prune`: take heads out of a model."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import typer

from headscope.cli import console
from headscope.cli.console import Printer
from headscope.cli.lazy_commands import LazyGroup, build_command
from headscope.cli.next_commands import after_choice, after_removal, command_line
from headscope.cli.options import options_from
from headscope.config.option import take_config
from headscope.pruning.options.choice import LEARNERS, LearnConfig, RankConfig, SweepConfig, learners
from headscope.pruning.options.removal import RemoveConfig, ShrinkConfig
from headscope.pruning.options.shared import HEADS

if TYPE_CHECKING:
    from headscope.results.ranking import Ranking
    from headscope.results.removal import Removal

OUTPUTS = """Writes removed.txt, kept.txt, ranking.csv, gates.csv (the trajectory), pruning.json, and DIR/model, the
checkpoint as it has learnt, with all its heads.

Processes of torchrun share the sentences of every batch."""


def group(**settings: Any) -> LazyGroup:
    """The group of commands: those of learners, then `COMMANDS`."""
    summaries = {name: learner.summary for name, learner in learners().items()}
    summaries |= {name: inspect.cleandoc(run.__doc__ or "").splitlines()[0] for name, run in COMMANDS.items()}
    return LazyGroup(summaries, command_of, shared=(*learners(), "rank", "sweep"), **settings)


@options_from(RankConfig, verbose=True)
def rank(config: RankConfig, printer: Printer) -> None:
    """Rank heads by a measure, one-shot or scoring anew in steps, and decide which go.

    The lowest go first, or the highest: which, and why, is printed. Writes removed.txt, kept.txt, ranking.csv and
    pruning.json; with --tune-updates also DIR/model.

    Processes of torchrun share the text.
    """
    from headscope.pruning.ranking.rank_run import run_shared_ranking

    if choice := run_shared_ranking(config, progress=console.updates):
        show_choice(choice, config, printer)


def show_choice(choice: Ranking, config: RankConfig | LearnConfig, printer: Printer) -> None:
    """Print which heads were chosen, and the next commands."""
    printer.show(
        choice, out=choice.folder, files=[f"Results: {choice.folder}"], commands=after_choice(choice, vars(config))
    )


@options_from(RemoveConfig, verbose=True)
def remove(config: RemoveConfig, printer: Printer) -> None:
    """Cut heads out of the weights and write the smaller checkpoint, if it computes what the masked one does.

    The output has the input's format. Differences, savings and times are printed and kept in pruning.json.

    A Hugging Face class has one number of heads for all layers, so its folder is self-contained: headscope opens it,
    and transformers does with trust_remote_code=True, without headscope. With --compensate the masked model is the one
    whose output projections are refitted. With --merge-kv no head goes: key/value heads are merged, and the model is
    compared with the one whose projections are averaged in place.
    """
    from headscope.pruning.removal.remove import run_removal

    show_removal(run_removal(config, progress=console.updates), config, printer)


def show_removal(removal: Removal, config: RemoveConfig | ShrinkConfig, printer: Printer) -> None:
    """Print what a removal saved and cost, and the next command."""
    page = removal.folder / "page.html"
    files = [f"Page: {page}"] if page.is_file() else []
    printer.show(removal, out=removal.path, files=files, commands=[after_removal(removal, vars(config))])


@options_from(ShrinkConfig, verbose=True)
def shrink(config: ShrinkConfig, printer: Printer) -> None:
    """The whole way to a smaller model: rank, allocate, refit, remove, verify, measure on two texts, write.

    Which heads go, how many of each layer, and how the others make up for them is found on --source. What the model
    loses is measured on text that nothing was fitted to, and on a second text of another kind. A run that was
    interrupted goes on with the same command.

    Writes the smaller checkpoint, its card, pruning.json, page.html, and where the size is searched for those that
    were tried (sizes/sweep.csv).
    """
    from headscope.pruning.shrink import run_shrink

    try:
        removal = run_shrink(config, progress=console.updates)
    except KeyboardInterrupt:
        console.end_interrupted("; what was ranked and measured is kept: the same command goes on")
    show_removal(removal, config, printer)


@options_from(SweepConfig, verbose=True)
def sweep(config: SweepConfig, printer: Printer) -> None:
    """Prune by several methods, to several sizes, with several seeds, measure all: one table.

    Writes sweep.csv, survivors.csv and sweep.json. Goes on with what an interrupted run left.

    Each finished cell is kept: the same command does what is missing; methods, sizes and seeds may be added. Learnt
    methods train a copy of the model; rankings close the heads that score lowest, one-shot. Under torchrun the cells
    are shared out.
    """
    from headscope.pruning.sweep.sweep import cells_kept, run_shared_sweep

    try:
        result = run_shared_sweep(config, progress=console.updates)
    except KeyboardInterrupt:
        folder, number = cells_kept(config)
        console.end_interrupted(f"; {number} finished cells are kept in {folder}: the same command goes on")
    if result:
        curve = command_line("plot", "pruning", config.out, "--out", f"{config.out}.png")
        printer.show(result, out=config.out, files=[f"Results: {config.out}"], commands=[("Curve", curve)])


COMMANDS = {"shrink": shrink, "rank": rank, "sweep": sweep, "remove": remove}
"""The commands that do not belong to a learner, in the order of the help."""


def command_of(name: str) -> Any:
    """The command of a name; a learner's command has its own options and those of all learners."""
    if name not in learners():
        return build_command(COMMANDS[name], name)
    learner = learners()[name]

    def read(values: dict[str, Any]) -> list[LearnConfig]:
        method = take_config(LEARNERS.get(name).Options, values)
        return [take_config(LearnConfig, {**values, "method": method})]

    command = options_from(LearnConfig, learner.Options, verbose=True, panel=HEADS, read=read)(learn)
    return build_command(command, name, "\n\n".join([learner.summary, OUTPUTS, inspect.getdoc(learner) or ""]))


def learn(config: LearnConfig, printer: Printer) -> None:
    """Learn which heads to keep, or resume that."""
    from headscope.distributed import process_group
    from headscope.pruning.learning.learn import finished_record, resumable, run_learning
    from headscope.results.ranking import Ranking

    with process_group() as processes:
        if config.resume and processes.on_main(lambda: finished_record(config)):
            if processes.main:
                console.say(f"the run in {config.out} is complete; nothing is left to resume")
                if printer.json:
                    printer.show(Ranking.open(config.out), out=config.out)
            return
        try:
            choice = run_learning(config, progress=console.updates, processes=processes)
        except KeyboardInterrupt:
            if not resumable(config.out):
                raise
            instead = " instead of --force" if config.force else ""
            if processes.main:
                console.say(
                    f"interrupted; the same command with --resume{instead} goes on from the last state that was saved"
                )
            raise typer.Exit(130) from None
        if processes.main:
            show_choice(choice, config, printer)
