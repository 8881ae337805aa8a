"""`headscope prune rank`: which heads go, by a measure of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headscope.cli import console
from headscope.cli.options import DATA, CompanionOptions, Ending, PlacementOptions, RunningOptions, settings_of, takes
from headscope.cli.prune_options import (
    COMPENSATION,
    HEADS,
    Allocate,
    Keep,
    Placed,
    Result,
    Sequential,
    Start,
    Texts,
    Tuning,
    show_choice,
)
from headscope.engine.declarations import criterion_names, rankable_columns

COLUMNS = rankable_columns()
DIRECTED = ", ".join(sorted([*criterion_names(), *(name for name, measure in COLUMNS.items() if measure.keep)]))
UNDIRECTED = ", ".join(sorted(name for name, measure in COLUMNS.items() if not measure.keep))


class Ranking:
    """What heads are ranked by, and how many stay."""

    by: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE.csv",
            help=f"{DIRECTED}; with --keep-lowest or --keep-highest {UNDIRECTED}; with --from any column of its "
            "heads.csv; or a CSV file with site,layer,head and scores.",
            rich_help_panel=HEADS,
        ),
    ]
    keep: Keep = None
    fraction: Annotated[
        float | None, typer.Option(metavar="F", help="Share of the heads that stays.", rich_help_panel=HEADS)
    ] = None
    run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Read heads.csv of this run instead of measuring.", rich_help_panel=HEADS
        ),
    ] = None
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of --by FILE.csv.", rich_help_panel=HEADS)
    ] = None
    keep_lowest: Annotated[
        bool,
        typer.Option(
            "--keep-lowest",
            help="Heads with low values stay; default: as is agreed for --by, which is printed.",
            rich_help_panel=HEADS,
        ),
    ] = False
    keep_highest: Annotated[
        bool, typer.Option("--keep-highest", help="Heads with high values stay.", rich_help_panel=HEADS)
    ] = False
    steps: Annotated[
        int, typer.Option(help="Take heads out in N steps, and score anew before each.", rich_help_panel=HEADS)
    ] = 1
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Short for --allocate per-layer.", rich_help_panel=HEADS)
    ] = False
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform",
            help="As many heads in every layer (of the encoder, of the decoder), in whole groups: what programs that "
            "serve models can hold (prune remove --export native). Short for --allocate uniform.",
            rich_help_panel=HEADS,
        ),
    ] = False
    allocate: Allocate = "global"
    compensate: Annotated[
        str,
        typer.Option(
            metavar="none|mean|least-squares",
            help="Then refit what is left of the output projections on the text that heads were scored on, before any "
            "tuning, in closed form.",
            rich_help_panel=COMPENSATION,
        ),
    ] = "none"
    sequential: Sequential = False
    damping: Annotated[
        float,
        typer.Option(
            help="Ridge of criteria and allocations that refit, a share of the mean second moment.",
            rich_help_panel=HEADS,
        ),
    ] = 1e-4
    score_sentences: Annotated[
        int, typer.Option(min=1, help="Lines of --source to score on.", rich_help_panel=DATA)
    ] = 500


@takes(Start, Ranking, Texts, Placed, Tuning, Result, RunningOptions, PlacementOptions, CompanionOptions, Ending)
def rank(given: dict[str, Any]) -> None:
    """Rank heads by a measure, one-shot or scoring anew in steps, and decide which go.

    The lowest go first, or the highest: which, and why, is printed. Processes of torchrun share the text.

    Writes removed.txt, kept.txt, ranking.csv and pruning.json; with --tune-updates also DIR/model.
    """
    json, settings = settings_of(given, lists=("sites", "export"))
    from headscope.pruning.ranking.config import RankConfig
    from headscope.pruning.ranking.rank_run import run_shared_ranking

    if choice := run_shared_ranking(RankConfig(**settings), progress=console.updates):
        show_choice(choice, json=json, options=given)
