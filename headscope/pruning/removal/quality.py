"""What a removal is measured by: the text that it may be measured on, and the metric that fits."""

from __future__ import annotations

from headscope.assets import sample
from headscope.config import ValidatedTextFiles
from headscope.data.corpus import Corpus, open_corpus
from headscope.errors import ConfigError, HeadscopeError
from headscope.evaluation.before_after import Question, question
from headscope.evaluation.labels import open_text, with_labels
from headscope.formats.base import Checkpoint
from headscope.pruning.model_inputs import InputTexts

MEASURED = 1000
"""Lines of a text that nothing was fitted to, which quality is measured on."""


def corpora(files: ValidatedTextFiles, checkpoint: Checkpoint) -> tuple[Corpus | None, Corpus | None]:
    """The text to calibrate on and the one to measure on, with their labels, as far as they are given."""
    corpus = with_labels(checkpoint, open_text(files), files.labels) if files.has_text else None
    if files.valid_text is None:
        return corpus, None
    return corpus, with_labels(checkpoint, open_text(files.valid_text), files.valid_labels, option="--valid-labels")


def sample_text(checkpoint: Checkpoint, data: InputTexts, sentences: int) -> Corpus | None:
    """The sample that ships, for a model that reads text, as `data` says."""
    if not data.sources:
        return None
    both = checkpoint.two_sided and checkpoint.predicts in ("words", "nothing")
    return open_corpus(sample("en"), target=sample("de") if both else None).first(sentences)


def quality_question(
    checkpoint: Checkpoint, corpus: Corpus | None, *, metric: str, margin: str | None
) -> tuple[Question | None, str]:
    """What is measured on a text, or why nothing is.

    ConfigError where a `metric` or `margin` is asked for and cannot be had.
    """
    if corpus is None:
        if metric or margin is not None:
            raise ConfigError("--metric and --margin are about text to measure on; give --source, or --valid-source")
        return None, "quality was not measured: there is no text"
    try:
        return question(checkpoint, corpus, metric=metric, margin=margin), ""
    except HeadscopeError as error:
        if metric or margin is not None:
            raise
        return None, f"quality was not measured: {error}"
