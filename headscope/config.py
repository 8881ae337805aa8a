"""Configs of the commands: frozen, every default in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from headscope.errors import ConfigError


@dataclass(frozen=True)
class AnalyzeConfig:
    """Everything that `headscope analyze` can be told.

    `only`, `skip` and `also` name analyses; `parse` is "stanza" or a CoNLL-U file; `max_length` None is
    512 pieces or the model's limit, whichever is less; `relations` is "default", "all" or a list.
    """

    checkpoint: str
    out: Path
    source: Path | None = None
    target: Path | None = None
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    parse: str | None = None
    stanza_dir: Path | None = None
    lang: str = "en"
    download: bool = False
    relations: str = "default"
    min_instances: int = 30
    frequencies: Path | None = None
    frequency_corpus: Path | None = None
    keep_special: bool = False
    max_length: int | None = None
    long: Literal["truncate", "refuse"] = "truncate"
    max_sentences: int | None = None
    batch_tokens: int = 2048
    bootstrap: int = 1000
    seed: int = 1
    device: str = "auto"
    dtype: str = "auto"
    format: str | None = None
    detail: bool = False
    figures: bool = True
    force: bool = False

    def __post_init__(self) -> None:
        if self.long not in ("truncate", "refuse"):
            raise ConfigError(f"--long {self.long!r} is not known; choose truncate or refuse")
        if self.frequencies and self.frequency_corpus:
            raise ConfigError("--frequencies and --frequency-corpus both say how frequent tokens are; give one")
        if self.source is None and (self.parse is None or self.parse == "stanza"):
            raise ConfigError(
                "no text: give --source FILE (one sentence a line) or --parse FILE.conllu, which has text"
            )

    def settings(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
