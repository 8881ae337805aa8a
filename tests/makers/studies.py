"""Analyses of a text by their names, and options of a run, those of the analyses beside the shared ones."""

from dataclasses import fields
from typing import Any

from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus
from headscope.data.encoded import CountedTokens
from headscope.engine.base import Analysis, RunOptions
from headscope.engine.plan import analyze, choose_analyses
from headscope.formats.base import Checkpoint
from headscope.results.study import Study

COUNTED_FIELDS = {entry.name for entry in fields(CountedTokens)}
RUN_FIELDS = {entry.name for entry in fields(RunOptions)}


def run_options(**options: Any) -> RunOptions:
    """RunOptions from all of them by name."""
    token_filter = CountedTokens(**{name: value for name, value in options.items() if name in COUNTED_FIELDS})
    analysis_options = {name: value for name, value in options.items() if name not in RUN_FIELDS | COUNTED_FIELDS}
    shared = {name: value for name, value in options.items() if name in RUN_FIELDS}
    return RunOptions(**{"token_filter": token_filter, **shared}, analysis_options=analysis_options)


def study_of(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *analyses: str | type[Analysis],
    tokens: int = BatchingOptions().tokens,
    replicates: int = 11,
    **options: Any,
) -> Study:
    """Analyses and groups of them on a text, in batches of so many tokens, with options by name."""
    names = [name for name in analyses if isinstance(name, str)]
    classes = [cls for cls in analyses if not isinstance(cls, str)] + (choose_analyses(only=names) if names else [])
    all_options = run_options(**{"batching": BatchingOptions(tokens=tokens), **options})
    return analyze(checkpoint, corpus, analyses=classes, options=all_options, replicates=replicates)
