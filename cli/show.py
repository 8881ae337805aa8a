"""`headscope show`: format, architecture, attention and parameters of a checkpoint."""

from __future__ import annotations

from typing import Any

from headscope.cli import console
from headscope.cli.options import Bpe, CheckpointName, Device, Dicts, Dtype, FormatName, HyperParameters, Json, Mask


def show(
    checkpoint: CheckpointName,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    format: FormatName = None,
    dicts: Dicts = None,
    hp: HyperParameters = None,
    bpe: Bpe = None,
    mask: Mask = None,
    json: Json = False,
) -> None:
    """Print format, architecture, sites × layers × heads, parameters by part, tokenizer, fitting analyses."""
    from headscope.api.loading import load

    model = load(checkpoint, device=device, dtype=dtype, format=format, dicts=dicts, hp=hp, bpe=bpe)
    overview = model.overview()
    if mask:
        overview["mask"] = [str(head) for head in model.select(mask)]
    if json:
        console.print_json(overview)
    else:
        _print(overview)


def _print(overview: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    for name in ("path", "format", "architecture", "model_type", "dtype", "limit", "digest"):
        table.add_row(name.replace("_", " "), str(overview[name]))
    if "mask" in overview:
        table.add_row("mask", ", ".join(overview["mask"]))
    tokenizer = overview["tokenizer"]
    table.add_row("tokenizer", f"{tokenizer['class']}, {tokenizer['vocabulary']:,} subwords" if tokenizer else "none")
    screen = console.out()
    screen.print(table)
    heads = Table("site", "layers", "heads", "width", "key/value groups", title="attention", box=box.SIMPLE_HEAD)
    for site in overview["sites"]:
        heads.add_row(*(_short(site[name]) for name in ("site", "layers", "heads", "width", "groups")))
    screen.print(heads)
    parts = Table("part", "parameters", title="parameters", box=box.SIMPLE_HEAD)
    for name, count in overview["parameters"].items():
        parts.add_row(name, f"{count:,}")
    screen.print(parts)
    fitting = Table("analysis", "fits", "what it measures", title="analyses", box=box.SIMPLE_HEAD)
    for analysis in overview["analyses"]:
        fitting.add_row(analysis["name"], "yes" if analysis["fits"] else analysis["why"], analysis["summary"])
    screen.print(fitting)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return str(value[0]) if len(set(value)) == 1 else "/".join(map(str, value))
    return str(value)
