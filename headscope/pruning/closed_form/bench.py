"""Compensation of a removal: refits, and what each does to held-out and to other text."""

from __future__ import annotations

import copy
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
from headscope.model.stored_weights import round_weights
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

HALF = 0.5
STRENGTHS = (1.0, HALF, HALF / 2)
"""How far `auto` goes to a refit: on text of another kind the whole way may be too far."""
CHECK_SHARE, CHECK_LINES = 4, 24
"""The second text is read up to one of so many parts of the calibration text's subwords, but so many lines at least."""
SHORT = 10_000
"""Subwords of a calibration text below which least squares with little damping can be worse than masking."""
SEARCH_SUBWORDS, SEARCH_LINES = 500, 8
"""Subwords of each text that a search measures on, and lines at least."""
TOP1 = "top1"
"""The objective that a text without any sense is measured by."""


@dataclass(eq=False)
class RefitBench:
    """Compensates removals from one checkpoint, each measured; what does not depend on the heads is made once.

    `merged_copy` is the checkpoint with merged key/value groups, where no heads go. `moments` are those of the intact
    model, of the calibration text ("") and of others by name. Least squares without a damping get the one that fits the
    length of the text. The last two removals are remembered: of sizes the one that passed is written.
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
        """Moments of the calibration text and of those beside it, all with the same weight; each is read once."""
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
        """The meter of damage on the second text, and that text; on random subwords own predictions count."""
        corpus, foretold = second_text(self.checkpoint, self.text.calibration, self.options.check, seed=self.seed)
        positions = subwords(self.checkpoint, self.text.calibration) // CHECK_SHARE
        corpus = cap_corpus(self.checkpoint, corpus, positions=positions, fewest=CHECK_LINES)
        objective = self.options.objective if self.text.held_out.has_labels == corpus.has_labels else ""
        if not foretold:
            own = OBJECTIVES.get(TOP1).applies(self.checkpoint, has_target=corpus.has_target, has_labels=False)
            objective = TOP1 if own is None else ""
        return self._meter(corpus, objective)

    def search_meters(self) -> list[DamageMeter]:
        """Meters of parts of two texts, to measure many candidates by; of one if they have two objectives.

        They are what is held out and the second text; for language models, whose damage differs more from line to line
        than from text to text, the calibration text instead. Of words that are predicted it is measured how far
        predictions are from the intact model's, not their loss.
        """
        objective, held_out = self.held_out.objective, self.text.held_out
        if self.models_language:
            corpora = [held_out, self.text.calibration]
        else:
            corpora = [held_out] + [self.check.corpus] * (self.check.objective.name == objective.name)
        if objective.name == LossObjective.name and self.checkpoint.predicts == "words":
            objective = Divergence(seed=self.seed)
        return [
            self._meter(cap_corpus(self.checkpoint, corpus, positions=SEARCH_SUBWORDS, fewest=SEARCH_LINES), objective)
            for corpus in corpora
        ]

    def _meter(self, corpus: Corpus, objective: str | Objective) -> DamageMeter:
        return DamageMeter(self.checkpoint, corpus, batching=self.batching, objective=objective, seed=self.seed)

    def compensation(self, heads: Sequence[HeadId]) -> Compensated:
        """Refit the output projections for the removal of `heads`, and measure what that does."""
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
        own = anchor_name(options.anchor) == "text"
        digest = open_text(options.anchor, like=self.text.calibration, name=flag.anchor).digest if own else ""
        return Compensated(
            self.checkpoint.with_model(model), options, self.text, refits, performance, seconds, choice, digest
        )

    def refits(self, heads: Collection[HeadId], options: Refit) -> list[ModuleRefit]:
        """The refits of every module that changes."""
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
        held_out, check = self.held_out, self.check  # of the intact model, so made before heads are masked
        with masked(self.checkpoint.model, heads):
            nothing = Refit(method="none", add_bias=self.options.add_bias)
            return Candidate(nothing, held_out.measure(self.merged_model), check.measure(self.merged_model))

    def _choice(self, candidates: Sequence[Candidate], candidate: Candidate) -> Choice:
        baseline_name = "masking" if self.merged_copy is None else "merging"
        return Choice(candidates, candidate, self.check.corpus.name, baseline_name)

    def _choose(self, heads: Sequence[HeadId]) -> tuple[Choice, list[ModuleRefit]]:
        """The least harmful of masking and all tried refits.

        Asked for, the best is also refitted module after module. Feed-forward blocks follow where both texts gain.
        """
        nothing, settings = self._masked(heads), self.options
        candidates, best, best_refits = [nothing], nothing, list[ModuleRefit]()

        def attempt(options: Refit, *, on_both: bool = False) -> None:
            nonlocal best, best_refits
            refits = self.refits(heads, options)
            model = self.copy_with(refits).model
            candidate = Candidate(options, self.held_out.measure(model), self.check.measure(model))
            candidates.append(candidate)
            is_better = best_candidate([best, candidate], nothing) is candidate
            if on_both:
                pairs = ((candidate.held_out, best.held_out), (candidate.check, best.check))
                is_better = all(own.damage < earlier.damage for own, earlier in pairs)
            if is_better:
                best, best_refits = candidate, refits

        for options in self.refit_candidates(heads):
            attempt(options)
        if settings.sequential and heads:
            refits = [candidate for candidate in candidates if candidate.options.method == "least-squares"]
            attempt(replace(best_candidate(refits, nothing).options, strength=1.0, sequential=True))
        if best.options.method == "least-squares" and (settings.feed_forward or self.compares):
            attempt(replace(best.options, feed_forward=True), on_both=True)
        return self._choice(candidates, best), best_refits or self.refits(heads, best.options)

    def refit_candidates(self, heads: Collection[HeadId]) -> list[Refit]:
        """The refits that `auto` compares with masking: the mean where biases can hold it, and least squares.

        For language models half the way or less: the whole was never better there than half.
        """
        settings, modules = self.options, heads_by_module(self.checkpoint, heads)
        can_shift = settings.add_bias or all(projection.has_bias for projection, heads_gone in modules if heads_gone)
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
    """The checkpoint with weights of its own, rounded as its files would be."""
    copy_rounded = checkpoint.with_model(copy.deepcopy(checkpoint.model))
    round_weights(copy_rounded.model, copy_rounded.stored_dtype)
    return copy_rounded
