"""The text of a command, and the labels that a checkpoint's classes or tags are compared with."""

from __future__ import annotations

from pathlib import Path

from headscope.config import TextFiles
from headscope.data.corpus import Corpus, open_corpus
from headscope.data.labels import with_classes, with_tags
from headscope.data.lines import Lines
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint


def open_text(
    files: TextFiles, *, parses: Path | None = None, target_parses: Path | None = None, max_sentences: int | None = None
) -> Corpus:
    """The corpus of a command, without its labels; those in CoNLL columns are the text where there is no other.

    ConfigError where two options say what the other texts of pairs are.
    """
    if files.pairs and files.source2 is not None:
        raise ConfigError("--source2 and --pairs both say where the other text of a pair is; give one of them")
    return open_corpus(
        files.source,
        target=files.target,
        second=files.source2,
        parses=parses,
        target_parses=target_parses,
        columns=files.labels if files.source is None and parses is None else None,
        pairs=files.pairs,
        max_sentences=max_sentences,
    )


def with_labels(checkpoint: Checkpoint, corpus: Corpus, labels: Lines | None, *, option: str = "--labels") -> Corpus:
    """The corpus with what the checkpoint should say, unless `labels` is None.

    Of a classifier a file (or list) with a class a line, of a token classifier a file of CoNLL columns. ConfigError for
    other models, DataError where labels do not fit the text or the model.
    """
    if labels is None:
        return corpus
    if why := no_labels(checkpoint):
        raise ConfigError(f"{option}: {why}; leave it out")
    if checkpoint.predicts == "classes":
        return with_classes(corpus, labels, checkpoint.label_names)
    if corpus.has_second:
        raise ConfigError(f"{option}: tags are of the words of one text; leave out --source2 and --pairs")
    if not isinstance(labels, (str, Path)):
        raise ConfigError(f"{option}: tags come from a file of CoNLL columns, a word and its tag a line")
    return with_tags(corpus, Path(labels), checkpoint.label_names)


def no_labels(checkpoint: Checkpoint) -> str | None:
    """Why a checkpoint's predictions cannot be compared with labels. Returns None if they can."""
    kind = f"a model of type {checkpoint.model_type!r}"
    if not checkpoint.label_names:
        return f"{kind} is no classifier"
    if len(checkpoint.label_names) == 1:
        return f"{kind} with one output predicts a number, which is no class"
    if checkpoint.exclusive_labels:
        return None
    return f"{kind} gives a text several labels at once (problem_type multi_label_classification)"
