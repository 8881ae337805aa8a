"""Text arguments of the API: a file, a list of sentences, a list of pairs, or a pair of two texts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, cast

from headscope.config import TextFiles
from headscope.data.corpus import Corpus, open_text
from headscope.data.labels import with_labels
from headscope.data.lines import Lines
from headscope.errors import ConfigError, DataError
from headscope.evaluation.prompts import with_answers
from headscope.formats.base import Checkpoint

Text: TypeAlias = "str | PathLike[str] | Iterable[str] | Iterable[tuple[str, str]] | tuple[Any, Any] | Texts"
"""A file's path (one sentence a line, `.gz` too), sentences, pairs of a sentence and its translation, a pair
`(source, target)` of two such texts, written as a tuple, or `Texts`, a text with all that belongs to it."""


@dataclass(frozen=True)
class Texts:
    """A text with all that belongs to it, wherever the API takes a text: files, or lists of sentences.

    source, target, second, labels: see `Model.analyze`; the source may hold the target as pairs do.
    pairs: every line of the source is a pair of texts with a tab between, instead of `second`.
    corrupt, answer: where the source has prompts, the same prompts with another answer, and the answers.

    ConfigError for what is no text, DataError for a file that there is not.
    """

    source: Lines | None = None
    target: Lines | None = None
    second: Lines | None = None
    labels: Lines | None = None
    pairs: bool = False
    corrupt: Lines | None = None
    answer: Lines | None = None

    def __post_init__(self) -> None:
        lines = {name: getattr(self, name) for name in ("second", "labels", "corrupt", "answer")}
        lines = {name: None if text is None else _lines(text, name) for name, text in lines.items()}
        lines["source"], lines["target"] = _source_and_target(self.source, self.target)
        if isinstance(lines["labels"], list):
            lines["labels"] = [str(label) for label in lines["labels"]]
        if isinstance(lines["answer"], list):
            lines["answer"] = [
                "\t".join(map(str, entry)) if isinstance(entry, (tuple, list)) else entry for entry in lines["answer"]
            ]
        if not isinstance(self.pairs, bool):
            raise ConfigError(f"pairs={self.pairs!r} is of the wrong type; give True or False")
        for name, text in lines.items():
            object.__setattr__(self, name, text)

    @property
    def source2(self) -> Lines | None:
        """The other texts of pairs, as the command line calls them."""
        return self.second

    @property
    def empty(self) -> bool:
        """Whether there is no text."""
        return self.source is None and self.labels is None

    def corpus(
        self,
        checkpoint: Checkpoint | None = None,
        *,
        parse: str | None = None,
        target_parse: Path | None = None,
        max_sentences: int | None = None,
    ) -> Corpus:
        """Check the text and open it, with the labels that a `checkpoint` should predict.

        A CoNLL-U file in `parse`, or CoNLL columns with labels, is also the text where there is no other.
        """
        parses = Path(parse) if parse is not None and parse != "stanza" else None
        if self.source is None and parses is None and not isinstance(self.labels, Path):
            raise ConfigError(
                "no text: give a file's path or a list of sentences, or parse='FILE.conllu', which has text"
            )
        if parse is not None and (self.second is not None or self.pairs):
            raise ConfigError(f"parse={parse!r}: parses are of one text a line; leave out second and pairs")
        if target_parse is not None and self.target is None:
            raise ConfigError(f"target_parse={str(target_parse)!r} has parses of the target; give that too")
        files = cast(TextFiles, self)  # lists are as good
        corpus = open_text(files, parses=parses, target_parses=target_parse, max_sentences=max_sentences)
        if checkpoint is None:
            return corpus
        if self.corrupt is not None and self.answer is not None:
            return with_answers(checkpoint, corpus, self.corrupt, self.answer)
        return with_labels(checkpoint, corpus, self.labels)

    def settings(self) -> dict[str, str | bool | None]:
        """Paths of the texts, None for a text in memory; for a run's record."""
        names = {"source": "source", "target": "target", "source2": "second", "labels": "labels"}
        if self.answer is not None:
            names = {"clean": "source", "corrupt": "corrupt", "answer": "answer", "target": "target"}
        paths: dict[str, str | bool | None] = {option: _path(getattr(self, name)) for option, name in names.items()}
        return paths | ({"pairs": True} if self.pairs else {})


def texts_of(text: Text | None, target: Text | None = None, *, second: Text | None = None, labels: Any = None) -> Texts:
    """The texts of the arguments of those names; ConfigError for what is none."""
    if not isinstance(text, Texts):
        return Texts(*cast(Any, (text, target, second, labels)))
    if any(other is not None for other in (target, second, labels)):
        raise ConfigError("Texts holds all that belongs to a text; leave out target, second and labels")
    return text


def texts_in(options: dict[str, Any], text: Text | None) -> Texts:
    """A text with `target`, `second` and `labels` among the keywords of a method, which are taken out of these."""
    target, second, labels = (options.pop(name, None) for name in ("target", "second", "labels"))
    return texts_of(text, target, second=second, labels=labels)


def prompts_or_texts(options: dict[str, Any], text: Text | None) -> Texts:
    """The same; or prompts: `clean`, `corrupt`, `answer` and perhaps `target`. ConfigError where one is missing."""
    prompts = {name: options.pop(name, None) for name in ("clean", "corrupt", "answer")}
    missing = [name for name, lines in prompts.items() if lines is None]
    if len(missing) == 3:
        return texts_in(options, text)
    if missing:
        raise ConfigError(f"clean, corrupt and answer belong together; give {' and '.join(missing)} too")
    if any(other is not None for other in (text, options.pop("second", None), options.pop("labels", None))):
        raise ConfigError("clean has the text and answer what is right; leave out text, second and labels")
    return Texts(prompts["clean"], options.pop("target", None), corrupt=prompts["corrupt"], answer=prompts["answer"])


def _source_and_target(text: Any, target: Any) -> tuple[Lines | None, Lines | None]:
    """Both sides of a text, which a pair of texts, or pairs of sentences, hold together."""
    if isinstance(text, tuple):
        if len(text) != 2:
            raise DataError(f"a tuple of {len(text)}: a tuple is a pair (source, target); sentences belong in a list")
        if target is not None:
            raise DataError("a pair (source, target) has its target already; leave out target=")
        return _lines(text[0], "text"), _lines(text[1], "target")
    lines = None if text is None else _lines(text, "text", pairs=True)
    if isinstance(lines, list) and lines and all(isinstance(entry, tuple) and len(entry) == 2 for entry in lines):
        if target is not None:
            raise DataError("a list of pairs (sentence, translation) has its target already; leave out target=")
        return [source for source, _ in lines], [translation for _, translation in lines]
    return lines, None if target is None else _lines(target, "target")


def _lines(text: Any, name: str, *, pairs: bool = False) -> Any:
    """A path, or a list; ConfigError for other types, DataError for a file that there is not."""
    if isinstance(text, (str, PathLike)):
        path = Path(text)
        if isinstance(text, str) and not os.path.exists(path):
            raise DataError(f"there is no file {text[:60]!r}; a sentence itself belongs in a list: [{text[:60]!r}]")
        return path
    table = hasattr(text, "columns")  # of which a list would be the names of the columns
    if isinstance(text, (bytes, Mapping, Set, Texts)) or table or not isinstance(text, Iterable):
        kinds = (
            "a file's path, a list of sentences or a list of pairs" if pairs else "a file's path or a list of sentences"
        )
        raise ConfigError(f"{name}: a {type(text).__name__} is no text; give {kinds}")
    return list(text)


def _path(lines: Lines | None) -> str | None:
    return str(lines) if isinstance(lines, Path) else None


def one_text(text: Text) -> Lines:
    """A text without translation; ConfigError for pairs."""
    texts = texts_of(text)
    if texts.target is not None or texts.source is None:
        raise ConfigError("one text is wanted here, without its translation")
    return texts.source
