"""`headscope prune rank`: which heads go, by a measure of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headscope.cli import console
from headscope.cli.options import (
    Bpe,
    CheckpointName,
    Config,
    Device,
    Dicts,
    Dtype,
    Force,
    FormatName,
    HyperParameters,
    Json,
    MaxSentences,
)
from headscope.cli.prune_options import (
    HEADS,
    Clip,
    ExportKind,
    Freeze,
    Keep,
    LearningRate,
    LearnSeed,
    LearnTokens,
    MaxLength,
    Out,
    Protect,
    Remove,
    Schedule,
    Sites,
    Smoothing,
    Source,
    Target,
    TuneUpdates,
    ValidSentences,
    ValidSource,
    ValidTarget,
    Warmup,
    one_process,
    settings_of,
    show_choice,
)


def rank(
    checkpoint: CheckpointName,
    out: Out,
    by: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE.csv",
            help="lrp, gradient, taylor, confidence, entropy, magnitude, ablation, shapley, random; another column of "
            "heads.csv; or a CSV file with site,layer,head and scores.",
            rich_help_panel=HEADS,
        ),
    ],
    source: Source = None,
    target: Target = None,
    valid_source: ValidSource = None,
    valid_target: ValidTarget = None,
    max_sentences: MaxSentences = None,
    score_sentences: Annotated[int, typer.Option(min=1, help="Lines of --source to score on.")] = 500,
    valid_sentences: ValidSentences = 1000,
    max_length: MaxLength = None,
    keep: Keep = None,
    fraction: Annotated[
        float | None, typer.Option(metavar="F", help="Share of the heads that stays.", rich_help_panel=HEADS)
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Read heads.csv of this run instead of measuring.", rich_help_panel=HEADS
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of --by FILE.csv.", rich_help_panel=HEADS)
    ] = None,
    lowest: Annotated[
        bool, typer.Option("--lowest", help="Keep low values where high ones would stay.", rich_help_panel=HEADS)
    ] = False,
    steps: Annotated[
        int, typer.Option(help="Take heads out in N steps, and score anew before each.", rich_help_panel=HEADS)
    ] = 1,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="The same share of every layer stays.", rich_help_panel=HEADS)
    ] = False,
    sites: Sites = None,
    protect: Protect = None,
    tune_updates: TuneUpdates = 0,
    freeze: Freeze = None,
    lr: LearningRate = None,
    schedule: Schedule = "constant",
    warmup: Warmup = 0,
    label_smoothing: Smoothing = None,
    clip: Clip = 1.0,
    batch_tokens: LearnTokens = 2048,
    seed: LearnSeed = 1,
    remove: Remove = False,
    export: ExportKind = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    format: FormatName = None,
    dicts: Dicts = None,
    hp: HyperParameters = None,
    bpe: Bpe = None,
    config: Config = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Rank heads by a measure, one-shot or scoring anew in steps, and decide which go.

    Writes removed.txt, kept.txt, ranking.csv and pruning.json; with --tune-updates also DIR/model.
    """
    settings = settings_of(locals())
    one_process("rank")
    from headscope.pruning.rank_run import RankConfig, run_ranking

    show_choice(run_ranking(RankConfig(**settings), progress=console.updates), json=json)
