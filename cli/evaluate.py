"""`headscope evaluate`: the metrics that a checkpoint has, also with each head off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from headscope.cli import console
from headscope.cli.answers import show_result
from headscope.cli.options import options_from, read
from headscope.config.commands import EvaluateConfig

if TYPE_CHECKING:
    from headscope.evaluation.quality import Evaluation
    from headscope.evaluation.run import EachHead


@options_from(EvaluateConfig, verbose=True)
def evaluate(values: Mapping[str, Any], *, json: bool, verbose: bool) -> None:
    """Score translations, how well the model predicts a text, or how near it is to the intact one.

    Processes of torchrun share the text.

    Perplexity is exp(Σ -log p / tokens), accuracy the share of tokens that the model finds likeliest: over every token
    of the references and the one that closes each (teacher-forced); for decoders alone over every token that follows
    another; for encoders alone over every token, hidden. Of classifiers both, and macro-F1, are over the --labels. The
    cosine and the relative l2 distance compare final states, pooled (the mean over a sentence) or token by token, with
    those of the intact model, --against.
    """
    from headscope.distributed import process_group
    from headscope.evaluation.run import run_each_head, run_evaluation

    config = read(EvaluateConfig, values)
    with process_group() as processes:
        run = run_each_head if config.each_head else run_evaluation
        result: EachHead | Evaluation = run(config, progress=console.progress, processes=processes)
    if not processes.main:
        return
    out = config.out if config.each_head else config.per_sentence
    if json:
        console.print_json(result.to_json())
    else:
        show_result(result, verbose=verbose, files=[f"Results: {out}"] if out and result.complete else [])
    if not result.complete:
        console.say("interrupted: the numbers are of the sentences that were done, see n= in the signature")
        raise typer.Exit(130)
