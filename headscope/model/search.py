"""Beam search over any model that decodes step by step: batched, cached, shrinking as sentences finish.

The loop knows nothing of scores: a rule (`headscope.model.beams`) says which hypotheses go on, so fairseq's
and story-of-heads' searches differ in one class each. Greedy search is a beam of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from headscope.bounds import check_numbers
from headscope.errors import ConfigError
from headscope.model.beams import BeamRule, FairseqBeams, Hypothesis, Limits, StoryBeams

__all__ = ["Decoder", "DecodingState", "Hypothesis", "SearchConfig", "search"]

RuleName = Literal["fairseq", "story-of-heads"]
RULES: dict[str, type[BeamRule]] = {"fairseq": FairseqBeams, "story-of-heads": StoryBeams}


class DecodingState(Protocol):
    """What a decoder remembers of its hypotheses, one row each."""

    def select(self, order: Tensor, *, within: bool = False) -> None:
        """Row i goes on from what was row order[i]; `within` promises that both are of the same sentence."""
        ...


S = TypeVar("S", bound=DecodingState)


class Decoder(Protocol[S]):
    """A model that search can drive (`headscope.model.transformer.Transformer` is one)."""

    def begin(self, source: Tensor, source_mask: Tensor | None = None) -> S:
        """Read source [b s]; the state has one row per sentence."""
        ...

    def step(self, ids: Tensor, state: S) -> Tensor:
        """Logits [n V] of the token after `ids` [n], the newest token of each row; search writes into them."""
        ...


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How to search. Lengths count tokens, the closing one included.

    - `rule` "fairseq": score = Σ log p / length ** power, done when `beam` hypotheses have ended.
      "story-of-heads": score = Σ log p / (1 + length / 6) ** power; hypotheses whose score or whose Σ log p
      is more than `spread` below that of the best ended one are dropped, done when none is left.
    - a translation of n source tokens has at most `max_ratio` · n + `max_extra` tokens before the closing
      one (at most `limit`, the model's own), and at least `min_ratio` · n + `min_extra`.
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
        if self.rule not in RULES:
            raise ConfigError(f"unknown search rule {self.rule!r}; available: {', '.join(RULES)}")
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

    def limits(self, lengths: Tensor) -> Limits:
        """Bounds on the number of tokens for source lengths [b]."""
        most = (lengths * self.max_ratio + self.max_extra).long()
        least = (lengths * self.min_ratio).long() + self.min_extra
        if self.limit is not None:
            most = most.clamp_max(self.limit)
        return Limits(most.clamp_min(0), torch.minimum(least.clamp_min(0), most.clamp_min(0)))


@torch.no_grad()
def search(
    model: Decoder[S],
    source: Tensor,
    source_mask: Tensor | None = None,
    *,
    start: int,
    end: int,
    pad: int | None = None,
    unknown: int | None = None,
    config: SearchConfig,
    lengths: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """The best hypotheses of every sentence of source [b s], best first.

    `start` is the decoder's first input, `pad` is never chosen. `lengths` [b] are the source lengths that
    the length bounds see: by default the real tokens of each sentence, so that a batch gives what its
    sentences give alone (fairseq-generate itself takes the padded length, which matters for `max_ratio`).
    """
    b, s = source.shape
    if lengths is None:
        lengths = source.new_full((b,), s) if source_mask is None else source_mask.long().sum(dim=1)
    rule = RULES[config.rule](config, config.limits(lengths.to(source.device)), end=end)
    state = model.begin(source, source_mask)
    ids = source.new_full((b,), start)
    for step in range(int(rule.limits.most.max()) + 2):
        logits = model.step(ids, state)
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        normaliser = logits.logsumexp(dim=-1, keepdim=True)
        if pad is not None:
            logits[:, pad] = -torch.inf
        if unknown is not None and config.unknown_penalty:
            logits[:, unknown] -= config.unknown_penalty
        chosen = rule.advance(step, logits, normaliser)
        if chosen is None:
            break
        ids = chosen.ids
        state.select(chosen.order, within=chosen.within)
    return rule.results()
