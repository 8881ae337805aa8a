"""`headscope show`: format, architecture, attention and parameters of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import PurePath
from typing import Any

from headscope.cli import console
from headscope.cli.next_commands import COMPANIONS, TEXT, command_line
from headscope.cli.options import made_of, read
from headscope.config.small import ShowConfig

SHOWN = 12  # labels of a classifier


@made_of(ShowConfig, config=False)
def show(values: Mapping[str, Any], *, json: bool) -> None:
    """Print format, architecture, heads, parameters by part, tokenizer, and the metrics and analyses that fit."""
    from headscope.api.commands import load

    config = read(ShowConfig, values)
    model = load(config.checkpoint, **config.opening)
    overview = model.overview()
    if config.mask:
        overview["mask"] = [str(head) for head in model.select(config.mask)]
    if json:
        console.print_json(overview)
    else:
        _print(overview, values)


def _print(overview: dict[str, Any], options: Mapping[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in ("path", "format", "architecture", "model_type", "dtype", "limit", "digest"):
        table.add_row(name.replace("_", " "), str(overview[name]))
    if "mask" in overview:
        table.add_row("mask", ", ".join(overview["mask"]))
    tokenizer = overview["tokenizer"]
    table.add_row("tokenizer", f"{tokenizer['class']}, {tokenizer['vocabulary']:,} subwords" if tokenizer else "none")
    if overview["labels"]:
        table.add_row("labels", _names(overview["labels"]))
    screen = console.out()
    for line in _mixed(overview["mixing"]):
        screen.print(line, style="bold", markup=False, soft_wrap=True)
    screen.print(table)
    heads = Table("site", "layers", "heads", "width", "key/value groups", title="attention", box=box.SIMPLE_HEAD)
    for site in overview["sites"]:
        heads.add_row(*(_short(site[name]) for name in ("site", "layers", "heads", "width", "groups")))
    screen.print(heads)
    parts = Table("part", "parameters", title="parameters", box=box.SIMPLE_HEAD)
    for name, count in overview["parameters"].items():
        parts.add_row(name, f"{count:,}")
    screen.print(parts)
    metrics = Table("metric of evaluate", "needs", title="metrics", box=box.SIMPLE_HEAD)
    for metric in overview["metrics"]:
        metrics.add_row(metric["name"], metric["needs"])
    screen.print(metrics)
    objectives = Table("objective", "needs", "gates learn by it", "what it is", title="objectives", box=box.SIMPLE_HEAD)
    for objective in filter(itemgetter("fits"), overview["objectives"]):
        trains = "yes" if objective["trains"] else "no"
        objectives.add_row(objective["name"], objective["needs"], trains, objective["summary"])
    screen.print(objectives)
    fitting = Table("analysis", "fits", "what it measures", title="analyses", box=box.SIMPLE_HEAD)
    for analysis in overview["analyses"]:
        fitting.add_row(analysis["name"], "yes" if analysis["fits"] else analysis["why"], analysis["summary"])
    screen.print(fitting)
    console.show(_ending(overview, options))


def _mixed(places: list[dict[str, Any]]) -> Iterator[str]:
    """What must be known first of a model that mixes heads."""
    by_kind: dict[tuple[str, str], list[str]] = {}
    for place in places:
        by_kind.setdefault((place["mixing"], place["summary"]), []).append(place["site"])
    for (name, summary), sites in by_kind.items():
        where = " and ".join(sites)
        yield f"This model mixes heads ({name}): at {where} every attention module has {summary}."
    if by_kind:
        yield "Analyses look at heads before they are mixed; masks and importances act on what comes out of it."


def _ending(overview: dict[str, Any], options: Mapping[str, Any]) -> Iterator[Any]:
    """How many heads there are, and how they are measured; the sample that ships stands for the text."""
    from headscope.assets import sample

    counts = {site["site"]: sum(site["heads"]) for site in overview["sites"]}
    fitting = sum(1 for analysis in overview["analyses"] if analysis["fits"])
    text = {"source": sample("en"), "target": sample("de") if {"cross", "encoder-self"} <= counts.keys() else None}
    analyze = ("analyze", overview["path"], "--out", f"{PurePath(overview['path']).name}-run")
    reads = overview["tokenizer"] or overview["format"] != "huggingface"
    parts = ", ".join(f"{count} {site}" for site, count in counts.items())
    yield from console.ending(
        [f"{sum(counts.values())} heads ({parts}); {fitting} analyses fit"],
        "",
        command_line(*analyze, options={**options, **text}, names=(*TEXT, *COMPANIONS)) if reads else "",
    )


def _names(labels: list[str]) -> str:
    """The first labels of a classifier."""
    return ", ".join(labels[:SHOWN]) + (f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else "")


def _short(value: Any) -> str:
    if isinstance(value, list):
        return str(value[0]) if len(set(value)) == 1 else "/".join(map(str, value))
    return str(value)
