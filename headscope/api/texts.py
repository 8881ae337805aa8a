"""Text arguments of the API: a file, a list of sentences, a list of pairs, or a pair of two texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from headscope.data.corpus import Corpus, open_corpus
from headscope.errors import ConfigError, DataError
from headscope.files.lines import Lines

Text: TypeAlias = "str | PathLike[str] | Iterable[str] | Iterable[tuple[str, str]] | tuple[Any, Any]"
"""A file's path (one sentence a line, `.gz` too), sentences, pairs of a sentence and its translation, or a pair
`(source, target)` of two such texts, written as a tuple."""


@dataclass(frozen=True)
class TextPair:
    """Source and target text, from which a corpus is opened."""

    source: Lines | None
    target: Lines | None

    def corpus(self, *, parse: str | None = None, max_sentences: int | None = None) -> Corpus:
        """Check the text and open it; a CoNLL-U file in `parse` is also the text where there is no other."""
        parses = Path(parse) if parse is not None and parse != "stanza" else None
        if self.source is None and parses is None:
            raise DataError(
                "no text: give a file's path or a list of sentences, or parse='FILE.conllu', which has text"
            )
        return open_corpus(self.source, target=self.target, parses=parses, max_sentences=max_sentences)

    def settings(self) -> dict[str, str | None]:
        """Paths of the texts, None for a text in memory; for a run's record."""
        return {name: _path(getattr(self, name)) for name in ("source", "target")}


def text_pair(text: Text | None, target: Text | None = None) -> TextPair:
    """The texts of `text` and `target` arguments; DataError for an unsupported type."""
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
