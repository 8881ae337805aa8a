"""Refit a model after the removal of heads, and measure refits on held-out text and on a second text."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from headscope.attribution.objectives.base import OBJECTIVES, Objective
from headscope.attribution.objectives.predictions import LossObjective
from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus
from headscope.errors import flag
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.stored_weights import copy_sharing_weights, round_weights
from headscope.model.taps import masked
from headscope.pruning.closed_form.anchors import anchor_sources, cap_corpus, open_text, second_text, subwords
from headscope.pruning.closed_form.compensate import (
    CalibrationText,
    Candidate,
    Choice,
    Compensated,
    ModuleRefit,
    RefittedCopy,
    best_candidate,
    compensate,
    heads_by_module,
)
from headscope.pruning.closed_form.damage import DamageMeter, Divergence
from headscope.pruning.closed_form.moments import Moments, collect_moments
from headscope.pruning.closed_form.sequential import sequential_refits
from headscope.pruning.options.shared import AUTO, AUTO_DAMPING, DAMPING, OtherText, Refit, anchor_name

HALF_STRENGTH = 0.5
STRENGTHS = (1.0, HALF_STRENGTH, HALF_STRENGTH / 2)
"""The steps towards a refit that `auto` tries: the whole step may be too far on text of another kind."""
CHECK_SHARE, CHECK_LINES = 4, 24
"""The second text has a quarter of the calibration text's subwords, and no fewer lines than these."""
SHORT = 10_000
"""Subwords of a calibration text below which least squares with little damping can be worse than masking."""
SEARCH_SUBWORDS, SEARCH_LINES = 500, 8
"""Subwords of each text that a search measures on, and the fewest lines.

Lines stay whole, because heads that read far back show their worth in long lines alone. Without a quarter of SmolLM2's
groups packed text lost 0.20 nats a token, and 0.26 when lines were cut to 62 subwords.
"""
VECTOR_SUBWORDS = 1500
"""The same where one vector a line is compared, so that lines are the observations."""
TOP1 = "top1"
"""The objective on text of random subwords."""


@dataclass(eq=False)
class RefitBench:
    """Refits one checkpoint for several removals of heads, and measures each refit.

    `merged_copy` is the checkpoint with merged key/value groups, if these are merged instead of heads removed.
    `moments` caches moments of the intact model on the calibration text ("") and on anchor texts by name. Least squares
    without a damping get one that fits the length of the text. The last two removals are cached, because a search
    over sizes writes the one before the last.
    """

    checkpoint: Checkpoint
    text: CalibrationText
    options: Refit
    merged_copy: Checkpoint | None = None
    batching: BatchingOptions | None = None
    seed: int = 1
    moments: dict[str, Moments] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recent: dict[frozenset[HeadId], Compensated] = {}
        self.merged_model = None if self.merged_copy is None else self.merged_copy.model
        if self.options.method == "least-squares" and self.options.damping is None:
            is_short = subwords(self.checkpoint, self.text.calibration) < SHORT
            self.options = replace(self.options, damping=AUTO_DAMPING if is_short else DAMPING)

    def anchored_moments(self, anchor: OtherText) -> Moments:
        """Moments of the calibration text and of the anchor texts, with equal weight; each text is read once."""
        anchors = anchor_sources(self.checkpoint, self.text.calibration, anchor, seed=self.seed)
        texts = {"": lambda: self.text.calibration, **anchors}
        for name, text in texts.items():
            if name not in self.moments:
                self.moments[name] = collect_moments(self.checkpoint, text(), batching=self.batching)
        return replace(self.moments[""], further_moments=[self.moments[name] for name in texts if name])

    @cached_property
    def held_out(self) -> DamageMeter:
        """The meter of damage on held-out text."""
        return self._meter(self.text.held_out, self.options.objective)

    @property
    def compares(self) -> bool:
        """Whether the objective compares vectors with the intact model's."""
        return self.held_out.objective.compares

    @property
    def models_language(self) -> bool:
        """Whether the checkpoint is a decoder without an encoder."""
        return self.checkpoint.decodes and not self.checkpoint.two_sided

    @property
    def search_anchor(self) -> OtherText:
        """The default anchor of a search: mixed text, for language models none."""
        return self.options.anchor if self.options.anchor or self.models_language else ("mixed",)

    @cached_property
    def check(self) -> DamageMeter:
        """The meter of damage on the second text; on random subwords, of the model's own predictions."""
        corpus, is_predictable = second_text(self.checkpoint, self.text.calibration, self.options.check, seed=self.seed)
        positions = subwords(self.checkpoint, self.text.calibration) // CHECK_SHARE
        corpus = cap_corpus(self.checkpoint, corpus, positions=positions, fewest=CHECK_LINES)
        objective = self.options.objective if self.text.held_out.has_labels == corpus.has_labels else ""
        if not is_predictable:
            reason = OBJECTIVES.get(TOP1).applies(self.checkpoint, has_target=corpus.has_target, has_labels=False)
            objective = TOP1 if reason is None else ""
        return self._meter(corpus, objective)

    def search_meters(self) -> list[DamageMeter]:
        """Meters to measure many candidates by, on parts of the held-out text and of another one.

        The other is the second text, if it has the same objective; for language models, whose damage differs more
        between lines than between texts, it is the calibration text. Models that predict words are measured by the
        divergence of their predictions from the intact model's instead of the loss. Only divergences are computed with
        fast products: the same heads went, but in one of twelve cases (benchmarks/language-models). In cosines a head
        costs as little as the rounding.
        """
        objective, held_out = self.held_out.objective, self.text.held_out
        if self.models_language:
            corpora = [held_out, self.text.calibration]
        else:
            corpora = [held_out] + [self.check.corpus] * (self.check.objective.name == objective.name)
        if objective.name == LossObjective.name and self.checkpoint.predicts == "words":
            objective = Divergence(seed=self.seed)
        positions, fast = VECTOR_SUBWORDS if self.compares else SEARCH_SUBWORDS, isinstance(objective, Divergence)
        corpora = [cap_corpus(self.checkpoint, corpus, positions=positions, fewest=SEARCH_LINES) for corpus in corpora]
        return [self._meter(corpus, objective, fast=fast) for corpus in corpora]

    def _meter(self, corpus: Corpus, objective: str | Objective, *, fast: bool = False) -> DamageMeter:
        return DamageMeter(
            self.checkpoint, corpus, batching=self.batching, objective=objective, seed=self.seed, fast=fast
        )

    def compensation(self, heads: Sequence[HeadId]) -> Compensated:
        """Refit the output projections for the removal of `heads`, and measure the result."""
        key = frozenset(heads)
        if key not in self.recent:
            for oldest in list(self.recent)[:-1]:
                del self.recent[oldest]
            self.recent[key] = self._compensate(heads)
        return self.recent[key]

    def _compensate(self, heads: Sequence[HeadId]) -> Compensated:
        began = time.monotonic()
        performance, choice = {"intact": self.held_out.of_intact}, None
        if self.options.method == AUTO:
            choice, refits = self._choose(heads)
            options = choice.best.options
        else:
            options, refits = self.options, self.refits(heads, self.options)
        model, seconds = self.copy_with(refits).model, time.monotonic() - began
        if choice is None and options.method == "none":
            with masked(self.checkpoint.model, heads):
                performance["removed"] = self.held_out.measure(self.merged_model)
        else:
            if choice is None:
                candidate = Candidate(options, self.held_out.measure(model), self.check.measure(model))
                choice = self._choice([self._masked(heads), candidate], candidate)
            performance["removed"] = choice.masked.held_out
            if options.method != "none":
                performance["refitted"] = choice.best.held_out
        digest = ""
        if anchor_name(options.anchor) == "text":
            digest = open_text(options.anchor, like=self.text.calibration, name=flag.anchor).digest
        return Compensated(
            self.checkpoint.with_model(model), options, self.text, refits, performance, seconds, choice, digest
        )

    def refits(self, heads: Collection[HeadId], options: Refit) -> list[ModuleRefit]:
        """The refits of every module that changes: from moments of the intact model, or one module after another."""
        is_sequential, refits = options.sequential or self.merged_copy is not None, list[ModuleRefit]()
        if options.method != "none" and (is_sequential or options.feed_forward):
            at_once = [] if is_sequential else self.refits(heads, replace(options, feed_forward=False))
            refits += at_once
            if is_sequential or at_once:
                anchors = anchor_sources(self.checkpoint, self.text.calibration, options.anchor, seed=self.seed)
                refits += sequential_refits(
                    self.checkpoint,
                    self.text.calibration,
                    heads,
                    options,
                    at_once=at_once,
                    merged_copy=self.merged_copy,
                    batching=self.batching,
                    anchors=[text() for text in anchors.values()],
                )
        elif self.merged_copy is None:
            refits += compensate(self.checkpoint, self.anchored_moments(options.anchor), heads, options)
        return refits

    def copy_with(self, refits: Collection[ModuleRefit]) -> RefittedCopy:
        return RefittedCopy.of(self.merged_copy or self.checkpoint, refits)

    def _masked(self, heads: Sequence[HeadId]) -> Candidate:
        held_out, check = self.held_out, self.check  # they read the intact model, so before heads are masked
        with masked(self.checkpoint.model, heads):
            no_refit = Refit(method="none", add_bias=self.options.add_bias)
            return Candidate(no_refit, held_out.measure(self.merged_model), check.measure(self.merged_model))

    def _choice(self, candidates: Sequence[Candidate], candidate: Candidate) -> Choice:
        baseline_name = "masking" if self.merged_copy is None else "merging"
        return Choice(candidates, candidate, self.check.corpus.name, baseline_name)

    def _choose(self, heads: Sequence[HeadId]) -> tuple[Choice, list[ModuleRefit]]:
        """Choose the least harmful of masking and all tried refits.

        If the options say so, the best least squares are tried module after module too. Refits of feed-forward blocks
        are added if the damage falls on both texts.
        """
        masking, settings = self._masked(heads), self.options
        candidates, best, best_refits = [masking], masking, list[ModuleRefit]()

        def attempt(options: Refit, *, on_both: bool = False) -> None:
            nonlocal best, best_refits
            refits = self.refits(heads, options)
            model = self.copy_with(refits).model
            candidate = Candidate(options, self.held_out.measure(model), self.check.measure(model))
            candidates.append(candidate)
            is_better = best_candidate([best, candidate], masking) is candidate
            if on_both:
                pairs = ((candidate.held_out, best.held_out), (candidate.check, best.check))
                is_better = all(candidate_result.damage < earlier.damage for candidate_result, earlier in pairs)
            if is_better:
                best, best_refits = candidate, refits

        for options in self.refit_candidates(heads):
            attempt(options)
        if settings.sequential and heads:
            refits = [candidate for candidate in candidates if candidate.options.method == "least-squares"]
            attempt(replace(best_candidate(refits, masking).options, strength=1.0, sequential=True))
        if best.options.method == "least-squares" and (settings.feed_forward or self.compares):
            attempt(replace(best.options, feed_forward=True), on_both=True)
        return self._choice(candidates, best), best_refits or self.refits(heads, best.options)

    def refit_candidates(self, heads: Collection[HeadId]) -> list[Refit]:
        """The refits that `auto` compares with masking: the mean where there are biases for it, and least squares.

        Language models get half the step or less: the whole step was never better there.
        """
        settings, modules = self.options, heads_by_module(self.checkpoint, heads)
        can_shift = settings.add_bias or all(projection.has_bias for projection, removed in modules if removed)
        refit = replace(settings, method="least-squares", damping=settings.share, sequential=False, feed_forward=False)
        anchors: list[OtherText] = [("none",)]
        if anchor_name(self.search_anchor):
            anchors.append(self.search_anchor)
        strengths = STRENGTHS[self.models_language :] if settings.strength == 1 else (settings.strength,)
        return [
            *([Refit(method="mean", add_bias=settings.add_bias)] if can_shift else []),
            *(replace(refit, anchor=anchor, strength=strength) for anchor in anchors for strength in strengths),
        ]


def rounded_copy(checkpoint: Checkpoint) -> Checkpoint:
    """A copy of the checkpoint with weights rounded as its files would be."""
    rounded = checkpoint.with_model(copy_sharing_weights(checkpoint.model))
    round_weights(rounded.model, rounded.stored_dtype)
    return rounded
