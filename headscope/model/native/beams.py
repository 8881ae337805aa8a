"""Which hypotheses a beam search keeps, finishes and drops: the rules of fairseq and of story-of-heads.

Axes beyond the usual legend: `b` sentences still running, `r` rows a sentence has (1 before the first
step, then the beam), `c` candidates, `n` = b · r rows of the decoder. Every step is computed on whole tensors;
only finished hypotheses are handled one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol, TypeVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from headscope.config.option import BEAM, POWER, RATIO, STEPS, check_fields
from headscope.errors import ConfigError, NumericalError
from headscope.model.attention import precise

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


@dataclass(frozen=True)
class Hypothesis:
    """A translation: ids including the end symbol (where it was reached), its score, Σ log p, log p of each id."""

    ids: tuple[int, ...]
    score: float
    log_p: float
    token_log_p: tuple[float, ...]


class Limits(NamedTuple):
    """Largest and smallest number of tokens before the end symbol, per sentence [b]."""

    maximum: Tensor
    minimum: Tensor

    def keep(self, rows: Tensor) -> Limits:
        """The limits of some of the sentences, `rows` [n]."""
        return Limits(self.maximum[rows], self.minimum[rows])


def length_limits(config: SearchConfig, lengths: Tensor) -> Limits:
    """Bounds on the number of tokens of a translation, for source lengths [b]."""
    maximum = (lengths * config.max_ratio + config.max_extra).long()
    minimum = (lengths * config.min_ratio).long() + config.min_extra
    if config.limit is not None:
        maximum = maximum.clamp_max(config.limit)
    return Limits(maximum.clamp_min(0), torch.minimum(minimum.clamp_min(0), maximum.clamp_min(0)))


class NextInputs(NamedTuple):
    """The next decoder inputs [n], and the earlier row [n] that each extends, of the `same_sentence` or not."""

    ids: Tensor
    order: Tensor
    same_sentence: bool


class Candidates(NamedTuple):
    """The most probable continuations of each sentence, best first: Σ log p, row and id, all [b c]."""

    log_p: Tensor
    row: Tensor
    ids: Tensor


class BeamRule(ABC):
    """Selects hypotheses after every step of the search; holds those of the sentences that are not finished."""

    def __init__(self, config: SearchConfig, limits: Limits, *, end: int) -> None:
        self.config, self.limits, self.end = config, limits, end
        sentences = len(limits.maximum)
        self.ended: list[list[Hypothesis]] = [[] for _ in range(sentences)]
        self.running = torch.arange(sentences, device=limits.maximum.device)  # [b] numbers of the sentences
        self.log_p = torch.zeros(sentences, 1, device=limits.maximum.device)  # [b r]
        self.tokens = torch.zeros(sentences, 0, dtype=torch.long, device=limits.maximum.device)  # [n step]
        self.history = torch.zeros(sentences, 0, device=limits.maximum.device)  # [n step] Σ log p so far
        self.horizon = int(limits.maximum.min())
        self.shortest = int(limits.minimum.max())

    @abstractmethod
    def advance(self, step: int, logits: Tensor, normaliser: Tensor) -> NextInputs | None:
        """Extend hypotheses by one id, given logits [n V]; None when all sentences are finished.

        log p = logits - normaliser [n 1]; logits of forbidden ids are -inf.
        """

    @abstractmethod
    def results(self) -> list[list[Hypothesis]]:
        """The best hypotheses of every sentence, best first."""

    def candidates(self, logits: Tensor, normaliser: Tensor, count: int) -> Candidates:
        """The `count` most probable continuations of each sentence, padded with log p = -inf where fewer exist.

        No row can have more than `count` of them, so the top of each row is taken first, on unnormalised logits.
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

    def extend(self, candidates: Candidates, keep: Tensor | None) -> NextInputs:
        """Make `candidates` [b r] the hypotheses; `keep` are the sentences that continue, None for all."""
        b, before = self.log_p.shape
        order = candidates.row + torch.arange(b, device=candidates.row.device)[:, None] * before
        if keep is not None:
            order = order[keep]
            candidates = Candidates(*(tensor[keep] for tensor in candidates))
            self.running, self.limits = self.running[keep], self.limits.keep(keep)
            self.horizon = int(self.limits.maximum.min())
        flat, ids = order.flatten(), candidates.ids.flatten()
        self.log_p = candidates.log_p
        self.tokens = torch.cat([self.tokens.index_select(0, flat), ids[:, None]], dim=1)
        self.history = torch.cat([self.history.index_select(0, flat), self.log_p.flatten()[:, None]], dim=1)
        return NextInputs(ids, flat, keep is None and before == order.shape[1])

    def hypotheses(self, is_selected: Tensor, candidates: Candidates, scores: Tensor) -> list[tuple[int, Hypothesis]]:
        """Hypotheses of the candidates [b c] selected by `is_selected` [b c], each with the row of its sentence."""
        sentence, column = is_selected.nonzero(as_tuple=True)
        row = sentence * self.log_p.shape[1] + candidates.row[sentence, column]
        last = candidates.ids[sentence, column][:, None]
        log_p = candidates.log_p[sentence, column]
        ids = torch.cat([self.tokens[row], last], dim=1).tolist()
        sums = torch.cat([torch.zeros_like(log_p)[:, None], self.history[row], log_p[:, None]], dim=1)
        hypotheses = zip(
            sentence.tolist(), ids, scores[sentence, column].tolist(), log_p.tolist(), sums.diff().tolist(), strict=True
        )
        return [(n, Hypothesis(tuple(i), score, total, tuple(parts))) for n, i, score, total, parts in hypotheses]


class FairseqBeams(BeamRule):
    """The search of fairseq-generate.

    Of the 2 · beam most probable continuations, those that end and are among the first `beam` are finished, and the
    first `beam` that do not end continue. A sentence is finished with `beam` finished hypotheses, or at its length
    limit, where every hypothesis must end.
    """

    def advance(self, step: int, logits: Tensor, normaliser: Tensor) -> NextInputs | None:
        beam = self.config.beam
        self._bound(step, logits)
        candidates = self.candidates(logits, normaliser, 2 * beam)
        ends = (candidates.ids == self.end) & (candidates.log_p > -torch.inf)
        first = ends[:, :beam]
        keep = None
        if bool(first.any()):
            self._finish(step, first, candidates)
            is_done = [len(self.ended[n]) >= beam for n in self.running.tolist()]
            if any(is_done):
                keep = torch.tensor(is_done, device=ends.device).logical_not().nonzero()[:, 0]
        if step >= self.horizon:
            at_limit = step >= self.limits.maximum
            keep = (~at_limit).nonzero()[:, 0] if keep is None else keep[~at_limit[keep]]
        if keep is not None and not len(keep):
            return None
        # stable: candidates that do not end, in their order, come before those that do
        going = ends.to(torch.uint8).argsort(dim=1, stable=True)[:, :beam]
        return self.extend(Candidates(*(tensor.gather(1, going) for tensor in candidates)), keep)

    def results(self) -> list[list[Hypothesis]]:
        return [sorted(hypotheses, key=lambda h: -h.score)[: self.config.best] for hypotheses in self.ended]

    def _bound(self, step: int, logits: Tensor) -> None:
        r = self.log_p.shape[1]
        if step >= self.horizon:
            rows = (step >= self.limits.maximum).repeat_interleave(r)
            ends = logits[rows, self.end]
            logits[rows] = -torch.inf
            logits[rows, self.end] = ends
        if step < self.shortest:
            early = (step < self.limits.minimum).repeat_interleave(r)
            logits[:, self.end] = logits[:, self.end].masked_fill(early, -torch.inf)

    def _finish(self, step: int, ends: Tensor, candidates: Candidates) -> None:
        first = Candidates(*(tensor[:, : self.config.beam] for tensor in candidates))
        running = self.running.tolist()
        for row, hypothesis in self.hypotheses(ends, first, first.log_p / (step + 1) ** self.config.power):
            hypotheses = self.ended[running[row]]
            if len(hypotheses) < self.config.beam:
                hypotheses.append(hypothesis)


class StoryBeams(BeamRule):
    """The search of story-of-heads.

    The `beam` most probable continuations are kept; one that ends is not extended, and is a result unless it is too
    short. A hypothesis is dropped when its score, or its Σ log p, is more than `spread` below that of the
    best finished one. Where none is finished at the length limit, the unfinished ones are results; they may
    still be extended by one token.
    """

    def __init__(self, config: SearchConfig, limits: Limits, *, end: int) -> None:
        super().__init__(config, limits, end=end)
        self.best_score = self.best_log_p = torch.empty(0)
        self.empty = torch.ones_like(self.running, dtype=torch.bool)  # no best yet, or one without words

    def advance(self, step: int, logits: Tensor, normaliser: Tensor) -> NextInputs | None:
        length = step + 1
        if step == 0:
            self.best_score = logits.new_full((len(logits),), -torch.inf)
            self.best_log_p = self.best_score.clone()
        candidates = self.candidates(logits, normaliser, self.config.beam)
        scores = candidates.log_p / (1 + length / 6) ** self.config.power
        possible = candidates.log_p > -torch.inf
        ends = candidates.ids == self.end
        is_counted = ends & possible & (length >= self.limits.minimum)[:, None]
        is_counted |= possible & (self.empty & (length == self.limits.maximum))[:, None]
        if bool(is_counted.any()):
            self._update(is_counted, candidates, scores)
        going = possible & ~ends & (length <= self.limits.maximum)[:, None]
        if self.config.spread is not None:
            going &= scores + self.config.spread >= self.best_score[:, None]
            going &= candidates.log_p + self.config.spread >= self.best_log_p[:, None]
        is_unfinished = going.any(dim=1)
        if not bool(is_unfinished.any()):
            return None
        keep = None if bool(is_unfinished.all()) else is_unfinished.nonzero()[:, 0]
        if keep is not None:
            self.best_score, self.best_log_p, self.empty = (
                tensor[keep] for tensor in (self.best_score, self.best_log_p, self.empty)
            )
        return self.extend(candidates._replace(log_p=candidates.log_p.masked_fill(~going, -torch.inf)), keep)

    def results(self) -> list[list[Hypothesis]]:
        return [sorted(hypotheses, key=lambda h: -h.score)[: self.config.best] for hypotheses in self.ended]

    def _update(self, is_counted: Tensor, candidates: Candidates, scores: Tensor) -> None:
        running = self.running.tolist()
        for row, hypothesis in self.hypotheses(is_counted, candidates, scores):
            self.ended[running[row]].append(hypothesis)
            if hypothesis.score > float(self.best_score[row]):
                self.best_score[row], self.best_log_p[row] = hypothesis.score, hypothesis.log_p
                self.empty[row] = all(number == self.end for number in hypothesis.ids)


RULES: dict[RuleName, type[BeamRule]] = {"fairseq": FairseqBeams, "story-of-heads": StoryBeams}


class DecodingState(Protocol):
    """The cache of a decoder, one row per hypothesis."""

    def select(self, order: Tensor, *, same_sentence: bool = False) -> None:
        """Reorder: row i becomes what was row order[i]; `same_sentence`: both are of the same sentence."""
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
    begin: Sequence[int] = (),
    end: int,
    pad: int | None = None,
    unknown: int | None = None,
    config: SearchConfig,
    lengths: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """The best hypotheses of every sentence of source [b s], best first.

    `start` is the decoder's first input, `begin` what it is made to write first, which counts in scores and lengths as
    fairseq's prefixes do; `pad` is never chosen. `lengths` [b] are the source lengths for the length
    limits: by default the number of real tokens, so that the result does not depend on the batch. Deviation:
    fairseq-generate takes the padded length, which matters for `max_ratio`.
    """
    b, s = source.shape
    if lengths is None:
        lengths = source.new_full((b,), s) if source_mask is None else source_mask.long().sum(dim=1)
    limits = length_limits(config, lengths.to(source.device))
    limits = limits._replace(maximum=limits.maximum.clamp_min(len(begin)))
    rule = RULES[config.rule](config, limits, end=end)
    state = model.begin(source, source_mask)
    ids = source.new_full((b,), start)
    for step in range(int(rule.limits.maximum.max()) + 2):
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
    return rule.results()
