"""`headscope prune rank`: which heads go, by a measure of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headscope.cli import console
from headscope.cli.options import made_of, read
from headscope.cli.selection import show_choice
from headscope.pruning.options.rank import RankConfig


@made_of(RankConfig)
def rank(values: Mapping[str, Any], *, json: bool) -> None:
    """Rank heads by a measure, one-shot or scoring anew in steps, and decide which go.

    The lowest go first, or the highest: which, and why, is printed. Processes of torchrun share the text.

    Writes removed.txt, kept.txt, ranking.csv and pruning.json; with --tune-updates also DIR/model.
    """
    from headscope.pruning.ranking.rank_run import run_shared_ranking

    if choice := run_shared_ranking(read(RankConfig, values), progress=console.updates):
        show_choice(choice, json=json, options=values)
