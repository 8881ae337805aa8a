"""Compensation of a removal: what is refitted, on which texts, and what a refit does on held-out and on other text."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.stored_weights import round_weights
from headscope.model.taps import masked
from headscope.pruning.closed_form.anchors import anchor_texts, beside, capped, opened, second_text, subwords
from headscope.pruning.closed_form.calibration import CalibrationText, Candidate, Choice, Compensated, least_harm
from headscope.pruning.closed_form.compensate import (
    ModuleRefit,
    RefittedCopy,
    compensate,
    heads_by_module,
)
from headscope.pruning.closed_form.damage import DamageMeter, StagedMeter
from headscope.pruning.closed_form.moments import Mixture, ModuleMoments, Moments, collect_moments
from headscope.pruning.closed_form.sequential import sequential_refits
from headscope.pruning.options.refit import AUTO, DAMPING, OtherText, Refit, RefitOptions, anchor_name

TRIED_ANCHORS: tuple[OtherText, ...] = ("none", "mixed", "general")
TRIED_DAMPINGS = (DAMPING, 0.1)
"""What `auto` tries of least squares, where it is not given; "general", the last, where a sample ships."""
TRIED_IN_TURN: OtherText = "noised"
"""Tried too where modules are refitted one after the other: six readings more are few then."""


HALF = 0.5
"""The strength that `auto` tries of the best refit too: on text of another kind the whole way may be too far."""
FINALISTS = 2
"""Candidates of `auto` that are compared with masking on all lines, the best on a few lines of both texts."""
CHECK_SHARE, CHECKED = 4, 24
"""The second text is read up to one of so many parts of the calibration text's subwords, but so many lines at least."""
PREDICTED = "top1"
"""The objective that a text without any sense is measured by."""
REFITTED = ("method", "damping", "anchor", "sequential", "feed_forward", "strength")
"""The options of a calibration that say how modules are refitted."""


class AnchoredMoments:
    """Moments of a calibration text, and of those that stand beside it; each is found and read once, when needed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        corpus: Corpus,
        *,
        batching: BatchingOptions | None = None,
        seed: int = 1,
        moments: Moments | None = None,
    ) -> None:
        self.checkpoint, self.corpus, self.batching, self.seed = checkpoint, corpus, batching, seed
        self._made: dict[str, Moments] = {} if moments is None else {"": moments}
        self._texts: dict[str, dict[str, Callable[[], Corpus]]] = {}

    def texts(self, anchor: OtherText) -> dict[str, Callable[[], Corpus]]:
        """`anchor_texts` of the calibration text, which looks at a sample and at what the model can read of it."""
        name = anchor_name(anchor)
        if name not in self._texts:
            self._texts[name] = anchor_texts(self.checkpoint, self.corpus, anchor, seed=self.seed)
        return self._texts[name]

    def of(self, anchor: OtherText = "") -> ModuleMoments:
        """The moments of the text with an anchor, all parts with the same weight."""
        texts = self.texts(anchor)
        for name, text in {"": lambda: self.corpus, **texts}.items():
            if name not in self._made:
                self._made[name] = collect_moments(self.checkpoint, text(), batching=self.batching)
        return Mixture([(self._made[name], 1 / (1 + len(texts))) for name in ("", *texts)])


class RefitBench:
    """Compensates removals from one checkpoint, each measured; what does not depend on the heads is made once.

    `altered` is what the checkpoint becomes where no heads go and its key/value groups are merged: its modules are
    refitted one after the other. `moments` are those of the intact model on the calibration text, where they are known.
    The last two removals are remembered: of sizes the one that passed, when the next does not, is what is written.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        text: CalibrationText,
        options: Refit,
        *,
        altered: Checkpoint | None = None,
        add_bias: bool = False,
        batching: BatchingOptions | None = None,
        seed: int = 1,
        moments: Moments | None = None,
    ) -> None:
        self.checkpoint, self.text, self.options, self.altered = checkpoint, text, options, altered
        self.add_bias, self.batching, self.seed = add_bias, batching, seed
        self.made: dict[frozenset[HeadId], Compensated] = {}
        self.moments = AnchoredMoments(checkpoint, text.calibration, batching=batching, seed=seed, moments=moments)

    @cached_property
    def held_out(self) -> StagedMeter:
        """What the intact model says of held-out text."""
        return self._meter(self.text.held_out, self.options.objective)

    @cached_property
    def check(self) -> tuple[StagedMeter, Corpus]:
        """What it says of the second text; of random subwords its own predictions count, not what follows there."""
        corpus, foretold = second_text(self.checkpoint, self.text.calibration, self.options.check, seed=self.seed)
        most = subwords(self.checkpoint, self.text.calibration) // CHECK_SHARE
        corpus = capped(self.checkpoint, corpus, positions=most, fewest=CHECKED)
        objective = self.options.objective if self.text.held_out.has_labels == corpus.has_labels else ""
        if not foretold:
            own = OBJECTIVES.get(PREDICTED).applies(self.checkpoint, has_target=corpus.has_target, has_labels=False)
            objective = PREDICTED if own is None else ""
        return self._meter(corpus, objective), corpus

    def _meter(self, corpus: Corpus, objective: str) -> StagedMeter:
        reading: dict[str, Any] = {"batching": self.batching, "objective": objective, "seed": self.seed}
        return StagedMeter.of(corpus, lambda part: DamageMeter.of(self.checkpoint, part, **reading))

    def compensated(self, heads: Sequence[HeadId]) -> Compensated:
        """Refit the output projections for the removal of `heads`, and measure what that does.

        The checkpoint stays as it is. ConfigError for heads that cannot be compensated and text that does not reach
        them.
        """
        gone = frozenset(heads)
        if gone not in self.made:
            for oldest in list(self.made)[:-1]:
                del self.made[oldest]
            self.made[gone] = self._compensated(heads)
        return self.made[gone]

    def _compensated(self, heads: Sequence[HeadId]) -> Compensated:
        began = time.monotonic()
        choice = self._chosen(heads) if self.options.method == AUTO else None
        asked = {name: getattr(self.options, name) for name in REFITTED}
        taken = choice.taken.options if choice is not None else RefitOptions(add_bias=self.add_bias, **asked)
        refits = self.refits(heads, taken)
        copy = self.copy_with(refits)
        made, seconds = self.checkpoint.with_model(copy.model), time.monotonic() - began
        if choice is None and taken.method != "none":
            choice = self._compared(heads, taken, copy)
        performance = {"intact": self.held_out.of_intact}
        if choice is None:
            with masked(self.checkpoint.model, heads):
                performance["removed"] = self.held_out.measure(self._pooled)
        else:
            performance["removed"] = choice.masked.held_out
        if choice is not None and taken.method != "none":
            performance["refitted"] = choice.taken.held_out
        check = self.options.check if taken.method != "none" else ()
        options = replace(self.options, check=check, **{name: getattr(taken, name) for name in REFITTED})
        own = anchor_name(taken.anchor) == "text"
        digest = opened(taken.anchor, like=self.text.calibration, name="--anchor").digest if own else ""
        return Compensated(made, options, self.text, refits, performance, seconds, choice, digest)

    def refits(self, heads: Collection[HeadId], options: RefitOptions) -> Sequence[ModuleRefit]:
        """The refits of every module that changes."""
        if options.sequential or (self.altered is not None and options.method != "none"):
            texts = beside(self.checkpoint, self.text.calibration, options.anchor, seed=self.seed)
            return sequential_refits(
                self.checkpoint,
                self.text.calibration,
                heads,
                options,
                altered=self.altered,
                batching=self.batching,
                beside=texts,
            )
        if self.altered is not None:
            return []
        return compensate(self.checkpoint, self.moments.of(options.anchor), heads, options)

    def copy_with(self, refits: Collection[ModuleRefit]) -> RefittedCopy:
        """A copy of the model with its projections refitted."""
        return RefittedCopy.of(self.altered or self.checkpoint, refits)

    @property
    def _pooled(self) -> nn.Module | None:
        """The model whose key/value groups are merged; None where heads go."""
        return None if self.altered is None else self.altered.model

    def _candidate(
        self, options: RefitOptions, model: nn.Module | None, heads: Sequence[HeadId] = (), few: Candidate | None = None
    ) -> Candidate:
        """What a model with `heads` masked does to both texts; `few` is that on the few lines of the first stage."""
        held_out, (check, _) = self.held_out, self.check  # of the intact model, so made before heads are masked
        known = (None, None) if few is None else (few.held_out, few.check)
        with masked(self.checkpoint.model, heads):
            return Candidate(options, held_out.measure(model, few=known[0]), check.measure(model, few=known[1]))

    def _at_first(self, options: RefitOptions, model: nn.Module | None, heads: Sequence[HeadId] = ()) -> Candidate:
        """The same on those few lines alone."""
        meters = self.held_out.few, self.check[0].few
        with masked(self.checkpoint.model, heads):
            held_out, check = (meter.measure(model) for meter in meters)
        return Candidate(options, held_out, check)

    def _compared(self, heads: Sequence[HeadId], options: RefitOptions, copy: RefittedCopy) -> Choice:
        """The refit that was asked for beside masking; `copy` has it."""
        nothing = RefitOptions(method="none", add_bias=self.add_bias)
        both = [self._candidate(nothing, self._pooled, heads), self._candidate(options, copy.model)]
        return self._choice(both, both[1])

    def _choice(self, candidates: Sequence[Candidate], taken: Candidate) -> Choice:
        """What was compared on the second text, and taken."""
        without = "masking" if self.altered is None else "merging"
        return Choice(candidates, taken, self.check[1].name, self.check[1].count, without)

    def _chosen(self, heads: Sequence[HeadId]) -> Choice:
        """What harms least: of all candidates on a few lines, of the best two and masking on all lines.

        The best of least squares goes half the way too, and where asked for it is refitted module after module.
        """
        few, copy = self._first_stage(heads)
        nothing = self._candidate(few[0].options, self._pooled, heads, few[0])
        measured = {nothing.name: nothing}
        for each in sorted(few[1:], key=lambda each: each.order(few[0]))[:FINALISTS]:
            copy.put_all(self.refits(heads, each.options))
            measured[each.name] = self._candidate(each.options, copy.model, few=each)
        if heads and self.altered is None and self.options.strength == 1:
            half = replace(_best(measured.values(), nothing).options, strength=HALF)
            copy.put_all(self.refits(heads, half))
            few.append(self._candidate(half, copy.model))
            measured[few[-1].name] = few[-1]
        whole = self.held_out.rest is None and self.check[0].rest is None
        shown = [measured.get(each.name, each if whole else replace(each, first=few[0])) for each in few]
        if self.options.sequential and heads:
            best = _best(measured.values(), nothing).options
            options = replace(best, strength=1.0, sequential=True, feed_forward=self.options.feed_forward)
            shown.append(self._candidate(options, self.copy_with(self.refits(heads, options)).model))
        taken = least_harm([each for each in shown if each.first is None], nothing)
        return self._choice(shown, taken)

    def _first_stage(self, heads: Sequence[HeadId]) -> tuple[list[Candidate], RefittedCopy]:
        """Masking and all candidates on the few lines, and the copy that they were measured with."""
        few = [self._at_first(RefitOptions(method="none", add_bias=self.add_bias), self._pooled, heads)]
        copy = None
        for options in self.tried(heads):
            refits = self.refits(heads, options)
            copy = copy or self.copy_with(refits)
            copy.put_all(refits)
            few.append(self._at_first(options, copy.model))
        assert copy is not None, "least squares is always tried"
        return few, copy

    def tried(self, heads: Collection[HeadId]) -> list[RefitOptions]:
        """What `auto` compares with masking: the mean where biases can hold it, and least squares."""
        asked, modules = self.options, heads_by_module(self.checkpoint, heads)
        biased = self.add_bias or all(projection.has_bias for projection, gone in modules if gone)
        general = "sample" in self.moments.texts("general")
        anchors = TRIED_ANCHORS if general else TRIED_ANCHORS[:-1]
        if asked.sequential:
            anchors = (*anchors, TRIED_IN_TURN)
        if asked.anchor:
            anchors = ("none", asked.anchor) if anchor_name(asked.anchor) else ("none",)
        dampings = TRIED_DAMPINGS if asked.damping == DAMPING else (asked.damping,)
        return [
            *([RefitOptions(method="mean", add_bias=self.add_bias)] if biased else []),
            *(
                RefitOptions(damping=damping, add_bias=self.add_bias, anchor=anchor, strength=asked.strength)
                for anchor in anchors
                for damping in dampings
            ),
        ]


def _best(candidates: Iterable[Candidate], masked: Candidate) -> Candidate:
    """The one of least squares that harms least on the worse of both texts."""
    return least_harm([each for each in candidates if each.options.method == "least-squares"], masked)


def refitted(
    checkpoint: Checkpoint,
    corpus: Corpus,
    heads: Collection[HeadId],
    options: RefitOptions,
    *,
    moments: Moments | None = None,
    batching: BatchingOptions | None = None,
) -> Checkpoint:
    """The checkpoint with output projections that make up for `heads`, of the same size and in memory only.

    They are rounded as they would be written, so that what is measured holds for files too. `moments` are those of the
    intact model on `corpus`, where they are known. ConfigError as of `compensate`.
    """
    bench = RefitBench(checkpoint, CalibrationText(corpus, corpus), Refit(), batching=batching, moments=moments)
    made = checkpoint.with_model(RefittedCopy.of(checkpoint, bench.refits(heads, options)).model)
    round_weights(made.model, made.written_in)
    return made
