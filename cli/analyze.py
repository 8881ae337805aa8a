"""`headscope analyze`: measure every attention head of a checkpoint on a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.bounds import RESAMPLES
from headscope.cli import console
from headscope.cli.options import (
    ANALYSES,
    DATA,
    MODEL,
    OUTPUT,
    CheckpointName,
    CompanionOptions,
    Ending,
    LabelledText,
    Mask,
    PlacementOptions,
    PromptTexts,
    RunningOptions,
    Seed,
    option_of,
    settings_of,
    takes,
    value_of,
)
from headscope.engine.declarations import analysis_options, objective_names

if TYPE_CHECKING:
    from headscope.api.analysis import Finished


class Text:
    """The text, its translations and its parses."""

    checkpoint: CheckpointName
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the results.", rich_help_panel=OUTPUT)]
    source: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text, one sentence a line (.gz too).", rich_help_panel=DATA),
    ] = None
    target: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Translations of the lines, for decoders with an encoder.",
            rich_help_panel=DATA,
        ),
    ] = None
    parse: Annotated[
        str | None,
        typer.Option(
            metavar="stanza|FILE",
            help="Dependency parses: made by stanza, or a CoNLL-U file (.gz too), "
            "whose text is analysed where --source is absent.",
            rich_help_panel=DATA,
        ),
    ] = None
    stanza_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where stanza's models lie; default: stanza's own place.",
            rich_help_panel=DATA,
        ),
    ] = None
    lang: Annotated[str, typer.Option(help="Language of the source, for stanza.", rich_help_panel=DATA)] = "en"
    download: Annotated[bool, typer.Option("--download", help="Let stanza fetch its models.", rich_help_panel=DATA)] = (
        False
    )
    max_sentences: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N lines.", rich_help_panel=DATA)
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Pieces a sentence may have; default 512 or the model's limit.", rich_help_panel=DATA),
    ] = None
    long: Annotated[
        str,
        typer.Option(metavar="truncate|refuse", help="What happens to longer sentences.", rich_help_panel=DATA),
    ] = "truncate"


class Chosen:
    """Which analyses run."""

    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Run only these analyses, comma-separated; `headscope show CKPT` lists them.",
            rich_help_panel=ANALYSES,
        ),
    ] = None
    skip: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Leave these analyses out.", rich_help_panel=ANALYSES)
    ] = None
    also: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Run these beside the default ones.", rich_help_panel=ANALYSES),
    ] = None
    importance: Annotated[
        bool,
        typer.Option(
            "--importance", help="Add every importance: how much the model needs a head.", rich_help_panel=ANALYSES
        ),
    ] = False
    faithfulness: Annotated[
        bool,
        typer.Option(
            "--faithfulness",
            help="Test the rankings: remove heads in each order and see which harms. Adds --importance unless --only.",
            rich_help_panel=ANALYSES,
        ),
    ] = False
    faithfulness_steps: Annotated[
        int, typer.Option(min=2, metavar="N", help="Steps of these removals.", rich_help_panel=ANALYSES)
    ] = 10
    faithfulness_seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Random orders beside them.", rich_help_panel=ANALYSES)
    ] = 5
    faithfulness_bleu: Annotated[
        bool,
        typer.Option("--faithfulness-bleu", help="Also translate at every step.", rich_help_panel=ANALYSES),
    ] = False


class Explained:
    """What importances are about."""

    objective: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"What importances explain: {', '.join(objective_names(prompts=True))}; default: what fits.",
            rich_help_panel=ANALYSES,
        ),
    ] = ""


ANALYSIS_OPTIONS = analysis_options()
"""Options that analyses declare, each in its own file."""


class Counted:
    """What is counted, and how sure that is."""

    frequencies: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="How frequent tokens are: token and count a line.", rich_help_panel=ANALYSES),
    ] = None
    frequency_corpus: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to count tokens over; default: the source itself.",
            rich_help_panel=ANALYSES,
        ),
    ] = None
    keep_special: Annotated[
        bool,
        typer.Option(
            "--keep-special",
            help="Count special tokens (start, end) as queries and keys too.",
            rich_help_panel=ANALYSES,
        ),
    ] = False
    bootstrap: Annotated[
        int, typer.Option(min=10, max=RESAMPLES, help="Resamples for the 95 % intervals.", rich_help_panel=ANALYSES)
    ] = 1000
    seed: Seed = 1


class Batches:
    """How much runs at once."""

    batch_tokens: Annotated[int, typer.Option(min=1, help="Token positions in a batch.", rich_help_panel=MODEL)] = 2048
    attention: Annotated[
        str,
        typer.Option(
            metavar="auto|dense|streamed",
            help="Make matrices of weights, or only what analyses need of them; auto streams beyond 1024 tokens.",
            rich_help_panel=MODEL,
        ),
    ] = "auto"


class Masked:
    """Heads that are off."""

    mask: Mask = None


class Written:
    """What is written."""

    detail: Annotated[
        bool, typer.Option("--detail", help="Also write every sentence's values.", rich_help_panel=OUTPUT)
    ] = False
    figures: Annotated[
        bool,
        typer.Option("--figures/--no-figures", help="Draw the standard figures.", rich_help_panel=OUTPUT),
    ] = True
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Also write report.html: everything in one page, for a browser.", rich_help_panel=OUTPUT
        ),
    ] = False
    examples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Keep the attention on the first N short sentences, for the page; default: 12 with --report, or 0.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    mhr_pickles: Annotated[
        bool,
        typer.Option(
            "--mhr-pickles",
            help="Also write pickles/mhr: confidences, cosine, L2 and alphas as the MHR fork writes them.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    mhr_rows: Annotated[
        str,
        typer.Option(
            metavar="corpus|batch|generate",
            help="What a row of these is: the corpus, a batch of the fork, or (decoders) its last decoding step.",
            rich_help_panel=OUTPUT,
        ),
    ] = "corpus"
    mhr_batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Sentences in such a batch, fairseq's --batch-size; default 32.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    mhr_max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Or token positions in it, fairseq's --max-tokens; both limits hold.",
            rich_help_panel=OUTPUT,
        ),
    ] = None


@takes(
    Text,
    LabelledText,
    PromptTexts,
    Chosen,
    Explained,
    [option_of(option.field, option.type, ANALYSES) for option in ANALYSIS_OPTIONS.values()],
    Counted,
    RunningOptions,
    PlacementOptions,
    Batches,
    CompanionOptions,
    Masked,
    Written,
    Ending,
)
def analyze(values: dict[str, Any]) -> None:
    """Measure every attention head of a checkpoint on a text, in one forward pass."""
    from headscope.api.analysis import run_analysis
    from headscope.config import AnalyzeConfig

    json, settings = settings_of(values, lists=("only", "skip", "also"))
    analysis_values = {
        name: value_of(name, option.type, settings.pop(name)) for name, option in ANALYSIS_OPTIONS.items()
    }
    finished = run_analysis(AnalyzeConfig(**settings, analysis_options=analysis_values), progress=console.progress)
    if not finished.main:
        return
    if json:
        console.print_json(_as_json(finished))
    else:
        _show(finished)
    if not finished.study.complete:
        done = finished.study.sentences
        console.say(f"interrupted: {finished.folder} holds what {done} sentences gave; run.json says complete: false")
        raise typer.Exit(130)


def _as_json(finished: Finished) -> dict[str, Any]:
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


def _show(finished: Finished) -> None:
    """The summary on the terminal: functions, the sharpest heads, what was left out and why."""
    from headscope.cli.summary import summary

    console.show(summary(finished))


analyze.__doc__ = (
    analyze.__doc__ or ""
) + "\n\nWrites heads.csv (a row per head), a table per analysis, run.json and figures."
