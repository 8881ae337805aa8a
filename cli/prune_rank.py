"""`headscope prune rank`: which heads go, by a measure of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.next_commands import after_choice
from headscope.cli.options import made_of, read
from headscope.pruning.options.rank import RankConfig

if TYPE_CHECKING:
    from headscope.pruning.selection import Selection


def show_choice(choice: Selection, *, json: bool, options: Mapping[str, Any]) -> None:
    """Print what was chosen with these options, and what can be done next."""
    if json:
        console.print_json({"out": str(choice.folder), **choice.record()})
        return
    from rich.text import Text

    rows = [(site, str(total), str(kept)) for site, (kept, total) in choice.per_site().items()]
    rows.append(("all", str(choice.gating.heads), str(len(choice.kept))))
    table = console.table(("site", "heads", "kept"), rows, numbers=("heads", "kept"))
    lines = [choice.facts["ranking"]["direction"]] if "ranking" in choice.facts else []
    learning = choice.facts.get("learning", {})
    if "lambda_paper" in learning:
        how = " (searched)" if learning["lambda_searched"] else ""
        paper, code = learning["lambda_paper"], learning["lambda_code"]
        lines.append(f"λ {paper:.4g} on the sum over heads, {code:.4g} on the mean over modules{how}")
        if learning["lambda_searched"]:
            lines.append(f"log_a > 0 alone would keep {learning['heads_with_log_a_above_0']} heads")
    lines += [f"note: {remark}" for remark in choice.remarks]
    console.show([table, *map(Text, lines), Text(str(choice.signature), style="dim")])
    console.show(console.ending(_answer(choice), choice.folder, after_choice(choice, options)))


def _answer(choice: Selection) -> Iterator[str]:
    """How many heads stay, and what that costs where it was measured."""
    quality = ""
    if choice.quality:
        values = ", ".join(f"{when} {round(value, 4) + 0.0:.4f}" for when, value in choice.quality.items())
        quality = f"; {choice.title}: {values}"
    yield f"{len(choice.kept)} of {choice.gating.heads} heads stay{quality}"
    if choice.removed_to is not None:
        yield f"smaller checkpoint: {choice.removed_to}"


@made_of(RankConfig)
def rank(values: Mapping[str, Any], *, json: bool) -> None:
    """Rank heads by a measure, one-shot or scoring anew in steps, and decide which go.

    The lowest go first, or the highest: which, and why, is printed. Writes removed.txt, kept.txt, ranking.csv and
    pruning.json; with --tune-updates also DIR/model.

    Processes of torchrun share the text.
    """
    from headscope.pruning.ranking.rank_run import run_shared_ranking

    if choice := run_shared_ranking(read(RankConfig, values), progress=console.updates):
        show_choice(choice, json=json, options=values)
