"""`headscope prune shrink`: the whole way to a smaller model in one command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from headscope.cli import console
from headscope.cli.options import made_of, read
from headscope.cli.prune_remove import show_removal
from headscope.pruning.options.shrink import ShrinkConfig


@made_of(ShrinkConfig, verbose=True)
def shrink(values: Mapping[str, Any], *, json: bool, verbose: bool) -> None:
    """The whole way to a smaller model: rank, allocate, refit, remove, verify, measure on two texts, write.

    Which heads go, how many of each layer, and how the others make up for them is found on --source. What the model
    loses is measured on text that nothing was fitted to, and on a second text of another kind. A run that was
    interrupted goes on with the same command.

    Writes the smaller checkpoint, its card, pruning.json, page.html, and where the size is searched for those that
    were tried (sizes/sweep.csv).
    """
    from headscope.api.removal import shrunk_folder

    config = read(ShrinkConfig, values)
    try:
        removal = shrunk_folder(config, progress=console.updates)
    except KeyboardInterrupt:
        console.say("interrupted; what was ranked and measured is kept: the same command goes on")
        raise typer.Exit(130) from None
    show_removal(removal, values, json=json, verbose=verbose)
