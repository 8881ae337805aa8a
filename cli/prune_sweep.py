"""`headscope prune sweep`: methods × sizes × seeds, one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from headscope.cli import console
from headscope.cli.next_commands import command_line
from headscope.cli.options import made_of, read
from headscope.pruning.options.sweep import SweepConfig

if TYPE_CHECKING:
    from headscope.pruning.sweep.sweep import Sweep

CAN_GO = {"non-inferior": "yes", "worse": "no", "not established": "?", "not tested": "–"}


@made_of(SweepConfig)
def sweep(values: Mapping[str, Any], *, json: bool) -> None:
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
        _show(result, json=json)


def _show(sweep: Sweep, *, json: bool) -> None:
    folder = sweep.context.config.out
    if json:
        console.print_json({"out": str(folder), **sweep.record()})
        return
    lines = [f"{method}: {direction}" for method, direction in sweep.context.directions.items()]
    lines += [f"note: {remark}" for remark in sweep.remarks]
    following = command_line("plot", "pruning", folder, "--out", f"{folder}.png")
    ending = console.ending(sweep.conclusions, folder, following)
    console.show([_table(sweep), *console.signed(lines, sweep.signature), *ending])


def _table(sweep: Sweep) -> Any:
    from headscope.pruning.sweep.table import survivor_summary

    rows = survivor_summary(sweep.table).merge(
        sweep.verdicts, on=["method", "control", "size"], how="left", suffixes=("", "_")
    )
    priced = rows["size"].str.startswith("lambda").any()
    columns = (*(["λ"] if priced else []), "kept", "seeds", sweep.context.metric_title, "± sd")
    columns = (*columns, "change", "worse ≤", "can go", "loss", "min")
    table = console.table(["method", *columns], numbers=columns, whole=("method", *columns), padding=(0, 1, 0, 0))
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
