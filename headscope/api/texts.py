"""Text arguments of the API: a file, a list of sentences, a list of pairs, or a pair of two texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from headscope.data.corpus import Corpus, open_corpus
from headscope.errors import ConfigError, DataError
from headscope.evaluation.labels import with_labels
from headscope.evaluation.prompts import with_answers
from headscope.files.lines import Lines
from headscope.formats.base import Checkpoint

Text: TypeAlias = "str | PathLike[str] | Iterable[str] | Iterable[tuple[str, str]] | tuple[Any, Any]"
"""A file's path (one sentence a line, `.gz` too), sentences, pairs of a sentence and its translation, or a pair
`(source, target)` of two such texts, written as a tuple."""
LabelList: TypeAlias = "str | PathLike[str] | Iterable[str] | Iterable[int]"
"""What a classifier should say: a file's path (as `--labels` takes it), or the class of every sentence, by name or
number."""

AnswerList: TypeAlias = "str | PathLike[str] | Iterable[str] | Iterable[tuple[str, str]]"
"""What a model should say to every prompt: a file's path (as `--answer` takes it), or the answers, each alone or with a
wrong one."""


@dataclass(frozen=True)
class TextPair:
    """Source and target text, the other texts of pairs and labels, from which a corpus is opened.

    Where there are `answers` the source has prompts, and `corrupt` their corrupt versions.
    """

    source: Lines | None
    target: Lines | None
    second: Lines | None = None
    labels: Lines | None = None
    corrupt: Lines | None = None
    answers: Lines | None = None

    @property
    def empty(self) -> bool:
        """Whether there is no text."""
        return self.source is None and self.labels is None

    def corpus(
        self, checkpoint: Checkpoint | None = None, *, parse: str | None = None, max_sentences: int | None = None
    ) -> Corpus:
        """Check the text and open it, with the labels that a `checkpoint` should predict.

        A CoNLL-U file in `parse`, or CoNLL columns with labels, is also the text where there is no other.
        """
        columns = self.labels if isinstance(self.labels, Path) and self.source is None else None
        parses = Path(parse) if parse is not None and parse != "stanza" else None
        if self.source is None and parses is None and columns is None:
            raise DataError(
                "no text: give a file's path or a list of sentences, or parse='FILE.conllu', which has text"
            )
        corpus = open_corpus(
            self.source,
            target=self.target,
            second=self.second,
            parses=parses,
            columns=columns,
            max_sentences=max_sentences,
        )
        if checkpoint is None:
            return corpus
        if self.corrupt is not None and self.answers is not None:
            return with_answers(checkpoint, corpus, self.corrupt, self.answers)
        return with_labels(checkpoint, corpus, self.labels)

    def settings(self) -> dict[str, str | None]:
        """Paths of the texts, None for a text in memory; for a run's record."""
        names = {"source": "source", "target": "target", "source2": "second", "labels": "labels"}
        if self.answers is not None:
            names = {"clean": "source", "corrupt": "corrupt", "answer": "answers", "target": "target"}
        return {option: _path(getattr(self, name)) for option, name in names.items()}


def text_pair(
    text: Text | None, target: Text | None = None, *, second: Text | None = None, labels: LabelList | None = None
) -> TextPair:
    """The texts of the arguments of those names; DataError for an unsupported type."""
    pair = _source_and_target(text, target)
    if labels is not None and not isinstance(labels, (str, PathLike)):
        labels = [str(label) for label in labels]
    return replace(
        pair,
        second=None if second is None else _lines(second),
        labels=None if labels is None else _lines(labels),
    )


def prompt_texts(
    clean: Text | None, corrupt: Text | None, answer: AnswerList | None, *, target: Text | None
) -> TextPair:
    """Prompts, their corrupt versions and answers; ConfigError where one of them is missing."""
    given = {"clean": clean, "corrupt": corrupt, "answer": answer}
    if missing := [name for name, text in given.items() if text is None]:
        raise ConfigError(f"clean, corrupt and answer belong together; give {' and '.join(missing)} too")
    answers = _lines(answer)
    if isinstance(answers, list):
        answers = ["\t".join(entry) if isinstance(entry, (tuple, list)) else entry for entry in answers]
    prefix = None if target is None else _lines(target)
    return TextPair(_lines(clean), prefix, corrupt=_lines(corrupt), answers=answers)


def _source_and_target(text: Text | None, target: Text | None) -> TextPair:
    if isinstance(text, tuple):
        if len(text) != 2:
            raise DataError(f"a tuple of {len(text)}: a tuple is a pair (source, target); sentences belong in a list")
        if target is not None:
            raise DataError("a pair (source, target) has its target already; leave out target=")
        return TextPair(_lines(text[0]), _lines(text[1]))
    lines = None if text is None else _lines(text, pairs=True)
    if isinstance(lines, list) and lines and all(isinstance(entry, tuple) and len(entry) == 2 for entry in lines):
        if target is not None:
            raise DataError("a list of pairs (sentence, translation) has its target already; leave out target=")
        return TextPair([source for source, _ in lines], [translation for _, translation in lines])
    return TextPair(lines, None if target is None else _lines(target))


def _lines(text: Any, *, pairs: bool = False) -> Any:
    """A path, or a list; DataError for other types."""
    if isinstance(text, (str, PathLike)):
        path = Path(text)
        if isinstance(text, str) and not _exists(path):
            raise DataError(f"there is no file {text[:60]!r}; a sentence itself belongs in a list: [{text[:60]!r}]")
        return path
    table = hasattr(text, "columns")  # of which a list would be the names of the columns
    if isinstance(text, (bytes, Mapping, Set)) or table or not isinstance(text, Iterable):
        kinds = (
            "a file's path, a list of sentences or a list of pairs" if pairs else "a file's path or a list of sentences"
        )
        raise DataError(f"a {type(text).__name__} is no text; give {kinds}")
    return list(text)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a file's name, or with a zero byte in it
        return False


def _path(lines: Lines | None) -> str | None:
    return str(lines) if isinstance(lines, Path) else None


def one_text(text: Text) -> Lines:
    """A text without translation; ConfigError for pairs."""
    texts = text_pair(text)
    if texts.target is not None or texts.source is None:
        raise ConfigError("one text is wanted here, without its translation")
    return texts.source
