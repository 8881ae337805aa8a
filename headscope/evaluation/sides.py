"""Whether a text has the sides that a model reads."""

from __future__ import annotations

from headscope.data.corpus import Corpus
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint


def check_sides(checkpoint: Checkpoint, corpus: Corpus, *, target: str) -> None:
    """ConfigError where a translation model has no target text (what it is for: `target`), or a model of one side has.

    Masked and causal language models read the source alone.
    """
    if checkpoint.needs_target and not corpus.has_target:
        raise ConfigError(f"a model of type {checkpoint.model_type!r} needs --target, {target}")
    refuse_unread_target(checkpoint, corpus)


def refuse_unread_target(checkpoint: Checkpoint, corpus: Corpus) -> None:
    """ConfigError where a corpus has a target and the model reads one side only, or the same text on both."""
    if corpus.has_target and (checkpoint.rereads or not checkpoint.two_sided):
        advice = " or, in analyze, give --template" if checkpoint.decodes and not checkpoint.rereads else ""
        why = "classifies, and its decoder reads the source too" if checkpoint.rereads else "reads one side only"
        raise ConfigError(f"a model of type {checkpoint.model_type!r} {why}; leave out --target{advice}")


def check_template(checkpoint: Checkpoint) -> None:
    """ConfigError for models that are no decoder language models, which no template makes texts for."""
    if checkpoint.two_sided or not checkpoint.decodes:
        raise ConfigError(
            f"--template is for decoder language models, not type {checkpoint.model_type!r}; leave it out"
        )
