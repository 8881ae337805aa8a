"""`headscope prune`: take heads out of a model."""

from __future__ import annotations

import typer

from headscope.cli.failures import Application, one_process
from headscope.cli.lazy import LazyGroup

SUMMARY = "Take heads out of a model, and prove that nothing else changed."
COMMANDS = {
    "l0": "Learn hard concrete gates under a price for open ones, from a trained checkpoint (Voita et al. 2019).",
    "subset": "Learn which K heads stay, exactly K: differentiable subset pruning (Li, Cotterell & Sachan 2021).",
    "rank": "Rank heads by a measure, one-shot or scoring anew in steps, and decide which go.",
    "sweep": "Prune by several methods, to several sizes, with several seeds, and measure every result: one table.",
    "remove": "Cut heads out of the weights and write the smaller checkpoint, if it computes what the masked one does.",
}
"""The first line of each command's help."""


class Methods(LazyGroup):
    """The ways to prune."""

    summaries = COMMANDS
    modules = {"l0": "prune_learn", "subset": "prune_learn"} | {
        name: f"prune_{name}" for name in ("rank", "sweep", "remove")
    }


app = Application(cls=Methods, name="prune", help=SUMMARY, no_args_is_help=True, add_completion=False)


@app.callback(help=SUMMARY)
def prune(context: typer.Context) -> None:
    """Refuse torchrun where a method does not share its work."""
    one_process(context, shared=("l0", "subset", "rank", "sweep"))
