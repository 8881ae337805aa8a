"""`headscope analyze`: measure every attention head of a checkpoint on a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from headscope.cli import console
from headscope.cli.options import made_of, option_of, read, value_of
from headscope.cli.typed import typed_text
from headscope.config import AnalyzeConfig
from headscope.config.analyze import ANALYSES
from headscope.engine.declarations import analysis_options

if TYPE_CHECKING:
    from headscope.api.analysis import FinishedRun


ANALYSIS_OPTIONS = analysis_options()
"""Options that analyses declare, each in its own file."""
MORE = [option_of(option.field, option.type, ANALYSES) for option in ANALYSIS_OPTIONS.values()]


@made_of(AnalyzeConfig, more=MORE, typed=("source", "target"))
def analyze(values: Mapping[str, Any], *, json: bool) -> None:
    """Measure every attention head of a checkpoint on a text, in one forward pass.

    Writes heads.csv (a row per head), a table per analysis, run.json and figures. With --source - it measures the
    sentences that are typed or piped in, and writes the page of their attention too.
    """
    from headscope.api.analysis import run_analysis
    from headscope.cli.summary import summary

    own = {name: value_of(option.field, option.type, values[name]) for name, option in ANALYSIS_OPTIONS.items()}
    typed = typed_text(values)
    values = {**values, "report": True} if typed else values
    finished = run_analysis(read(AnalyzeConfig, values, analysis_options=own), typed=typed, progress=console.progress)
    if not finished.main:
        return
    if json:
        console.print_json(_as_json(finished))
    else:
        console.show(summary(finished))
    if not finished.study.complete:
        done = finished.study.sentences
        console.say(f"interrupted: {finished.folder} holds what {done} sentences gave; run.json says complete: false")
        raise typer.Exit(130)


def _as_json(finished: FinishedRun) -> dict[str, Any]:
    from headscope.results import ResultTable

    table = ResultTable("heads", finished.study.heads, finished.signature)
    return {
        "out": str(finished.folder),
        "complete": finished.study.complete,
        "sentences": finished.study.sentences,
        "unknown_pieces": finished.study.losses.unknown.to_json(),
        "remarks": finished.study.remarks,
        "left_out": [{"analysis": omission.analysis, "why": omission.why} for omission in finished.study.left_out],
        "heads": table.to_json(),
    }
