"""Options of beam search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from headscope.bounds import check_numbers
from headscope.errors import ConfigError

RuleName = Literal["fairseq", "story-of-heads"]


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Options of beam search. Lengths count tokens, the end symbol included.

    - `rule` "fairseq": score = Σ log p / length ** power, done when `beam` hypotheses have ended.
      "story-of-heads": score = Σ log p / (1 + length / 6) ** power; hypotheses whose score or whose Σ log p
      is more than `spread` below that of the best finished one are dropped, done when none is left.
    - a translation of n source tokens has at most `max_ratio` · n + `max_extra` tokens before the end
      symbol (at most `limit`, the model's own), and at least `min_ratio` · n + `min_extra`.
    - `best` hypotheses are returned; `unknown_penalty` is subtracted from the unknown token's log p.
    """

    beam: int = 5
    best: int = 1
    rule: RuleName = "fairseq"
    power: float = 1.0
    max_ratio: float = 0.0
    max_extra: int = 200
    min_ratio: float = 0.0
    min_extra: int = 1
    limit: int | None = None
    spread: float | None = None
    unknown_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, dashes="")
        if self.rule not in get_args(RuleName):
            raise ConfigError(f"unknown search rule {self.rule!r}; available: {', '.join(get_args(RuleName))}")
        if self.beam < 1:
            raise ConfigError(f"beam is {self.beam}; it must be at least 1 (1 is greedy search)")
        if not 1 <= self.best <= self.beam:
            raise ConfigError(f"best is {self.best}; a beam of {self.beam} gives 1 to {self.beam} translations")

    @classmethod
    def story_of_heads(cls, *, beam: int = 4, best: int = 1, power: float = 0.6, spread: float = 3.0) -> SearchConfig:
        """The search of story-of-heads: at most 2n + 3 tokens, at least n // 4 - 1."""
        return cls(
            rule="story-of-heads",
            beam=beam,
            best=best,
            power=power,
            spread=spread,
            max_ratio=2.0,
            max_extra=3,
            min_ratio=0.25,
            min_extra=-1,
        )
