"""Labels of classifiers: a class for every line, or a tag for every word, as ids of the model's labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from headscope.data.corpus import Corpus, Labels, Sentence, add_labels
from headscope.data.encoded import IGNORED, Encoded, Encoder
from headscope.data.parses import Parse, Token, find_tokens, read_columns
from headscope.errors import ConfigError, DataError, flag, shortlist
from headscope.files.reading import Lines, read_lines, text_name

MAX_SHOWN = 5  # labels of the model in an error


def with_labels(checkpoint: Any, corpus: Corpus, labels: Lines | None, *, option: str = "labels") -> Corpus:
    """The corpus with the labels that a classifier should predict; unchanged if `labels` is None.

    For a classifier `labels` is a file or list with one class a line, for a token classifier a file of CoNLL columns.
    ConfigError for other models, DataError for unknown labels and if there are not as many as sentences.
    """
    if labels is None:
        return corpus
    if why := no_labels(checkpoint):
        raise ConfigError(f"{flag(option)}: {why}; leave it out")
    names, is_class = checkpoint.label_names, checkpoint.predicts == "classes"
    if not is_class and corpus.has_second:
        raise ConfigError(f"{flag(option)}: tags are of one text; leave out {flag.source2} and {flag.pairs}")
    if not is_class and not isinstance(labels, (str, Path)):
        raise ConfigError(f"{flag(option)}: tags come from a file of CoNLL columns, a word and its tag a line")

    def read() -> Iterator[Sentence]:
        entries = _classes(labels, names) if is_class else _tags(Path(str(labels)), names)
        return add_labels(corpus.read(), entries, corpus.name, text_name(labels))

    return corpus.with_field("labels", read, has_labels=True)


def no_labels(checkpoint: Any) -> str | None:
    """Why a checkpoint's predictions cannot be compared with labels. Returns None if they can."""
    kind = f"a model of type {checkpoint.model_type!r}"
    if not checkpoint.label_names:
        return f"{kind} is no classifier"
    if len(checkpoint.label_names) == 1:
        return f"{kind} with one output predicts a number, which is no class"
    if checkpoint.exclusive_labels:
        return None
    return f"{kind} gives a text several labels at once (problem_type multi_label_classification)"


def _classes(labels: Lines, names: Sequence[str]) -> Iterator[Labels]:
    for line, text in enumerate(read_lines(labels), start=1):
        yield Labels((label_number(text, names, location=f"{text_name(labels)}:{line}: "),))


def _tags(columns: Path, names: Sequence[str]) -> Iterator[Labels]:
    for rows in read_columns(columns):
        tags = enumerate(rows.tags, start=rows.line)
        yield Labels(tuple(label_number(tag, names, "tag", f"{columns}:{line}: ") for line, tag in tags), rows.words)


def label_number(text: str, names: Sequence[str], kind: str = "class", location: str = "") -> int:
    """The number of a label, given by its name or, if no label has that name, its number; DataError for other texts."""
    if (text := text.strip()) in names:
        return list(names).index(text)
    if text in {str(number) for number in range(len(names))}:
        return int(text)
    choices = shortlist([f"{number} ({name})" for number, name in enumerate(names)], max_names=MAX_SHOWN)
    raise DataError(f"{location}the model has no {kind} {text[:40]!r}; it has {choices}")


def label_row(sentence: Sentence, encoding: Encoded, encoder: Encoder) -> list[int]:
    """The class, or the tag of every word at its first subword, `IGNORED` elsewhere; DataError without spans."""
    labels, text = sentence.labels, sentence.source
    assert labels is not None
    if not labels.words:
        return list(labels.ids)
    spans = encoder.spans(text, encoding.ids, side="source")
    if spans is None:
        raise DataError(f"the subwords of {text[:60]!r} cannot be located in it, so its tags cannot be placed")
    letters = [position for position, letter in enumerate(text) if not letter.isspace()]
    word_ends = zip(labels.words, accumulate(map(len, labels.words)), strict=True)
    words = tuple(Token(letters[end - len(word)], letters[end - 1] + 1) for word, end in word_ends)
    row, n_begun = [IGNORED] * len(encoding.ids), 0
    for subword, (first, last) in (find_tokens(Parse(text, words, ()), spans) or {}).items():
        if last >= n_begun:
            row[subword], n_begun = labels.ids[max(first, n_begun)], last + 1
    return row
