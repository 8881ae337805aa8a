"""`headscope prune shrink`: the whole way to a smaller model in one command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from headscope.cli import console
from headscope.cli.options import made_of, read
from headscope.cli.prune_remove import show_removed
from headscope.pruning.options.shrink import ShrinkConfig

if TYPE_CHECKING:
    from headscope.evaluation.before_after import QualityChange


@made_of(ShrinkConfig)
def shrink(values: Mapping[str, Any], *, json: bool) -> None:
    """The whole way to a smaller model: rank, allocate, refit, remove, verify, measure on two texts, write.

    Which heads go, how many of each layer, and how the others make up for them is found on --source. What the model
    loses is measured on text that nothing was fitted to, and on a second text of another kind. A run that was
    interrupted goes on with the same command.

    Writes the smaller checkpoint, its card, pruning.json, page.html, and where the size is searched for those that
    were tried (sizes/sweep.csv).
    """
    from headscope.api.removal import shrunk_folder
    from headscope.pruning.removal.record import removal_record, summary

    config = read(ShrinkConfig, values)
    try:
        removed = shrunk_folder(config, progress=console.updates)
    except KeyboardInterrupt:
        console.say("interrupted; what was ranked and measured is kept: the same command goes on")
        raise typer.Exit(130) from None
    if json:
        console.print_json({"out": str(removed.path), **removal_record(removed), **console.pushed(removed.pushed)})
        return
    removed = replace(removed, notes=(*removed.notes, *loses_less(config, removed.quality)))
    show_removed(removed, values, answer=summary(removed))


def loses_less(config: ShrinkConfig, quality: QualityChange | None) -> tuple[str, ...]:
    """What to try where the smaller model is worse beyond the margin."""
    from headscope.evaluation.non_inferiority import WORSE

    if quality is None or quality.verdict is None or quality.verdict.verdict != WORSE:
        return ()
    refits = not config.feed_forward and config.compensate in ("auto", "least-squares")
    return (f"less is lost with {'--feed-forward, which takes many passes, or with ' * refits}more heads",)
