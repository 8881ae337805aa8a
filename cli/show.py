"""`headscope show`: what a checkpoint is, what its heads are worth, and what can be measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from headscope.cli import console
from headscope.cli.answers import show_result
from headscope.cli.next_commands import COMPANIONS, HALF, TEXT, command_line
from headscope.cli.options import options_from, read
from headscope.config.commands import ShowConfig


@options_from(ShowConfig, config=False, verbose=True)
def show(values: Mapping[str, Any], *, json: bool, verbose: bool) -> None:
    """Print what a checkpoint is, its heads, what removing them can save, and what can be measured."""
    from headscope.api.commands import load

    config = read(ShowConfig, values)
    model = load(config.checkpoint, **config.opening)
    overview = model.overview()
    if config.mask:
        overview.record["mask"] = [str(head) for head in model.select(config.mask)]
    if json:
        console.print_json(overview.to_json())
    else:
        show_result(overview, verbose=verbose, commands=following(overview.record, values))


def following(record: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How heads are measured, ranked and removed; the sample that ships stands for text, not for sound."""
    from headscope.assets import sample
    from headscope.formats.base import FORMATS

    kinds = {site["site"] for site in record["sites"]}
    text = {"source": sample("en"), "target": sample("de") if {"cross", "encoder-self"} <= kinds else None}
    dictionaries = not record["tokenizer"] and "dicts" in FORMATS.get(record["format"]).takes
    if dictionaries:
        text["dicts"] = Path("DIR")
    if record["reads"] != "text" or not (record["tokenizer"] or dictionaries):
        return
    name, options_used, names = PurePath(record["path"]).name, {**options, **text}, (*TEXT, *COMPANIONS)
    analyze = ("analyze", record["path"])
    yield "What each head does", command_line(*analyze, "--out", f"{name}-run", options=options_used, names=names)
    matter = (*analyze, "--importance", "--out", f"{name}-importance")
    yield "Which heads matter", command_line(*matter, options=options_used, names=names)
    small = ("prune", "shrink", record["path"], "--keep-fraction", HALF, "--out", f"{name}-small")
    yield "A smaller model", command_line(*small, options=options_used, names=names)
