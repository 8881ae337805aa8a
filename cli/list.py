"""`headscope list`: the names of all analyses, criteria, metrics and the like."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import TYPE_CHECKING

from headscope.cli import console
from headscope.cli.console import Printer
from headscope.cli.lazy_commands import row_lines
from headscope.cli.options import default_words, options_from
from headscope.config.commands import ListConfig
from headscope.config.option import NoOptions, declared_options

if TYPE_CHECKING:
    from headscope.engine.overview import Kind


@options_from(ListConfig, config=False)
def list(config: ListConfig, printer: Printer) -> None:
    """List what there is of one kind (analyses, criteria, metrics …), and what of it fits a checkpoint.

    A line each: what it is, what it needs beside a text, what it costs.
    """
    from headscope.api.commands import load
    from headscope.engine.overview import KINDS, catalogue

    if config.kind and config.checkpoint in {item.name for item in catalogue(config.kind)}:
        show_options(KINDS[config.kind], config.checkpoint, printer)
        return
    width = console.results_console().width
    if not config.kind:
        summaries = {name: kind.summary for name, kind in KINDS.items()}
        next_line = "Next: headscope list KIND, headscope list KIND CKPT (what fits), or headscope list KIND NAME"
        if printer.json:
            console.print_json(summaries)
        else:
            console.show([*row_lines([*summaries.items()], width), "", next_line])
        return
    overview = load(config.checkpoint).overview().record if config.checkpoint else None
    items = [asdict(item) for item in catalogue(config.kind, overview)]
    if printer.json:
        console.print_json(items)
        return
    rows = []
    for item in items:
        notes = "; ".join(filter(None, (item["needs"], item["cost"])))
        if not item["refusal"]:
            rows.append((item["name"], f"{item['summary']}  [{notes}]" if notes else item["summary"]))
    console.show(row_lines(rows, width))
    if misfits := [(item["name"], item["refusal"]) for item in items if item["refusal"]]:
        console.show(["", "Do not fit this checkpoint:", *row_lines(misfits, width)])


def show_options(kind: Kind, name: str, printer: Printer) -> None:
    """Print what one analysis, criterion or the like does, and its options for `--set`."""
    variant = kind.variants()[name]
    about = inspect.cleandoc(variant.__doc__ or "")
    options = {
        f"{name}.{entry.name}".replace("_", "-"): entry.metadata["help"] + default_words(entry)
        for entry, _ in declared_options(getattr(variant, "Options", NoOptions))
    }
    if printer.json:
        console.print_json({"name": name, "about": about, "options": options})
        return
    console.show([about, *(f"--set {option}=VALUE  {text}" for option, text in options.items())])
