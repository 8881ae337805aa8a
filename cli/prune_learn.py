"""`headscope prune l0`, `subset` and a command for every other learner: gates that learn which heads stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from headscope.cli import console
from headscope.cli.failures import Application
from headscope.cli.options import made_of, read
from headscope.cli.prune_rank import show_choice
from headscope.pruning.options.learn import LEARNERS, DeclaredLearner, LearnConfig
from headscope.pruning.options.shared import HEADS

OUTPUTS = """Writes removed.txt, kept.txt, ranking.csv, gates.csv (the trajectory), pruning.json, and DIR/model, the
checkpoint as it has learnt, with all its heads.

Processes of torchrun share the sentences of every batch."""


def command_of(learner: DeclaredLearner) -> Any:
    """The command of a learner, with its options and those of all learners."""

    @made_of(LearnConfig, learner.Options, verbose=True, panel=HEADS)
    def command(values: Mapping[str, Any], *, json: bool, verbose: bool) -> None:
        method = read(LEARNERS.get(learner.name).Options, values)
        _learn(read(LearnConfig, values, method=method), json=json, verbose=verbose)

    made = Application(add_completion=False)
    help_text = "\n\n".join([learner.summary, OUTPUTS, learner.about])
    made.command(name=learner.name, help=help_text, short_help=learner.summary)(command)
    return typer.main.get_command(made)


def _learn(config: LearnConfig, *, json: bool, verbose: bool) -> None:
    from headscope.distributed import process_group
    from headscope.pruning.learning.learn import finished, resumable, run_learning
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
            show_choice(choice, json=json, verbose=verbose, options=config.settings())
