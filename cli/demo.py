"""`headscope demo`: analysis and pruning of the small trained model that ships."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headscope.cli import console
from headscope.cli.options import Force

if TYPE_CHECKING:
    from rich.table import Table

    from headscope.api.demo import Demonstration


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the results.")] = Path("demo"),
    force: Force = False,
) -> None:
    """See what headscope does, on a small translation model that ships with it; needs no network.

    Measures every head (relevance, functions), learns which heads can go, cuts them out of the weights, and translates
    before and after.
    """
    from headscope.api.demo import run_demonstration
    from headscope.cli.prune_options import show_choice
    from headscope.cli.prune_remove import show_removed
    from headscope.cli.summary import summary

    result = run_demonstration(out, force=force, progress=console.progress)
    screen = console.out()
    screen.rule("1  What the heads do")
    for part in summary(result.analysis):
        screen.print(part)
    screen.rule("2  Which can go")
    show_choice(result.choice, json=False)
    screen.rule("3  Without them")
    show_removed(result.removed)
    screen.print(_scores(result))
    for figure in result.figures:
        screen.print(f"look at: {figure}", markup=False, soft_wrap=True)


def _scores(result: Demonstration) -> Table:
    """BLEU and perplexity of captions that were not used for learning, before and after."""
    from rich import box
    from rich.table import Table

    sizes = result.removed.before.attention_heads, result.removed.after.attention_heads
    title = f"100 captions that nothing has learnt from, with {sizes[0]} heads and with {sizes[1]}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in ("before", "95 %", "after", "95 %"):
        table.add_column(column, justify="right")
    for old, new in zip(result.before.scores, result.after.scores, strict=True):
        ends = [f"{score.low:.2f}–{score.high:.2f}" for score in (old, new)]
        table.add_row(old.name, f"{old.value:.2f}", ends[0], f"{new.value:.2f}", ends[1])
    return table
