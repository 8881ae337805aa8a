"""`headscope show`: format, architecture, attention and parameters of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any

from headscope.cli import console
from headscope.cli.next_commands import COMPANIONS, TEXT, command_line
from headscope.cli.options import made_of, read
from headscope.config.small import ShowConfig

NAMED = ("path", "format", "architecture", "model_type", "dtype", "limit", "digest")
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
    lines = {name.replace("_", " "): str(overview[name]) for name in NAMED}
    if "mask" in overview:
        lines["mask"] = ", ".join(overview["mask"])
    tokenizer = overview["tokenizer"]
    lines["tokenizer"] = f"{tokenizer['class']}, {tokenizer['vocabulary']:,} subwords" if tokenizer else "none"
    if tokenizer and (spoken := tokenizer.get("languages")):
        lines["languages"] = f"reads {spoken['reads']}, writes {spoken['writes'] or '?'}; {spoken['known']} known"
    if overview["labels"]:
        labels = overview["labels"]
        more = f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else ""
        lines["labels"] = ", ".join(labels[:SHOWN]) + more
    first = console.table(("name", "value"), lines.items(), whole=("name",), show_header=False)
    first.columns[1].overflow = "fold"
    for line in _mixed(overview["mixing"]):
        console.out().print(line, style="bold", markup=False, soft_wrap=True)
    console.show([first, *_tables(overview)])
    console.show(_ending(overview, options))


def _tables(overview: dict[str, Any]) -> Iterator[Any]:
    """Attention by site, parameters by part, and the metrics, objectives and analyses that fit."""

    def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
        return console.table(columns, rows, title=title, title_style=None, title_justify="center", pad_edge=True)

    sites = (
        [_short(site[name]) for name in ("site", "layers", "heads", "width", "groups")] for site in overview["sites"]
    )
    yield table("attention", ("site", "layers", "heads", "width", "key/value groups"), sites)
    parts = ((name, f"{count:,}") for name, count in overview["parameters"].items())
    yield table("parameters", ("part", "parameters"), parts)
    metrics = ((metric["name"], metric["needs"]) for metric in overview["metrics"])
    yield table("metrics", ("metric of evaluate", "needs"), metrics)
    objectives = (
        (each["name"], each["needs"], "yes" if each["trains"] else "no", each["summary"])
        for each in filter(itemgetter("fits"), overview["objectives"])
    )
    yield table("objectives", ("objective", "needs", "gates learn by it", "what it is"), objectives)
    analyses = (
        (each["name"], "yes" if each["fits"] else each["why"], each["summary"]) for each in overview["analyses"]
    )
    yield table("analyses", ("analysis", "fits", "what it measures"), analyses)


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
    """How many heads there are, and how they are measured; the sample that ships stands for text, not for sound."""
    from headscope.assets import sample
    from headscope.formats.base import FORMATS

    counts = {site["site"]: sum(site["heads"]) for site in overview["sites"]}
    fitting = sum(1 for analysis in overview["analyses"] if analysis["fits"])
    text = {"source": sample("en"), "target": sample("de") if {"cross", "encoder-self"} <= counts.keys() else None}
    analyze = ("analyze", overview["path"], "--out", f"{PurePath(overview['path']).name}-run")
    dictionaries = not overview["tokenizer"] and "dicts" in FORMATS.get(overview["format"]).takes
    reads = overview["reads"] == "text" and (overview["tokenizer"] or dictionaries)
    if dictionaries:
        text["dicts"] = Path("DIR")
    parts = ", ".join(f"{count} {site}" for site, count in counts.items())
    yield from console.ending(
        [
            f"{sum(counts.values())} heads ({parts}); {fitting} analyses fit",
            *_between(overview["sites"]),
            *_windows(overview["sites"]),
            *_shared(overview["sites"]),
        ],
        "",
        command_line(*analyze, options={**options, **text}, names=(*TEXT, *COMPANIONS)) if reads else "",
    )


def _between(sites: list[dict[str, Any]]) -> Iterator[str]:
    """Which layers have attention, where those below or between have none."""
    for site in sites:
        if site["numbers"] != list(range(site["layers"])):
            yield f"{site['site']}: only layers {', '.join(map(str, site['numbers']))} have attention"


def _windows(sites: list[dict[str, Any]]) -> Iterator[str]:
    """Which layers do not see the whole text."""
    for site in sites:
        for window in site["windows"]:
            layers = ", ".join(map(str, window["layers"]))
            yield f"{site['site']}: layers {layers} see a sliding window of {window['tokens']:,} tokens"


def _shared(sites: list[dict[str, Any]]) -> Iterator[str]:
    """Which layers have one set of weights, so that their heads can only go together."""
    for site in sites:
        for layers in site["shared"]:
            named = ", ".join(map(str, layers))
            yield f"{site['site']}: layers {named} share one set of weights: a head goes from all of them or from none"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return str(value[0]) if len(set(value)) == 1 else "/".join(map(str, value))
    return str(value)
