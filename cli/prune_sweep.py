"""`headscope prune sweep`: methods × sizes × seeds, one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli import console
from headscope.cli.next_commands import command_line
from headscope.cli.options import (
    DATA,
    MODEL,
    OUTPUT,
    Beam,
    CompanionOptions,
    Config,
    Json,
    Labels,
    MaxSentences,
    Pairs,
    RunningOptions,
    Source2,
    names,
    settings_of,
    takes,
)
from headscope.cli.prune_options import (
    COMPENSATION,
    HEADS,
    LEARNING,
    Allocate,
    Clip,
    Freeze,
    LearningRate,
    LearnTokens,
    MaxLength,
    Objective,
    Placed,
    Schedule,
    Sequential,
    Smoothing,
    Source,
    Start,
    Target,
    TuneUpdates,
    Updates,
    ValidLabels,
    ValidSentences,
    ValidSource,
    ValidSource2,
    ValidTarget,
    Warmup,
)
from headscope.cli.prune_rank import DIRECTED, UNDIRECTED
from headscope.engine.declarations import metric_names
from headscope.errors import ConfigError

if TYPE_CHECKING:
    from headscope.pruning.sweep.sweep import Sweep

MEASURING = "Measuring"
CAN_GO = {"non-inferior": "yes", "worse": "no", "not established": "?"}


class Cells:
    """Methods, sizes and seeds."""

    methods: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help=f"l0, subset, {DIRECTED}; with :lowest or :highest, for the heads that stay, {UNDIRECTED}.",
            rich_help_panel=HEADS,
        ),
    ] = "l0,subset,random,magnitude,confidence,gradient,lrp"
    keep: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Sizes: heads that stay, of those sites.", rich_help_panel=HEADS),
    ] = None
    fractions: Annotated[
        str | None, typer.Option(metavar="F,F,…", help="Sizes: shares of them that stay.", rich_help_panel=HEADS)
    ] = None
    lambdas: Annotated[
        str | None,
        typer.Option(
            "--lambda",
            metavar="L,L,…",
            help="l0: these prices of an open head, instead of searching for --keep.",
            rich_help_panel=HEADS,
        ),
    ] = None
    strength_as: Annotated[
        str, typer.Option("--lambda-as", metavar="paper|code", help="As prune l0 has it.", rich_help_panel=HEADS)
    ] = "paper"
    start: Annotated[str, typer.Option(metavar="glorot|open", help="As prune l0 has it.", rich_help_panel=HEADS)] = (
        "glorot"
    )
    allocate: Allocate = "global"
    compensate: Annotated[
        str,
        typer.Option(
            metavar="none|mean|least-squares",
            help="Where a ranking took heads out, refit what is left of the output projections on the text that heads "
            "were scored on, before any tuning, in closed form.",
            rich_help_panel=COMPENSATION,
        ),
    ] = "none"
    sequential: Sequential = False
    seeds: Annotated[
        int, typer.Option(help="Seeds of what is learnt or drawn; other rankings run once.", rich_help_panel=HEADS)
    ] = 3
    seed: Annotated[
        int, typer.Option(min=0, help="The first of them, and that of the bootstrap.", rich_help_panel=HEADS)
    ] = 1


class Texts:
    """What is learnt from, and what every cell is measured on."""

    source: Source = None
    target: Target = None
    source2: Source2 = None
    pairs: Pairs = False
    labels: Labels = None
    valid_source: ValidSource = None
    valid_target: ValidTarget = None
    valid_source2: ValidSource2 = None
    valid_labels: ValidLabels = None
    objective: Objective = ""
    max_sentences: MaxSentences = None
    valid_sentences: ValidSentences = 1000
    score_sentences: Annotated[int, typer.Option(min=1, help="Lines of --source to rank on.", rich_help_panel=DATA)] = (
        500
    )
    max_length: MaxLength = None


class Learning:
    """How gates and model learn."""

    updates: Updates = 1000
    gate_lr: Annotated[
        float | None,
        typer.Option(help="Adam's rate for the gates; default: 0.1 (l0), 0.2 (subset).", rich_help_panel=LEARNING),
    ] = None
    tune_updates: TuneUpdates = 0
    freeze: Freeze = None
    lr: LearningRate = None
    schedule: Schedule = "constant"
    warmup: Warmup = 0
    label_smoothing: Smoothing = None
    clip: Clip = 1.0
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            help="Also train what l0 and subset leave from scratch, as a control.",
            rich_help_panel=LEARNING,
        ),
    ] = False
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|FILE.toml",
            help="How: a run of `headscope train` or a file of its options; default: the run CKPT lies in.",
            rich_help_panel=LEARNING,
        ),
    ] = None


class Measures:
    """What is measured."""

    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(metric_names())}; default: what fits the model.",
            rich_help_panel=MEASURING,
        ),
    ] = ""
    functions: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="A run of `analyze` of CKPT: count the functions of survivors.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    text: Annotated[
        str,
        typer.Option(
            metavar="raw|tokenised-lowercase", help="What BLEU compares, as in evaluate.", rich_help_panel=MEASURING
        ),
    ] = "raw"
    beam: Beam = None
    hiding: Annotated[
        str,
        typer.Option(metavar="each|random", help="Encoders alone: as in evaluate.", rich_help_panel=MEASURING),
    ] = "each"
    bootstrap: Annotated[
        int, typer.Option(help="Resamples of intervals and paired tests.", rich_help_panel=MEASURING)
    ] = 1000
    margin: Annotated[
        str | None,
        typer.Option(
            metavar="X|X%",
            help="Loss against the unpruned model that counts as none: in the metric's unit, or a percentage of its "
            "value; default: 1%.",
            rich_help_panel=MEASURING,
        ),
    ] = None


class Cost:
    """How many cells run at once, and what they leave."""

    jobs: Annotated[int, typer.Option(help="Cells to do at once, a process each.", rich_help_panel=MODEL)] = 1
    keep_models: Annotated[
        bool,
        typer.Option(
            "--keep-models",
            help="Keep the pruned model of every cell, without the heads that went: column model of sweep.csv.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    batch_tokens: LearnTokens = 2048


class Last:
    """What comes last."""

    config: Config = None
    json: Json = False
    force: Annotated[
        bool, typer.Option("--force", help="Begin anew, without the cells that DIR holds.", rich_help_panel=OUTPUT)
    ] = False


@takes(Start, Cells, Texts, Placed, Learning, Measures, Cost, RunningOptions, CompanionOptions, Last)
def sweep(given: dict[str, Any]) -> None:
    """Prune by several methods, to several sizes, with several seeds, and measure every result: one table.

    Learnt methods train a copy of the model; rankings close the heads that score lowest, one-shot. Each finished
    cell is kept: the same command does what is missing, also after a kill; methods, sizes and seeds may be
    added. Under torchrun the cells are shared out. Writes sweep.csv, survivors.csv and sweep.json.
    """
    json, settings = settings_of(given, lists=("methods", "sites"))
    settings["keep"] = _numbers("--keep", given["keep"], int)
    settings["fractions"] = _numbers("--fractions", given["fractions"], float)
    settings["lambdas"] = _numbers("--lambda", given["lambdas"], float)
    from headscope.pruning.sweep.config import SweepConfig
    from headscope.pruning.sweep.sweep import cells_kept, run_sweep

    config = SweepConfig(**settings)
    try:
        result = run_sweep(config, progress=console.updates)
    except KeyboardInterrupt:
        folder, done = cells_kept(config)
        console.say(f"interrupted; {done} finished cells are kept in {folder}: the same command goes on")
        raise typer.Exit(130) from None
    if result.main:
        _show(result, json=json)


def _numbers(option: str, text: str | None, kind: type[Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in names(text))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option} {text!r} must be {what} with commas between") from None


def _show(sweep: Sweep, *, json: bool) -> None:
    folder = sweep.context.config.out
    if json:
        console.print_json({"out": str(folder), **sweep.record()})
        return
    from rich.text import Text

    screen = console.out()
    screen.print(_table(sweep))
    for method, direction in sweep.context.directions.items():
        screen.print(Text(f"{method}: {direction}"), soft_wrap=True)
    for remark in sweep.remarks:
        screen.print(Text(f"note: {remark}"), soft_wrap=True)
    screen.print(Text(str(sweep.signature), style="dim"), soft_wrap=True)
    console.show(
        console.ending(sweep.conclusions, folder, command_line("plot", "pruning", folder, "--out", f"{folder}.png"))
    )


def _table(sweep: Sweep) -> Any:
    from rich import box
    from rich.table import Table

    from headscope.pruning.sweep.table import survivor_summary

    rows = survivor_summary(sweep.table).merge(
        sweep.verdicts, on=["method", "control", "size"], how="left", suffixes=("", "_")
    )
    priced = rows["size"].str.startswith("lambda").any()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for name in (*(["λ"] if priced else []), "kept", "seeds", sweep.context.metric_title, "± sd"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("change", "worse ≤", "can go", "loss", "min"):
        table.add_column(name, justify="right", no_wrap=True)
    row: Any
    for row in rows.itertuples():
        whole = row.method == "unpruned"
        table.add_row(
            f"{row.method} {row.control}".strip(),
            *([row.size.removeprefix("lambda ") if row.size.startswith("lambda") else ""] if priced else []),
            f"{row.kept:.4g}",
            str(row.seeds),
            f"{row.value:.4g}",
            "" if row.seeds == 1 else f"{row.sd:.2g}",
            "" if whole else f"{row.difference:+.3g}",
            "" if row.worse_limit != row.worse_limit else f"{row.worse_limit:.3g}",
            CAN_GO.get(row.verdict, ""),
            f"{row.loss:.4f}",
            f"{row.minutes:.1f}",
        )
    return table
