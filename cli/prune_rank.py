"""`headscope prune rank`: which heads go, by a measure of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.answers import show_result
from headscope.cli.next_commands import after_choice
from headscope.cli.options import made_of, read
from headscope.pruning.options.rank import RankConfig

if TYPE_CHECKING:
    from headscope.pruning.selection import Selection


def show_choice(choice: Selection, *, json: bool, verbose: bool, options: Mapping[str, Any]) -> None:
    """Print what was chosen with these options, and what can be done next."""
    if json:
        console.print_json({"out": str(choice.folder), **choice.to_json()})
        return
    following = after_choice(choice, options)
    commands = [following] if following else []
    show_result(choice, verbose=verbose, files=[f"Results: {choice.folder}"], commands=commands)


@made_of(RankConfig, verbose=True)
def rank(values: Mapping[str, Any], *, json: bool, verbose: bool) -> None:
    """Rank heads by a measure, one-shot or scoring anew in steps, and decide which go.

    The lowest go first, or the highest: which, and why, is printed. Writes removed.txt, kept.txt, ranking.csv and
    pruning.json; with --tune-updates also DIR/model.

    Processes of torchrun share the text.
    """
    from headscope.pruning.ranking.rank_run import run_shared_ranking

    if choice := run_shared_ranking(read(RankConfig, values), progress=console.updates):
        show_choice(choice, json=json, verbose=verbose, options=values)
