"""`headscope list`: what there is of each kind, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from headscope.cli import console
from headscope.cli.options import made_of, read
from headscope.config.small import ListConfig

BESIDE = 20
"""Columns of what stands beside a summary: it is the summary that is read."""


@made_of(ListConfig, config=False)
def list(values: Mapping[str, Any], *, json: bool) -> None:
    """List what there is of one kind (analyses, criteria, metrics …), and what of it fits a checkpoint.

    A line each: what it is, what it needs beside a text, what it costs.
    """
    from headscope.api.commands import load
    from headscope.engine.overview import KINDS, catalogue

    config = read(ListConfig, values)
    if not config.kind:
        numbers = {kind: len(catalogue(kind)) for kind in KINDS}
        if json:
            console.print_json(numbers)
        else:
            kinds = console.table(("kind", "number"), ((kind, str(number)) for kind, number in numbers.items()))
            console.show([kinds, *console.ending(["headscope list KIND [CKPT] lists one of them"], "")])
        return
    overview = load(config.checkpoint).overview() if config.checkpoint else None
    items = [asdict(item) for item in catalogue(config.kind, overview)]
    if json:
        console.print_json(items)
        return
    shown = [name for name in ("name", "summary", "needs", "cost") if any(item[name] for item in items)]
    columns = [config.kind, *shown[1:]]
    if overview is not None:
        columns, shown = [*columns, "fits"], [*shown, "fits"]
        items = [{**item, "fits": item["refusal"] or "yes"} for item in items]
    table = console.table(columns, ([item[name] for name in shown] for item in items), whole=(config.kind,))
    for column in table.columns[2:]:
        column.max_width, column.overflow = BESIDE, "fold"
    console.show([table])
