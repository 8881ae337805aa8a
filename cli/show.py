"""`headscope show`: what a checkpoint is, before anything is measured."""

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
    from headscope.config import CheckpointOptions
    from headscope.engine.overview import checkpoint_overview
    from headscope.formats.base import open_configured
    from headscope.heads import select_heads

    opened = open_configured(
        CheckpointOptions(checkpoint=checkpoint, device=device, dtype=dtype, format=format, dicts=dicts, hp=hp, bpe=bpe)
    )
    found = checkpoint_overview(opened)
    if mask:
        found["mask"] = [str(head) for head in select_heads(mask, opened.layout)]
    if json:
        console.print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    for name in ("path", "format", "architecture", "model_type", "dtype", "limit", "digest"):
        table.add_row(name.replace("_", " "), str(found[name]))
    if "mask" in found:
        table.add_row("mask", ", ".join(found["mask"]))
    tokenizer = found["tokenizer"]
    table.add_row("tokenizer", f"{tokenizer['class']}, {tokenizer['vocabulary']:,} pieces" if tokenizer else "none")
    screen = console.out()
    screen.print(table)
    heads = Table("site", "layers", "heads", "width", "key/value groups", title="attention", box=box.SIMPLE_HEAD)
    for site in found["sites"]:
        heads.add_row(*(_short(site[name]) for name in ("site", "layers", "heads", "width", "groups")))
    screen.print(heads)
    parts = Table("part", "parameters", title="parameters", box=box.SIMPLE_HEAD)
    for name, count in found["parameters"].items():
        parts.add_row(name, f"{count:,}")
    screen.print(parts)
    fitting = Table("analysis", "fits", "what it measures", title="analyses", box=box.SIMPLE_HEAD)
    for each in found["analyses"]:
        fitting.add_row(each["name"], "yes" if each["fits"] else each["why"], each["summary"])
    screen.print(fitting)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return str(value[0]) if len(set(value)) == 1 else "/".join(map(str, value))
    return str(value)
