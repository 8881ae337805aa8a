"""`headscope prune l0` and `headscope prune subset`: gates that learn which heads stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli import console
from headscope.cli.next_commands import command_line
from headscope.cli.options import (
    CompanionOptions,
    Ending,
    PlacementOptions,
    RunningOptions,
    names,
    settings_of,
    takes,
)
from headscope.cli.prune_options import (
    HEADS,
    LEARNING,
    Keep,
    Placed,
    Result,
    Start,
    Texts,
    Tuning,
    Updates,
    show_choice,
)
from headscope.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headscope.distributed import Processes
    from headscope.pruning.learning.lambdas import LambdaSweep
    from headscope.pruning.learning.learn import LearnConfig

GateRate = Annotated[
    float | None,
    typer.Option(help="Adam's rate for the gates; default: 0.1 (l0), 0.2 (subset).", rich_help_panel=LEARNING),
]
LogEvery = Annotated[
    int | None,
    typer.Option(min=1, help="Updates between points of gates.csv; default: 50 points.", rich_help_panel=LEARNING),
]
SaveEvery = Annotated[
    int,
    typer.Option(help="Updates between states that --resume goes on from; 0: none.", rich_help_panel=LEARNING),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run in DIR that was killed, exactly.", rich_help_panel=LEARNING),
]


class L0:
    """Which heads go by their price."""

    strength: Annotated[
        str | None,
        typer.Option(
            "--lambda", metavar="L[,L…]", help="Price of an open head; several: one run each.", rich_help_panel=HEADS
        ),
    ] = None
    strength_as: Annotated[
        str,
        typer.Option(
            "--lambda-as",
            metavar="paper|code",
            help="paper: loss + λ · sum over heads of P(open); code: loss + λ · mean over attention modules of it "
            "(the story-of-heads program's concrete_coef).",
            rich_help_panel=HEADS,
        ),
    ] = "paper"
    keep: Keep = None
    start: Annotated[
        str,
        typer.Option(
            metavar="glorot|open", help="Gates at the start: random, as the program's; or open.", rich_help_panel=HEADS
        ),
    ] = "glorot"
    temperature: Annotated[float, typer.Option(help="Of the gates' noise.", rich_help_panel=HEADS)] = 0.33


class Gates:
    """How gates learn."""

    updates: Updates = 1000
    gate_lr: GateRate = None
    log_every: LogEvery = None
    save_every: SaveEvery = 500
    resume: Resume = False


@takes(Start, Texts, L0, Placed, Gates, Tuning, Result, RunningOptions, PlacementOptions, CompanionOptions, Ending)
def l0(given: dict[str, Any]) -> None:
    """Learn hard concrete gates under a price for open ones, from a trained checkpoint (Voita et al. 2019).

    λ is given, a list, or searched for a number of heads (--keep). Writes removed.txt, kept.txt, ranking.csv,
    gates.csv (the trajectory), pruning.json, and DIR/model, the checkpoint as it has learnt, with all its heads.
    Processes of torchrun share the sentences of every batch.
    """
    json, settings = settings_of(given, lists=("sites", "export"))
    from headscope.pruning.learning.l0 import L0Options

    prices = _numbers(settings.pop("strength"))
    own = {name: settings.pop(name) for name in ("strength_as", "keep", "start", "temperature")}
    _words("--lambda-as", own["strength_as"], "paper", "code")
    _words("--start", own["start"], "glorot", "open")
    method = L0Options(strength=prices[0] if prices else None, **own)
    _learn(settings, method, prices, json=json)


class Subset:
    """How many heads stay, and how the choice hardens."""

    keep: Annotated[int, typer.Option(metavar="K", help="Heads that stay, of those sites.", rich_help_panel=HEADS)]
    temperature: Annotated[float, typer.Option(help="Of the soft choice at the start.", rich_help_panel=HEADS)] = 0.1
    end_temperature: Annotated[float, typer.Option(help="And at the end.", rich_help_panel=HEADS)] = 1e-8
    cooldown: Annotated[
        int | None,
        typer.Option(help="Updates in which it falls; default: two thirds of all.", rich_help_panel=HEADS),
    ] = None
    straight_through: Annotated[
        bool,
        typer.Option(
            "--straight-through", help="Exact top-K forward, identity backward; no temperature.", rich_help_panel=HEADS
        ),
    ] = False


@takes(Start, Subset, Texts, Placed, Gates, Tuning, Result, RunningOptions, PlacementOptions, CompanionOptions, Ending)
def subset(given: dict[str, Any]) -> None:
    """Learn which K heads stay, exactly K: differentiable subset pruning (Li, Cotterell & Sachan 2021).

    Writes what `prune l0` writes. Processes of torchrun share the sentences of every batch.
    """
    json, settings = settings_of(given, lists=("sites", "export"))
    from headscope.pruning.learning.subset import SubsetOptions

    own = {name: settings.pop(name) for name in ("keep", "cooldown", "straight_through")}
    first, last = settings.pop("temperature"), settings.pop("end_temperature")
    _learn(settings, SubsetOptions(first=first, last=last, **own), [], json=json)


def _learn(settings: dict[str, Any], method: Any, strengths: list[float], *, json: bool) -> None:
    from headscope.distributed import process_group
    from headscope.pruning.learning.lambdas import lambdas_left
    from headscope.pruning.learning.learn import LearnConfig, finished, resumable

    config = LearnConfig(method=method, **settings)
    with process_group() as processes:
        if config.resume and (record := processes.on_main(lambda: finished(config.out))):
            if processes.main:
                _show_complete(config, record, json=json)
            return
        try:
            _run(config, strengths, processes, json=json)
        except KeyboardInterrupt:
            if not (lambdas_left(config.out) if len(strengths) > 1 else resumable(config.out)):
                raise
            instead = " instead of --force" if config.force else ""
            if processes.main:
                console.say(
                    f"interrupted; the same command with --resume{instead} goes on from the last state that was saved"
                )
            raise typer.Exit(130) from None


def _run(config: LearnConfig, strengths: list[float], processes: Processes, *, json: bool) -> None:
    """Learn with all processes; the first one shows the result."""
    from headscope.pruning.learning.lambdas import lambdas_complete, run_lambdas
    from headscope.pruning.learning.learn import run_learning

    if len(strengths) < 2:
        choice = run_learning(config, progress=console.updates, processes=processes)
        if processes.main:
            show_choice(choice, json=json, options=config.settings())
        return
    if config.resume and processes.main and lambdas_complete(config.out):
        console.say(f"the runs in {config.out} are complete; nothing is left to resume")
    sweep = run_lambdas(config, strengths, progress=console.updates, processes=processes)
    if processes.main:
        _show_sweep(sweep, json=json)


def _show_complete(config: LearnConfig, record: Mapping[str, Any], *, json: bool) -> None:
    console.say(f"the run in {config.out} is complete; nothing is left to resume")
    if json:
        console.print_json({"out": str(config.out), **record})


def _show_sweep(sweep: LambdaSweep, *, json: bool) -> None:
    if json:
        runs = [{"out": str(folder), **record} for folder, record in sweep.records.items()]
        console.print_json({"out": str(sweep.config.out), "runs": runs})
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in sweep.table.columns:
        table.add_column(column, justify="right")
    for row in sweep.table.itertuples(index=False):
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    console.out().print(table)
    out = sweep.config.out
    following = command_line("plot", "pruning", *sweep.records, "--out", f"{out}.png")
    console.show(console.ending([f"{len(sweep.records)} prices of an open head, a run each"], out, following))


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(part) for part in names(text)]
    except ValueError:
        raise ConfigError(f"--lambda {text!r} must be a number, or numbers with commas") from None


def _words(option: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{option} {value!r} is not known; choose {' or '.join(allowed)}")
