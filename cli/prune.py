"""`headscope prune`: take heads out of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli import console
from headscope.cli.failures import one_process
from headscope.cli.options import (
    DATA,
    MODEL,
    OUTPUT,
    CheckpointName,
    CompanionOptions,
    Ending,
    RunningOptions,
    settings_of,
    takes,
)
from headscope.cli.prune_learn import l0, subset
from headscope.cli.prune_rank import rank
from headscope.cli.prune_sweep import sweep

if TYPE_CHECKING:
    from headscope.pruning.removal.remove import Removed

app = typer.Typer(
    name="prune",
    help="Take heads out of a model, and prove that nothing else changed.",
    no_args_is_help=True,
    add_completion=False,
)

HEADS = "Which heads"


@app.callback()
def prune(context: typer.Context) -> None:
    """Take heads out of a model, and prove that nothing else changed."""
    one_process(context, shared=("sweep",))


app.command()(l0)
app.command()(subset)
app.command()(rank)
app.command()(sweep)


class Removal:
    """Which heads go, where to, and what the result is compared on."""

    checkpoint: CheckpointName
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write.", rich_help_panel=OUTPUT)]
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Heads that go: encoder-self.2.5,cross.0.*, or a file with a name a line.",
            rich_help_panel=HEADS,
        ),
    ] = None
    keep_only: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Heads that stay, of the sites that the list names.", rich_help_panel=HEADS),
    ] = None
    export: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Hugging Face: self-contained (default), native or masked; other formats: their own, or masked. "
            "Add onnx for a graph besides: self-contained,onnx.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to compare and time on (.gz too); default: the sample that ships with headscope.",
            rich_help_panel=DATA,
        ),
    ] = None
    target: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its translation, for the decoder.", rich_help_panel=DATA)
    ] = None
    max_sentences: Annotated[int, typer.Option(min=1, help="Lines to compare on.", rich_help_panel=DATA)] = 32
    batch: Annotated[
        int, typer.Option(min=1, help="Sentences in the large batch that is timed.", rich_help_panel=MODEL)
    ] = 64
    rounds: Annotated[
        int, typer.Option(min=0, help="Runs of each model that are timed; 0: none.", rich_help_panel=MODEL)
    ] = 5


@app.command()
@takes(Removal, RunningOptions, CompanionOptions, Ending)
def remove(given: dict[str, Any]) -> None:
    """Cut heads out of the weights and write the smaller checkpoint, if it computes what the masked one does.

    The output has the input's format. A Hugging Face class has one number of heads for all layers, so its
    folder is self-contained: headscope opens it, and transformers does with trust_remote_code=True, without
    headscope. Differences, savings and times are printed and kept in pruning.json.
    """
    from headscope.pruning.removal.remove import RemoveConfig, removal_record, run_removal

    json, settings = settings_of(given, lists=("export",))
    config = RemoveConfig(**settings)
    removed = run_removal(config)
    if json:
        console.print_json({"out": str(removed.path), **removal_record(removed, config)})
        return
    show_removed(removed)


def show_removed(removed: Removed) -> None:
    """Print what a removal saved and how it was proved."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    screen = console.out()
    proof = removed.verified
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("before", "after", "less"):
        table.add_column(column, justify="right")
    for title, name in _SIZES.items():
        old, new = getattr(removed.before, name), getattr(removed.after, name)
        if old:
            table.add_row(title, f"{old:,}", f"{new:,}", f"{100 * (1 - new / old):.1f} %")
    for each in removed.paces:
        title = f"{each.what}, {each.sentences} sentence{'s' if each.sentences > 1 else ''}, ms"
        faster = f"{each.speedup:.2f} × faster"
        table.add_row(title, f"{1e3 * each.before:.2f}", f"{1e3 * each.after:.2f}", faster)
    screen.print(table)
    lines = [
        f"{removed.path}: {len(removed.removal.removed)} heads removed ({removed.format}, {removed.export})",
        f"masked and shrunk logits differ by {proof.difference:.1e} of the largest (limit {proof.tolerance:.0e}), "
        f"reloaded {proof.reloaded or 0.0:.1e}, on {proof.sentences} sentences ({proof.data})",
    ]
    if proof.cached is not None:
        lines.append(f"through the key/value cache: {proof.cached:.1e}")
    if proof.searches:
        lines.append(f"beam search: {proof.searched} of {proof.searches} results are the same")
    if removed.onnx is not None:
        lines.append(f"model.onnx: {removed.onnx:.1e} against onnxruntime")
    for line in [*lines, *(f"note: {note}" for note in removed.notes)]:
        screen.print(Text(line), soft_wrap=True)
    screen.print(Text(str(removed.signature), style="dim"), soft_wrap=True)


_SIZES = {
    "attention heads": "attention_heads",
    "parameters": "parameters",
    "bytes": "bytes",
    "FLOPs of the text": "flops",
    "cache bytes per token": "cache",
    "cache bytes per source token": "cross_cache",
}
