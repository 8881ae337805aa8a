"""`headscope prune l0`, `subset` and a command for every other learner: gates that learn which heads stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from headscope.cli import console
from headscope.cli.answers import show_result
from headscope.cli.failures import Application
from headscope.cli.next_commands import command_line
from headscope.cli.options import made_of, option_of, read
from headscope.cli.prune_rank import show_choice
from headscope.config.option import declared_options
from headscope.pruning.options.learn import LEARNERS, DeclaredLearner, LearnConfig, Prices
from headscope.pruning.options.shared import HEADS

if TYPE_CHECKING:
    from headscope.distributed import Processes
    from headscope.pruning.learning.lambdas import LambdaSweep


OUTPUTS = """Writes removed.txt, kept.txt, ranking.csv, gates.csv (the trajectory), pruning.json, and DIR/model, the
checkpoint as it has learnt, with all its heads.

Processes of torchrun share the sentences of every batch."""


def command_of(learner: DeclaredLearner) -> Any:
    """The command of a learner, with its options and those of all learners."""
    own = [option_of(entry, hint, HEADS) for entry, hint in declared_options(learner.Options)]
    classes = (LearnConfig, Prices) if learner.priced else (LearnConfig,)

    @made_of(*classes, more=own, verbose=True)
    def command(values: Mapping[str, Any], *, json: bool, verbose: bool) -> None:
        prices = read(Prices, values).strengths if learner.priced else ()
        price = {"strength": prices[0] if prices else None} if learner.priced else {}
        method = read(LEARNERS.get(learner.name).Options, values, **price)
        _learn(read(LearnConfig, values, method=method), prices, json=json, verbose=verbose)

    made = Application(add_completion=False)
    help_text = "\n\n".join([learner.summary, OUTPUTS, learner.about])
    made.command(name=learner.name, help=help_text, short_help=learner.summary)(command)
    return typer.main.get_command(made)


def _learn(config: LearnConfig, strengths: Sequence[float] = (), *, json: bool, verbose: bool) -> None:
    from headscope.distributed import process_group
    from headscope.pruning.learning.lambdas import lambdas_left
    from headscope.pruning.learning.learn import finished, resumable
    from headscope.results.choices import choice_answers

    with process_group() as processes:
        if config.resume and (record := processes.on_main(lambda: finished(config))):
            if processes.main:
                console.say(f"the run in {config.out} is complete; nothing is left to resume")
                if json:
                    answers = [answer.to_json() for answer in choice_answers(record, config.out.resolve().name)]
                    console.print_json({"out": str(config.out), "record": record, "answers": answers})
            return
        try:
            _run(config, strengths, processes, json=json, verbose=verbose)
        except KeyboardInterrupt:
            if not (lambdas_left(config.out) if len(strengths) > 1 else resumable(config.out)):
                raise
            instead = " instead of --force" if config.force else ""
            if processes.main:
                console.say(
                    f"interrupted; the same command with --resume{instead} goes on from the last state that was saved"
                )
            raise typer.Exit(130) from None


def _run(config: LearnConfig, strengths: Sequence[float], processes: Processes, *, json: bool, verbose: bool) -> None:
    """Learn with all processes; the first one shows the result."""
    from headscope.pruning.learning.lambdas import lambdas_complete, run_lambdas
    from headscope.pruning.learning.learn import run_learning

    if len(strengths) < 2:
        choice = run_learning(config, progress=console.updates, processes=processes)
        if processes.main:
            show_choice(choice, json=json, verbose=verbose, options=config.settings())
        return
    if config.resume and processes.main and lambdas_complete(config.out):
        console.say(f"the runs in {config.out} are complete; nothing is left to resume")
    sweep = run_lambdas(config, strengths, progress=console.updates, processes=processes)
    if processes.main:
        _show_prices(sweep, json=json, verbose=verbose)


def _show_prices(sweep: LambdaSweep, *, json: bool, verbose: bool) -> None:
    out = sweep.config.out
    if json:
        console.print_json({"out": str(out), **sweep.to_json()})
        return
    curve = command_line("plot", "pruning", *sweep.records, "--out", f"{out}.png")
    show_result(sweep, verbose=verbose, files=[f"Results: {out}"], commands=[("Curve", curve)])
