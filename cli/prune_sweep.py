"""`headscope prune sweep`: methods × sizes × seeds, one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from headscope.cli import console
from headscope.cli.answers import show_result
from headscope.cli.next_commands import command_line
from headscope.cli.options import made_of, read
from headscope.pruning.options.sweep import SweepConfig

if TYPE_CHECKING:
    from headscope.pruning.sweep.sweep import Sweep


@made_of(SweepConfig, verbose=True)
def sweep(values: Mapping[str, Any], *, json: bool, verbose: bool) -> None:
    """Prune by several methods, to several sizes, with several seeds, measure all: one table.

    Writes sweep.csv, survivors.csv and sweep.json. Goes on with what an interrupted run left.

    Each finished cell is kept: the same command does what is missing; methods, sizes and seeds may be added. Learnt
    methods train a copy of the model; rankings close the heads that score lowest, one-shot. Under torchrun the cells
    are shared out.
    """
    from headscope.pruning.sweep.sweep import cells_kept, run_sweep

    config = read(SweepConfig, values)
    try:
        result = run_sweep(config, progress=console.updates)
    except KeyboardInterrupt:
        folder, done = cells_kept(config)
        console.say(f"interrupted; {done} finished cells are kept in {folder}: the same command goes on")
        raise typer.Exit(130) from None
    if result.main:
        _show(result, json=json, verbose=verbose)


def _show(sweep: Sweep, *, json: bool, verbose: bool) -> None:
    folder = sweep.context.config.out
    if json:
        console.print_json({"out": str(folder), **sweep.to_json()})
        return
    curve = command_line("plot", "pruning", folder, "--out", f"{folder}.png")
    show_result(sweep, verbose=verbose, files=[f"Results: {folder}"], commands=[("Curve", curve)])
