"""Beam search over any model that decodes step by step: batched, cached, shrinking as sentences finish.

The loop is independent of scores: a rule (`headscope.model.decoding.beams`) selects the hypotheses, so fairseq's and
story-of-heads' searches differ in one class each. Greedy search is a beam of one.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from headscope.model.decoding.beams import BeamRule, FairseqBeams, Hypothesis, StoryBeams, length_limits
from headscope.model.decoding.config import RuleName, SearchConfig

RULES: dict[RuleName, type[BeamRule]] = {"fairseq": FairseqBeams, "story-of-heads": StoryBeams}


class DecodingState(Protocol):
    """The cache of a decoder, one row per hypothesis."""

    def select(self, order: Tensor, *, within: bool = False) -> None:
        """Reorder: row i becomes what was row order[i]; `within`: both are of the same sentence."""
        ...


S = TypeVar("S", bound=DecodingState)


class Decoder(Protocol[S]):
    """A model that search can drive (`headscope.model.native.transformer.Transformer` is one)."""

    def begin(self, source: Tensor, source_mask: Tensor | None = None) -> S:
        """Read source [b s]; the state has one row per sentence."""
        ...

    def step(self, ids: Tensor, state: S) -> Tensor:
        """Logits [n V] of the token after `ids` [n], the newest token of each row; search writes into them."""
        ...


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

    `start` is the decoder's first input, `pad` is never chosen. `lengths` [b] are the source lengths for the length
    limits: by default the number of real tokens, so that the result does not depend on the batch. Deviation:
    fairseq-generate takes the padded length, which matters for `max_ratio`.
    """
    b, s = source.shape
    if lengths is None:
        lengths = source.new_full((b,), s) if source_mask is None else source_mask.long().sum(dim=1)
    rule = RULES[config.rule](config, length_limits(config, lengths.to(source.device)), end=end)
    state = model.begin(source, source_mask)
    ids = source.new_full((b,), start)
    for step in range(int(rule.limits.maximum.max()) + 2):
        logits = model.step(ids, state)
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        normaliser = logits.logsumexp(dim=-1, keepdim=True)
        if pad is not None:
            logits[:, pad] = -torch.inf
        if unknown is not None and config.unknown_penalty:
            logits[:, unknown] -= config.unknown_penalty
        next_inputs = rule.advance(step, logits, normaliser)
        if next_inputs is None:
            break
        ids = next_inputs.ids
        state.select(next_inputs.order, within=next_inputs.within)
    return rule.results()
