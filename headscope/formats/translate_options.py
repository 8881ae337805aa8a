"""How a checkpoint translates, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headscope.config.small import TranslateConfig
from headscope.errors import ConfigError


class Translation(NamedTuple):
    """One translation, and what the search ranks it by (0 for a Hugging Face model that was not asked for scores)."""

    text: str
    score: float


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    """How to translate; None means: as the checkpoint itself says.

    `beam` hypotheses are followed, the score is Σ log p over a penalty of the length to the `power`, n source
    tokens give at most `max_ratio` · n + `max_extra` tokens, `best` translations are returned. Of a text `longest`
    subwords are read (None: see `Checkpoint.reads`). `keep_pieces` leaves them apart; `scores` says that scores will be
    looked at. `exact` is for timing: every translation has so many tokens before the end symbol, whatever else is said.
    """

    beam: int | None = None
    power: float | None = None
    max_ratio: float | None = None
    max_extra: int | None = None
    best: int = 1
    longest: int | None = None
    keep_pieces: bool = False
    scores: bool = False
    exact: int | None = None

    @classmethod
    def of(cls, config: TranslateConfig) -> TranslateOptions:
        """As the options of `headscope translate` say."""
        return cls(
            beam=1 if config.greedy else config.beam,
            power=config.lenpen,
            max_ratio=config.max_len_a,
            max_extra=config.max_len_b,
            best=config.nbest,
            longest=config.max_length,
            keep_pieces=config.keep_bpe,
            scores=config.scores,
        )

    def __post_init__(self) -> None:
        if self.beam is not None and not 1 <= self.best <= self.beam:
            raise ConfigError(
                f"--nbest {self.best} with --beam {self.beam}: a beam gives 1 to {self.beam} translations"
            )
