"""Beam search by the rules of fairseq and story-of-heads, which differ in how they keep and finish hypotheses.

Axes beyond the usual legend: `b` unfinished sentences, `r` rows of a sentence (1 before the first step, then the beam),
`c` candidates, `n` = b · r rows of the decoder. Every step is computed on whole tensors; only finished hypotheses are
handled one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Le
from torch import Tensor

from headscope.config.option import BEAM, POWER, RATIO, STEPS, check_fields
from headscope.errors import ConfigError, NumericalError
from headscope.model.attention import precise
from headscope.model.native.transformer import Transformer

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

    beam: Annotated[int, Ge(1), Le(BEAM)] = 5
    best: Annotated[int, Ge(1)] = 1
    rule: RuleName = "fairseq"
    power: Annotated[float, Ge(-POWER), Le(POWER)] = 1.0
    max_ratio: Annotated[float, Ge(-RATIO), Le(RATIO)] = 0.0
    max_extra: Annotated[int, Ge(-STEPS), Le(STEPS)] = 200
    min_ratio: float = 0.0
    min_extra: int = 1
    limit: int | None = None
    spread: float | None = None
    unknown_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.best > self.beam:
            raise ConfigError(f"best is {self.best}; a beam of {self.beam} gives 1 to {self.beam} translations")


STORY_SEARCH = SearchConfig(
    rule="story-of-heads", beam=4, power=0.6, spread=3.0, max_ratio=2.0, max_extra=3, min_ratio=0.25, min_extra=-1
)
"""The search of story-of-heads: at most 2n + 3 tokens, at least n // 4 - 1."""


@dataclass(frozen=True)
class Hypothesis:
    """A translation: ids including the end symbol (where it was reached), and its score."""

    ids: tuple[int, ...]
    score: float


class NextInputs(NamedTuple):
    """The next decoder inputs [n], and the earlier row [n] that each extends; `same_sentence`: of its own sentence."""

    ids: Tensor
    order: Tensor
    same_sentence: bool


class Candidates(NamedTuple):
    """The most probable continuations of each sentence, best first: Σ log p, row and id, all [b c]."""

    log_p: Tensor
    row: Tensor
    ids: Tensor


class BeamRule(ABC):
    """Selects hypotheses after every step of the search, and keeps those of unfinished sentences.

    `longest` and `shortest` [b] bound the number of tokens before the end symbol. `by_sentence` names the attributes
    with a row for each sentence.
    """

    by_sentence: ClassVar[tuple[str, ...]] = ("running", "longest", "shortest")

    def __init__(self, config: SearchConfig, longest: Tensor, shortest: Tensor, *, end: int) -> None:
        self.config, self.longest, self.shortest, self.end = config, longest, shortest, end
        sentences, device = len(longest), longest.device
        self.complete: list[list[Hypothesis]] = [[] for _ in range(sentences)]
        self.running = torch.arange(sentences, device=device)  # [b] numbers of the sentences
        self.log_p = torch.zeros(sentences, 1, device=device)  # [b r]
        self.tokens = torch.zeros(sentences, 0, dtype=torch.long, device=device)  # [n step]

    @abstractmethod
    def advance(self, step: int, logits: Tensor, normaliser: Tensor) -> NextInputs | None:
        """Extend hypotheses by one id, given logits [n V]. Returns None if all sentences are finished.

        log p = logits - normaliser [n 1]; logits of forbidden ids are -inf.
        """

    def candidates(self, logits: Tensor, normaliser: Tensor, count: int) -> Candidates:
        """The `count` most probable continuations of each sentence, padded with log p = -inf if there are fewer.

        First the top `count` of each row are taken, on unnormalised logits, since no more can be among the result.
        """
        b, r = self.log_p.shape
        best, ids = logits.topk(min(count, logits.shape[1]), dim=-1)  # [n c]
        log_p = (best - normaliser).view(b, r, -1) + self.log_p[..., None]
        if bool(best.isnan().any()):  # NaN counts as the largest number
            raise NumericalError("the logits are no numbers")
        best_log_p, positions = log_p.view(b, -1).topk(min(count, log_p.shape[1] * log_p.shape[2]), dim=-1)
        rows = positions.div(best.shape[1], rounding_mode="floor")
        best_ids = ids.view(b, -1).gather(1, positions)
        missing = count - best_log_p.shape[1]
        if missing:
            best_log_p = torch.nn.functional.pad(best_log_p, (0, missing), value=-torch.inf)
            rows, best_ids = (torch.nn.functional.pad(indices, (0, missing)) for indices in (rows, best_ids))
        return Candidates(best_log_p, rows, best_ids)

    def extend(self, candidates: Candidates, goes_on: Tensor | None) -> NextInputs | None:
        """Make `candidates` [b r] the hypotheses of sentences that continue [b] (None: all). Returns None if none."""
        b, before = self.log_p.shape
        order = candidates.row + torch.arange(b, device=candidates.row.device)[:, None] * before
        is_whole = goes_on is None or bool(goes_on.all())
        if goes_on is not None and not is_whole:
            self.keep(keep := goes_on.nonzero()[:, 0])
            order, candidates = order[keep], Candidates(*(tensor[keep] for tensor in candidates))
        if not len(order):
            return None
        flat, ids = order.flatten(), candidates.ids.flatten()
        self.log_p = candidates.log_p
        self.tokens = torch.cat([self.tokens.index_select(0, flat), ids[:, None]], dim=1)
        return NextInputs(ids, flat, is_whole and before == order.shape[1])

    def keep(self, rows: Tensor) -> None:
        """Drop all sentences but those at `rows` [n]."""
        for name in self.by_sentence:
            setattr(self, name, getattr(self, name)[rows])

    def finish(
        self, is_selected: Tensor, candidates: Candidates, scores: Tensor, *, max_count: int | None = None
    ) -> None:
        """Finish the selected candidates [b c] as hypotheses of their sentences, at most `max_count` for each."""
        sentence, column = is_selected.nonzero(as_tuple=True)
        row = sentence * self.log_p.shape[1] + candidates.row[sentence, column]
        ids = torch.cat([self.tokens[row], candidates.ids[sentence, column][:, None]], dim=1).tolist()
        selected_scores = scores[sentence, column].tolist()
        for number, token_ids, score in zip(self.running[sentence].tolist(), ids, selected_scores, strict=True):
            if max_count is None or len(self.complete[number]) < max_count:
                self.complete[number].append(Hypothesis(tuple(token_ids), score))


class FairseqBeams(BeamRule):
    """The search of fairseq-generate.

    Of the 2 · beam most probable continuations, those that end and are among the first `beam` are finished, and the
    first `beam` that do not end continue. A sentence is finished with `beam` finished hypotheses, or at its length
    limit, where every hypothesis must end.
    """

    def __init__(self, config: SearchConfig, longest: Tensor, shortest: Tensor, *, end: int) -> None:
        super().__init__(config, longest, shortest, end=end)
        self.first_limit, self.last_minimum = int(longest.min()), int(shortest.max())

    def advance(self, step: int, logits: Tensor, normaliser: Tensor) -> NextInputs | None:
        beam = self.config.beam
        self._bound(step, logits)
        candidates = self.candidates(logits, normaliser, 2 * beam)
        ends = (candidates.ids == self.end) & (candidates.log_p > -torch.inf)
        first, goes_on = ends[:, :beam], None
        if bool(first.any()):
            self.finish(first, candidates, candidates.log_p / (step + 1) ** self.config.power, max_count=beam)
            goes_on = torch.tensor([len(self.complete[n]) < beam for n in self.running.tolist()], device=ends.device)
        if step >= self.first_limit:
            goes_on = (step < self.longest) & (True if goes_on is None else goes_on)
        # a stable sort puts candidates that do not end first, in their order
        going = ends.to(torch.uint8).argsort(dim=1, stable=True)[:, :beam]
        return self.extend(Candidates(*(tensor.gather(1, going) for tensor in candidates)), goes_on)

    def _bound(self, step: int, logits: Tensor) -> None:
        r = self.log_p.shape[1]
        if step >= self.first_limit:
            rows = (step >= self.longest).repeat_interleave(r)
            ends = logits[rows, self.end]
            logits[rows] = -torch.inf
            logits[rows, self.end] = ends
        if step < self.last_minimum:
            early = (step < self.shortest).repeat_interleave(r)
            logits[:, self.end] = logits[:, self.end].masked_fill(early, -torch.inf)


class StoryBeams(BeamRule):
    """The search of story-of-heads.

    The `beam` most probable continuations are kept; one that ends is not extended, and is a result unless it is too
    short. A hypothesis is dropped when its score, or its Σ log p, is more than `spread` below that of the
    best finished one. Where none is finished at the length limit, the unfinished ones are results; they may
    still be extended by one token.
    """

    by_sentence = (*BeamRule.by_sentence, "best_score", "best_log_p", "empty")

    def advance(self, step: int, logits: Tensor, normaliser: Tensor) -> NextInputs | None:
        length = step + 1
        if step == 0:
            self.best_score = self.best_log_p = logits.new_full((len(logits),), -torch.inf)
            self.empty = torch.ones_like(self.running, dtype=torch.bool)  # there is no best one yet, or it has no words
        candidates = self.candidates(logits, normaliser, self.config.beam)
        scores = candidates.log_p / (1 + length / 6) ** self.config.power
        possible = candidates.log_p > -torch.inf
        ends = candidates.ids == self.end
        is_counted = ends & possible & (length >= self.shortest)[:, None]
        is_counted |= possible & (self.empty & (length == self.longest))[:, None]
        if bool(is_counted.any()):
            self.finish(is_counted, candidates, scores)
            best_score, column = scores.masked_fill(~is_counted, -torch.inf).max(dim=1, keepdim=True)
            better = best_score[:, 0] > self.best_score
            self.best_score = best_score[:, 0].where(better, self.best_score)
            self.best_log_p = candidates.log_p.gather(1, column)[:, 0].where(better, self.best_log_p)
            self.empty = (ends.gather(1, column)[:, 0] & (step == 0)).where(better, self.empty)
        going = possible & ~ends & (length <= self.longest)[:, None]
        if self.config.spread is not None:
            going &= scores + self.config.spread >= self.best_score[:, None]
            going &= candidates.log_p + self.config.spread >= self.best_log_p[:, None]
        continuing = candidates._replace(log_p=candidates.log_p.masked_fill(~going, -torch.inf))
        return self.extend(continuing, going.any(dim=1))


RULES: dict[RuleName, type[BeamRule]] = {"fairseq": FairseqBeams, "story-of-heads": StoryBeams}


@torch.no_grad()
def search(
    model: Transformer,
    source: Tensor,
    source_mask: Tensor | None = None,
    *,
    start: int,
    begin: Sequence[int] = (),
    end: int,
    pad: int | None = None,
    unknown: int | None = None,
    config: SearchConfig,
) -> list[list[Hypothesis]]:
    """The best hypotheses of every sentence of source [b s], best first.

    `start` is the decoder's first input, `begin` are ids that it is forced to write first, which count in scores and
    lengths like fairseq's prefixes; `pad` is never chosen. Deviation: bounds of lengths depend on the number of real
    source tokens, so that results do not depend on the batch; fairseq-generate takes the padded length.
    """
    b, s = source.shape
    lengths = source.new_full((b,), s) if source_mask is None else source_mask.long().sum(dim=1)
    longest = (lengths * config.max_ratio + config.max_extra).long().clamp_min(0)
    longest = longest if config.limit is None else longest.clamp_max(max(config.limit, 0))
    shortest = ((lengths * config.min_ratio).long() + config.min_extra).clamp_min(0).minimum(longest)
    longest = longest.clamp_min(len(begin))
    rule = RULES[config.rule](config, longest, shortest, end=end)
    state, steps = model.begin(source, source_mask), int(longest.max()) + 2
    ids = source.new_full((b,), start)
    for step in range(steps):
        logits = precise(model.step(ids, state))
        normaliser = logits.logsumexp(dim=-1, keepdim=True)
        if pad is not None:
            logits[:, pad] = -torch.inf
        if step < len(begin):
            logits[:, : begin[step]] = logits[:, begin[step] + 1 :] = -torch.inf
        if unknown is not None and config.unknown_penalty:
            logits[:, unknown] -= config.unknown_penalty
        next_inputs = rule.advance(step, logits, normaliser)
        if next_inputs is None:
            break
        ids = next_inputs.ids
        state.select(next_inputs.order, same_sentence=next_inputs.same_sentence)
    return [sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[: config.best] for hypotheses in rule.complete]
