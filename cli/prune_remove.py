"""`headscope prune remove`: cut heads out of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli import console
from headscope.cli.next_commands import after_removal
from headscope.cli.options import (
    DATA,
    MODEL,
    OUTPUT,
    CheckpointName,
    CompanionOptions,
    Ending,
    HubName,
    HubPublic,
    LabelledText,
    RunningOptions,
    settings_of,
    takes,
)
from headscope.cli.prune_options import COMPENSATION, HEADS, Objective, Sequential, ValidLabels, ValidSource2
from headscope.engine.declarations import metric_names

if TYPE_CHECKING:
    from rich.table import Table

    from headscope.pruning.closed_form.calibration import Compensated
    from headscope.pruning.removal.record import Removed


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
    merge_kv: Annotated[
        int | None,
        typer.Option(
            "--merge-kv",
            metavar="N",
            help="Instead: all heads stay, and the key/value heads of every layer become N, each the mean of several, "
            "for a smaller cache (--export native, the default here, is a plain class).",
            rich_help_panel=HEADS,
        ),
    ] = None
    merge_by: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv|RUN",
            help="Merge those that are neighbours by these scores of heads; default: those that stand side by side.",
            rich_help_panel=HEADS,
        ),
    ] = None
    column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of --merge-by.", rich_help_panel=HEADS)] = (
        None
    )
    export: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Hugging Face: self-contained (default), native or masked; other formats: their own, or masked. "
            "Add gguf (llama.cpp), ctranslate2 or onnx for files besides: native,gguf. What most programs can serve is "
            "native: choose heads with prune rank --uniform, or fill up with --pad.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    pad: Annotated[
        bool,
        typer.Option(
            "--pad",
            help="Fill every layer up with heads of zeros to as many as the layer that keeps most, so that a plain "
            "class holds it (--export native); saves less, takes any heads.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    quantize: Annotated[
        str,
        typer.Option(metavar="none|q8_0", help="For gguf: store matrices in 8 bits.", rich_help_panel=OUTPUT),
    ] = "none"
    hub_name: HubName = None
    hub_public: HubPublic = False
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to compare, calibrate and time on (.gz too); default: the sample that ships with headscope.",
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
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Measured before and after, on held-out text: {', '.join(metric_names())}; default: accuracy with "
            "--labels, perplexity of what predicts words, else cosine.",
            rich_help_panel=DATA,
        ),
    ] = ""
    margin: Annotated[
        str | None,
        typer.Option(
            metavar="N|N%",
            help="Loss of that metric that counts as none: in its unit, or a percentage of the intact model's; "
            "default: 1%.",
            rich_help_panel=DATA,
        ),
    ] = None
    rounds: Annotated[
        int, typer.Option(min=0, help="Runs of each model that are timed; 0: none.", rich_help_panel=MODEL)
    ] = 5


class Calibrated:
    """How the heads that stay make up for those that go."""

    compensate: Annotated[
        str,
        typer.Option(
            metavar="none|mean|least-squares",
            help="Refit what is left of the output projections on --source, in closed form: least-squares refits "
            "weights and bias, mean moves the mean of removed heads into the bias.",
            rich_help_panel=COMPENSATION,
        ),
    ] = "none"
    calibration_sentences: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sentences of --source to refit on.", rich_help_panel=COMPENSATION)
    ] = 1000
    damping: Annotated[
        float,
        typer.Option(help="Ridge of least-squares, a share of the mean second moment.", rich_help_panel=COMPENSATION),
    ] = 1e-4
    sequential: Sequential = False
    objective: Objective = ""
    valid_source: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to measure intact, pruned and refitted model on; default: the last fifth of --source, "
            "which is then not refitted on.",
            rich_help_panel=COMPENSATION,
        ),
    ] = None
    valid_target: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its translation.", rich_help_panel=COMPENSATION)
    ] = None
    valid_source2: ValidSource2 = None
    valid_labels: ValidLabels = None


@takes(Removal, LabelledText, Calibrated, RunningOptions, CompanionOptions, Ending)
def remove(given: dict[str, Any]) -> None:
    """Cut heads out of the weights and write the smaller checkpoint, if it computes what the masked one does.

    The output has the input's format. A Hugging Face class has one number of heads for all layers, so its
    folder is self-contained: headscope opens it, and transformers does with trust_remote_code=True, without
    headscope. Differences, savings and times are printed and kept in pruning.json. With --compensate the masked model
    is the one whose output projections are refitted. With --merge-kv no head goes: key/value heads are merged, and
    the model is compared with the one whose projections are averaged in place.
    """
    from headscope.pruning.removal.record import removal_record
    from headscope.pruning.removal.remove import RemoveConfig, run_removal

    json, settings = settings_of(given, lists=("export",))
    config = RemoveConfig(**settings)
    removed = run_removal(config)
    if json:
        console.print_json({"out": str(removed.path), **removal_record(removed), **console.pushed(removed.pushed)})
        return
    show_removed(removed, given)


def show_removed(removed: Removed, options: Mapping[str, Any] | None = None) -> None:
    """Print what a removal with these options saved and cost, and how it was proved."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from headscope.evaluation.before_after import verdict_words
    from headscope.pruning.removal.record import merge_counts

    screen = console.out()
    proof = removed.verified
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("before", "after", "less"):
        table.add_column(column, justify="right")
    for row in _quality_rows(removed):
        table.add_row(*row)
    for title, name in _SIZES.items():
        old, new = getattr(removed.before, name), getattr(removed.after, name)
        if old:
            table.add_row(title, f"{old:,}", f"{new:,}", f"{100 * (1 - new / old):.1f} %")
    for pace in removed.paces:
        title = f"{pace.what}, {pace.sentences} sentence{'s' if pace.sentences > 1 else ''}, "
        title += "tokens/s" if pace.tokens else "ms"
        values = [pace.tokens / each if pace.tokens else 1e3 * each for each in (pace.before, pace.after)]
        table.add_row(title, *(f"{value:,.2f}" for value in values), f"{pace.speedup:.2f} × faster")
    screen.print(table)
    merges = merge_counts(removed.removal)
    masked = "averaged" if merges else "masked"
    if removed.compensated is not None:
        held_out = removed.compensated.text.held_out
        title = f"on {held_out.count} sentences that were not calibrated on ({held_out.name})"
        screen.print(Text(title, style="italic"), soft_wrap=True)
        screen.print(_performance_table(removed.compensated, "key/value heads merged" if merges else "heads removed"))
        masked = masked if removed.compensated.options.compensate == "none" else f"refitted {masked}"
    done = merges or f"{len(removed.removal.removed)} heads removed"
    verdict = [] if removed.quality is None else [verdict_words(removed.quality.record())]
    lines = [
        f"{masked} and shrunk logits differ by {proof.difference:.1e} of the largest (limit {proof.tolerance:.0e}), "
        f"reloaded {proof.reloaded or 0.0:.1e}, on {proof.sentences} sentences ({proof.data})",
    ]
    if proof.cached is not None:
        lines.append(f"through the key/value cache: {proof.cached:.1e}")
    if proof.searches:
        lines.append(f"beam search: {proof.searched} of {proof.searches} results are the same")
    lines += [file.proof for file in removed.engines]
    lines += [f"pushed to {removed.pushed}"] if removed.pushed else []
    if removed.compensated is not None and removed.compensated.refits:
        calibration, seconds = removed.compensated.text.calibration, removed.compensated.seconds
        lines.append(f"moments and refits: {seconds:.1f} s on {calibration.count} sentences ({calibration.name})")
    for line in [*lines, *(f"note: {note}" for note in removed.notes)]:
        screen.print(Text(line), soft_wrap=True)
    screen.print(Text(str(removed.signature), style="dim"), soft_wrap=True)
    answer = f"{removed.path}: {done} ({removed.format}, {removed.export})"
    console.show(console.ending([*verdict, answer], removed.path, after_removal(removed, options or {})))


def _quality_rows(removed: Removed) -> Iterator[tuple[str, ...]]:
    """The metric and the loss before and after, and how much more or less that is."""
    quality = removed.quality
    if quality is None:
        return
    title = f"{quality.title} ({quality.sentences} sentences, {quality.text})"
    rows = [(title, quality.before.value, quality.after.value)]
    rows += [] if quality.loss is None else [("loss (nats)", *quality.loss)]
    for name, old, new in rows:
        yield name, f"{old:.4f}", f"{new:.4f}", f"{old - new:.4f}"


def _performance_table(compensated: Compensated, change: str) -> Table:
    """The objective on held-out text of the intact, the pruned and the refitted model."""
    from rich import box
    from rich.table import Table

    performance = compensated.performance
    objective = performance["intact"].objective
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column({"representation": "cosine to the intact model"}.get(objective, objective), justify="right")
    table.add_column("worse than intact by", justify="right")
    rows = {"intact": "intact", "removed": change, "refitted": f"and {compensated.options.compensate}"}
    for name, row in rows.items():
        if name in performance:
            table.add_row(row, f"{performance[name].value:.4f}", f"{performance[name].damage:.4f}")
    return table


_SIZES = {
    "attention heads": "attention_heads",
    "parameters": "parameters",
    "bytes": "bytes",
    "FLOPs of the text": "flops",
    "cache bytes per token": "cache",
    "cache bytes per source token": "cross_cache",
}
