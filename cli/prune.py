"""`headscope prune`: take heads out of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from headscope.cli.failures import Application, LazyGroup, one_process
from headscope.pruning.options.learn import learners

SUMMARY = "Take heads out of a model, and prove that nothing else changed."
COMMANDS = {
    "shrink": "The whole way to a smaller model: rank, allocate, refit, remove, verify, measure on two texts, write.",
    "rank": "Rank heads by a measure, one-shot or scoring anew in steps, and decide which go.",
    "sweep": "Prune by several methods, to several sizes, with several seeds, measure all: one table.",
    "remove": "Cut heads out of the weights and write the smaller checkpoint, if it computes what the masked one does.",
}
"""The first line of each command's help, beside those of learners, which say theirs."""


class Methods(LazyGroup):
    """The ways to prune: learners of gates, which a registry has, and the others."""

    modules: Mapping[str, str] = {name: f"prune_{name}" for name in COMMANDS}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.summaries = {name: learner.summary for name, learner in learners().items()} | COMMANDS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a learner is made of what it declares."""
        if cmd_name not in learners():
            return super().get_command(ctx, cmd_name)
        from headscope.cli.prune_learn import command_of

        return command_of(learners()[cmd_name])


app = Application(cls=Methods, name="prune", help=SUMMARY, no_args_is_help=True, add_completion=False)


@app.callback(help=SUMMARY)
def prune(context: typer.Context) -> None:
    """Refuse torchrun where a method does not share its work."""
    one_process(context, shared=(*learners(), "rank", "sweep"))
