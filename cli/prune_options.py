"""Options that the commands share which choose heads: `prune l0`, `prune subset`, `prune rank`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli import console
from headscope.cli.next_commands import after_choice
from headscope.cli.options import DATA, MODEL, OUTPUT, CheckpointName, Labels, MaxSentences, Pairs, Source2
from headscope.engine.declarations import objective_names

if TYPE_CHECKING:
    from headscope.pruning.selection import Selection

HEADS, LEARNING, COMPENSATION = "Which heads", "Learning", "Compensation"

Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory to write.", rich_help_panel=OUTPUT)]
Source = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Text, one sentence a line (.gz too).", rich_help_panel=DATA)
]
Target = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Its translation, line by line.", rich_help_panel=DATA)
]
ValidSource = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Text to measure the result on; default: the start of --source.",
        rich_help_panel=DATA,
    ),
]
ValidTarget = Annotated[Path | None, typer.Option(metavar="FILE", help="Its translation.", rich_help_panel=DATA)]
ValidSource2 = Annotated[
    Path | None,
    typer.Option(
        "--valid-source2", metavar="FILE", help="The other text of its pairs, as --source2.", rich_help_panel=DATA
    ),
]
ValidLabels = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Its classes or tags, as --labels.", rich_help_panel=DATA)
]
Allocate = Annotated[
    str,
    typer.Option(
        metavar="global|per-layer|uniform|measured",
        help="How many heads each layer keeps: as all scores say, the same share, the same number, or as the loss says "
        "that is measured once what is left is refitted (prune remove --compensate; slow).",
        rich_help_panel=HEADS,
    ),
]
Sequential = Annotated[
    bool,
    typer.Option(
        "--sequential",
        help="least-squares: refit module after module, so that later ones make up for earlier ones (two passes each).",
        rich_help_panel=COMPENSATION,
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"What heads are judged by: {', '.join(objective_names())}; default: what fits the model.",
        rich_help_panel=DATA,
    ),
]
ValidSentences = Annotated[int, typer.Option(min=1, help="Lines to measure on.", rich_help_panel=DATA)]
MaxLength = Annotated[
    int | None,
    typer.Option(min=2, help="Subwords a side may have; longer sentences are cut.", rich_help_panel=DATA),
]
Sites = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Where heads may go: encoder-self,decoder-self,cross; default: everywhere.",
        rich_help_panel=HEADS,
    ),
]
Protect = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Heads that stay: encoder-self.0.*,cross.2.1, or a file.", rich_help_panel=HEADS),
]
Keep = Annotated[int | None, typer.Option(metavar="N", help="Heads that stay, of those sites.", rich_help_panel=HEADS)]
Freeze = Annotated[
    str | None,
    typer.Option(
        metavar="none|encoder|decoder|model",
        help="What does not learn; default: the decoder where only encoder-self is gated (Voita et al. 2019), "
        "else nothing. model: the gates alone learn.",
        rich_help_panel=LEARNING,
    ),
]
Updates = Annotated[int, typer.Option(help="Updates of learning.", rich_help_panel=LEARNING)]
TuneUpdates = Annotated[
    int,
    typer.Option(help="Updates that follow, with the heads that go closed for good.", rich_help_panel=LEARNING),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        help="Adam's rate for the model; default: 3e-4, for Hugging Face models 3e-5.", rich_help_panel=LEARNING
    ),
]
Schedule = Annotated[
    str, typer.Option(help="constant, or linear (to 0 at the end).", rich_help_panel=LEARNING, metavar="NAME")
]
Warmup = Annotated[int, typer.Option(help="Updates in which the rates rise.", rich_help_panel=LEARNING)]
Smoothing = Annotated[
    float | None,
    typer.Option(help="Label smoothing; default: 0.1 for translation, else 0.", rich_help_panel=LEARNING),
]
Clip = Annotated[
    float, typer.Option(help="Longest norm of the model's gradient; 0: no limit.", rich_help_panel=LEARNING)
]
LearnTokens = Annotated[int, typer.Option(min=1, help="Token positions in a batch.", rich_help_panel=MODEL)]
LearnSeed = Annotated[
    int, typer.Option(min=0, help="Seed of gates, noise, dropout and data order.", rich_help_panel=LEARNING)
]
Remove = Annotated[
    bool,
    typer.Option(
        "--remove",
        help="Go on and cut the heads out, into DIR/pruned (prune remove).",
        rich_help_panel=OUTPUT,
    ),
]
ExportKind = Annotated[
    str | None, typer.Option(metavar="KIND", help="For --remove: as prune remove has it.", rich_help_panel=OUTPUT)
]


class Start:
    """What is pruned, and where the result goes."""

    checkpoint: CheckpointName
    out: Out


class Texts:
    """What is learnt from, and what the result is measured on."""

    source: Source = None
    target: Target = None
    source2: Source2 = None
    pairs: Pairs = False
    labels: Labels = None
    valid_source: ValidSource = None
    valid_target: ValidTarget = None
    valid_source2: ValidSource2 = None
    valid_labels: ValidLabels = None
    objective: Objective = ""
    max_sentences: MaxSentences = None
    valid_sentences: ValidSentences = 1000
    max_length: MaxLength = None


class Placed:
    """Where heads may go."""

    sites: Sites = None
    protect: Protect = None


class Tuning:
    """How the model learns."""

    tune_updates: TuneUpdates = 0
    freeze: Freeze = None
    lr: LearningRate = None
    schedule: Schedule = "constant"
    warmup: Warmup = 0
    label_smoothing: Smoothing = None
    clip: Clip = 1.0
    batch_tokens: LearnTokens = 2048
    seed: LearnSeed = 1


class Result:
    """What comes of the choice."""

    remove: Remove = False
    export: ExportKind = None


def show_choice(choice: Selection, *, json: bool, options: Mapping[str, Any]) -> None:
    """Print what was chosen with these options, and what can be done next."""
    if json:
        console.print_json({"out": str(choice.folder), **choice.record()})
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    screen = console.out()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("site", "heads", "kept"):
        table.add_column(column, justify="left" if column == "site" else "right")
    for site, (kept, total) in choice.per_site().items():
        table.add_row(site, str(total), str(kept))
    table.add_row("all", str(choice.gating.heads), str(len(choice.kept)))
    screen.print(table)
    for line in _lines(choice):
        screen.print(Text(line), soft_wrap=True)
    screen.print(Text(str(choice.signature), style="dim"), soft_wrap=True)
    console.show(console.ending(_answer(choice), choice.folder, after_choice(choice, options)))


def _lines(choice: Selection) -> list[str]:
    lines = [choice.facts["ranking"]["direction"]] if "ranking" in choice.facts else []
    learning = choice.facts.get("learning", {})
    if "lambda_paper" in learning:
        how = " (searched)" if learning["lambda_searched"] else ""
        paper, code = learning["lambda_paper"], learning["lambda_code"]
        lines.append(f"λ {paper:.4g} on the sum over heads, {code:.4g} on the mean over modules{how}")
        if learning["lambda_searched"]:
            lines.append(f"log_a > 0 alone would keep {learning['heads_with_log_a_above_0']} heads")
    return [*lines, *(f"note: {remark}" for remark in choice.remarks)]


def _answer(choice: Selection) -> Iterator[str]:
    """How many heads stay, and what that costs where it was measured."""
    quality = ""
    if choice.quality:
        values = ", ".join(f"{when} {round(value, 4) + 0.0:.4f}" for when, value in choice.quality.items())
        quality = f"; {choice.title}: {values}"
    yield f"{len(choice.kept)} of {choice.gating.heads} heads stay{quality}"
    if choice.removed_to is not None:
        yield f"smaller checkpoint: {choice.removed_to}"
