"""The contract of a pruning criterion, the registry that finds it by name, and scores that several derive from moments.

A criterion gives every head a number and says which end of the numbers stays. It is one file in
`headscope/pruning/ranking/criteria/`, or a column of `heads.csv`, whose analysis declares it as a `Measure`.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from torch import Tensor

from headscope.attribution.objectives.base import Objective
from headscope.config.declarations import Declared, Measure, measured_columns, rankable_columns
from headscope.data.batching import BatchingOptions, sentence_limit
from headscope.data.corpus import Corpus
from headscope.distributed import ALONE, Processes
from headscope.engine.base import ANALYSES, RunOptions, needs_objective
from headscope.engine.faithfulness.orders import Scores
from headscope.engine.frequencies import token_frequencies
from headscope.engine.plan import analyze, batch_tokens, choose_analyses
from headscope.errors import ConfigError, flag
from headscope.evaluation.likelihood import default_positions
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, all_heads
from headscope.model.taps import masked
from headscope.pruning.closed_form.allocation import MeasuredAllocation
from headscope.pruning.closed_form.bench import HALF_STRENGTH, RefitBench, rounded_copy
from headscope.pruning.closed_form.compensate import CalibrationText, split_text
from headscope.pruning.closed_form.moments import ContextMoments, Moments, collect_moments
from headscope.pruning.closed_form.output_projections import OutputProjection, output_projections
from headscope.pruning.closed_form.refit import damp, greedy_order
from headscope.pruning.gate_layout import Unit
from headscope.pruning.options.choice import End, RankConfig, SweepConfig
from headscope.pruning.options.shared import AUTO_DAMPING, DAMPING, OtherText, Refit
from headscope.pruning.scores_file import scores_in
from headscope.pruning.selection import OpenedSelection
from headscope.registry import Registry, unknown

REPLICATES = 2  # the fewest: a ranking uses no intervals


@dataclass(frozen=True)
class Direction:
    """Which end of a criterion's scores stays, why the other is removed first, and whether the user chose so."""

    keep: End
    why: str = ""
    is_requested: bool = False

    def apply(self, scores: Scores) -> Scores:
        """The scores, negated where the lowest stay, so that the highest stay."""
        return dict(scores) if self.keep == "highest" else {head: -value for head, value in scores.items()}

    def __str__(self) -> str:
        first = "highest" if self.keep == "lowest" else "lowest"
        why = "as asked" if self.is_requested else self.why and f"as {self.why}"
        return ", ".join(filter(None, [f"removes the {first} first", why]))


@dataclass(frozen=True)
class ScoringContext:
    """The inputs of a criterion: a model, a text (None: there is none), and the heads removed so far.

    Only `candidates` may be removed (None: all heads). `damping` is that of criteria that refit W_O (None: the
    default). The search of `measured_allocation` refits W_O with `anchor`, on the texts of `bench` (None: parts of the
    corpus). Each of several `processes` reads its share of the text, and all get the scores. `cache` holds moments of
    the intact model, which several criteria and a refit share; copies by `replace` share it too.
    """

    checkpoint: Checkpoint
    corpus: Corpus | None = None
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    options: RunOptions = field(default_factory=RunOptions)
    removed: Sequence[HeadId] = ()
    candidates: frozenset[HeadId] | None = None
    whole_groups: bool = True
    damping: float | None = None
    anchor: OtherText = ()
    bench: RefitBench | None = None
    processes: Processes = ALONE
    cache: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def text(self) -> Corpus:
        """The corpus of a criterion that reads text."""
        assert self.corpus is not None, "a criterion that reads text is refused without any"
        return self.corpus


class Criterion(Declared, ABC):
    """Scores every head of a model.

    - `keep`: which end of the scores stays ("" where that is not agreed upon).
    - `why`: completes "the others are removed first, as …".
    - `reads_text`: needs a text.
    - `changes`: scores depend on the heads removed so far, so scoring anew means something.
    - `one_pass`: one pass over the text gives the scores.
    - `refits`: refits the other heads, so damping means something.
    - `explains`: scores are about the objective.
    - `probes`: an objective that compares vectors is probed at random (`explained_values`).
    - `sampled`: scores depend on the seed, whatever the objective.
    """

    keep: Literal["", "highest", "lowest"] = "highest"
    why: str = ""
    reads_text: bool = True
    changes: bool = True
    one_pass: bool = True
    refits: bool = False
    explains: bool = False
    probes: bool = False
    sampled: bool = False

    def draws(self, checkpoint: Checkpoint, objective: Objective | None) -> bool:
        """Whether scores depend on the seed, as an objective's do if it hides tokens at random."""
        if objective is None or not self.explains:
            return self.sampled
        return self.sampled or objective.alters(checkpoint) or (self.probes and objective.compares)

    @abstractmethod
    def scores(self, context: ScoringContext) -> Scores:
        """A number for every head; NaN where there is none."""

    def direction(self, keep: End | None = None) -> Direction:
        """The end that the user wants to keep, else (None) the declared one; ConfigError where neither is known."""
        if self.keep and keep in (None, self.keep):
            return Direction(self.keep, self.why)
        if keep is None:
            raise ConfigError(
                f"{flag.by} {self.name} has no agreed direction: give {flag.keep_lowest} or {flag.keep_highest}"
            )
        return Direction(keep, is_requested=True)


class MeasuredColumn(Criterion):
    """A column of `heads.csv`; its analysis measures it, and its `Measure` says which end stays.

    Heads are ranked by `column`: that of the measure, or the one that it names (`across`) to compare layers.
    """

    def __init__(self, measure: Measure, *, analysis: str = "") -> None:
        self.name, self.summary, self.analysis = measure.name, measure.words, analysis  # type: ignore[misc]
        self.column = measure.across or measure.name
        alone = measure.within_layer and not measure.across
        self.keep, self.why = measure.keep, measure.why + ", within their layer" * alone
        self.explains = bool(analysis) and needs_objective(ANALYSES.get(analysis))
        self.sampled = bool(analysis) and ANALYSES.get(analysis).sampled
        self.reads_text = self.changes = not analysis or bool(ANALYSES.get(analysis).passes)

    def scores(self, context: ScoringContext) -> Scores:
        """Run the analysis on the text, with the removed heads masked."""
        corpus = context.corpus or Corpus("no text", 0, "", lambda: iter(()))
        options = context.options
        if "frequencies" in ANALYSES.get(self.analysis).needs and options.ranks is None:
            limit = sentence_limit(context.checkpoint, context.batching.limit)
            options = replace(options, **token_frequencies(context.checkpoint, corpus, limit=limit))
        with masked(context.checkpoint.model, context.removed):
            study = analyze(
                context.checkpoint,
                corpus,
                analyses=choose_analyses(only=[self.analysis]),
                options=options,
                batching=context.batching,
                replicates=REPLICATES,
                processes=context.processes,
            )
        return context.processes.broadcast(scores_in(study.heads, self.column) if context.processes.main else None)


CRITERIA: Registry[type[Criterion]] = Registry(
    "criterion", package="headscope.pruning.ranking.criteria", group="headscope.criteria"
)
criterion = CRITERIA.add


def rankable_names() -> list[str]:
    """Names to rank heads by: criteria, and columns of analyses that need only a text."""
    return sorted({*CRITERIA.names(), *rankable_columns()})


def criterion_named(name: str) -> Criterion:
    """The criterion or the column of `heads.csv` of that name; ConfigError, with the nearest, where there is none."""
    if name not in rankable_names():
        message = unknown("criterion", name, rankable_names())
        raise ConfigError(f"{message}; other columns of heads.csv: give {flag('from')} RUN")
    return CRITERIA.get(name)() if name in CRITERIA.names() else column_named(name)


def column_named(name: str) -> MeasuredColumn:
    """The column of that name as its analysis declares it; without a direction where no analysis declares it."""
    measures = measured_columns()
    if name not in measures:
        return MeasuredColumn(Measure(name))
    analysis, measure = measures[name]
    return MeasuredColumn(measure, analysis=analysis.name)


def scores_by_criteria(context: ScoringContext) -> dict[str, Scores]:
    """The scores, the highest stay, of every criterion of one pass over a text that applies to the model."""
    scores = {}
    for name, cls in CRITERIA:
        if cls.reads_text and cls.one_pass:
            try:
                scores[name] = cls().direction().apply(cls().scores(context))
            except ConfigError:  # it needs what model or text do not have
                continue
    return scores


def scoring_context(
    setup: OpenedSelection, config: RankConfig | SweepConfig, *, processes: Processes = ALONE, **others: Any
) -> ScoringContext:
    """The inputs of criteria from an open checkpoint and text; `others` are further fields of `ScoringContext`.

    Unless the options say, a batch has as many positions as a backward pass fits into the accelerator's memory.
    """
    tokens, corpus = config.batch_tokens or default_positions(setup.checkpoint, backward=True), setup.corpus
    if corpus is not None and not config.batch_tokens:
        batching, gradient = BatchingOptions(tokens, setup.limit), [ANALYSES.get("gradient")]
        run = RunOptions(seed=config.seed, objective=config.objective, batching=batching)
        tokens, remark = batch_tokens(setup.checkpoint, corpus, gradient, run, processes=processes)
        setup.remarks += [remark] if remark and remark not in setup.remarks else []
    return ScoringContext(
        setup.checkpoint,
        None if corpus is None else corpus.first(config.score_sentences),
        BatchingOptions(tokens=tokens, limit=config.max_length),
        RunOptions(seed=config.seed, objective=config.objective),
        candidates=setup.gating.gated_heads,
        whole_groups=not setup.gating.groups,
        processes=processes,
        **others,
    )


def moments_of(context: ScoringContext, *, gradients: bool = False, heads_off: Sequence[HeadId] = ()) -> Moments:
    """The moments of the context's text, with `heads_off` masked; those of the intact model are cached.

    With `gradients` also Fisher matrices of the context's objective.
    """
    objective, seed = (context.options.objective, context.options.seed) if gradients else (None, 0)
    text_key = "moments", id(context.checkpoint), id(context.text), context.batching
    key = *text_key, objective, seed
    if heads_off or key not in context.cache:
        with masked(context.checkpoint.model, heads_off):
            moments = collect_moments(
                context.checkpoint,
                context.text,
                batching=context.batching,
                objective=objective,
                seed=seed,
                processes=context.processes,
            )
        if heads_off:
            return moments
        context.cache[text_key] = context.checkpoint, context.corpus  # kept alive, so that their ids stay theirs
        context.cache[key] = context.cache[(*text_key, None, 0)] = moments
    return context.cache[key]


def reached_modules(context: ScoringContext, moments: Moments) -> Iterator[tuple[OutputProjection, ContextMoments]]:
    """The output projections that the text reaches, with their moments."""
    for projection in output_projections(context.checkpoint, whole_groups=context.whole_groups):
        if (sums := moments.of(projection)) is not None:
            yield projection, sums


def refitted_checkpoint(context: ScoringContext, heads: Collection[HeadId], options: Refit) -> Checkpoint:
    """A copy of the checkpoint of the same size, refitted on the context's text for the removal of `heads`.

    Its weights are rounded as they will be written. Without text, without heads and for "none" the checkpoint itself.
    """
    checkpoint, corpus = context.checkpoint, context.corpus
    if options.method == "none" or not heads or corpus is None:
        return checkpoint
    moments = {} if options.sequential else {"": moments_of(context)}
    bench = RefitBench(checkpoint, CalibrationText(corpus, corpus), options, batching=context.batching, moments=moments)
    return rounded_copy(checkpoint.with_model(bench.copy_with(bench.refits(heads, bench.options)).model))


def scores_by_layer(context: ScoringContext, score: Callable[[Tensor, ContextMoments], Tensor]) -> Scores:
    """Scores of all heads: `score` gets W_O [d h k] and the moments of each (site, layer), and returns [h]."""
    moments = moments_of(context, heads_off=context.removed)
    scores: dict[HeadId, float] = {}
    for projection in output_projections(context.checkpoint):
        weight = projection.weight.view(len(projection.weight), projection.heads, -1)
        for site, layer in projection.site_layers:
            if (site, layer) in moments.sites:
                values = score(weight, moments.sites[site, layer]).tolist()
                scores.update({HeadId(site, layer, head): value for head, value in enumerate(values)})
    return for_all_heads(context, scores)


def for_all_heads(context: ScoringContext, scores: Mapping[HeadId, float]) -> Scores:
    """The scores of all heads in their usual order, NaN where there is none."""
    return {head: scores.get(head, float("nan")) for head in all_heads(context.checkpoint.layout)}


def cumulative_scores(
    context: ScoringContext, modules: Iterable[tuple[OutputProjection, ContextMoments, Tensor]]
) -> Scores:
    """Each head's score: the summed error of all modules when it and all cheaper heads are removed.

    Heads are removed greedily, the cheapest first, and the remaining ones refitted after each: affinely where the
    projection has a bias. `modules` has projections, their moments, and the weight [d m] by which errors are measured.
    """
    share, orders = DAMPING if context.damping is None else context.damping, []
    for projection, moments, weight in modules:
        units = [
            number
            for number, unit in enumerate(projection.units)
            if context.candidates is None or context.candidates.issuperset(unit)
        ]
        damped_moments = damp(moments.covariance if projection.has_bias else moments.second, share=share)
        orders.append((projection, greedy_order(weight, damped_moments.inverse(), projection.blocks, candidates=units)))
    waiting = [(steps[0].error, number, 0) for number, (_, steps) in enumerate(orders) if steps]
    heapq.heapify(waiting)
    error, scores = 0.0, dict[HeadId, float]()
    while waiting:
        cost, number, position = heapq.heappop(waiting)
        projection, steps = orders[number]
        error += cost
        scores.update(dict.fromkeys(projection.units[steps[position].block], error))
        if position + 1 < len(steps):
            heapq.heappush(waiting, (steps[position + 1].error, number, position + 1))
    return for_all_heads(context, scores)


def measured_allocation(context: ScoringContext, units: Collection[Unit], scores: Scores) -> MeasuredAllocation:
    """The search for the `units` to remove, by the context's objective; it starts from the order of `scores`.

    Scores need not be in units of the loss: the n-th unit by `scores` is estimated to cost the n-th smallest `fisher`
    score, or 0 where vectors are compared, whose curvature is only sampled. ConfigError for a unit without a score.
    """
    fisher_scores, run = criterion_named("fisher").scores(context), context.options
    costs, ranks = (
        {unit: fmean(head_scores.get(head, math.nan) for head in unit) for unit in units}
        for head_scores in (fisher_scores, scores)
    )
    for unit in units:
        if math.isnan(ranks[unit]) or math.isnan(costs[unit]):
            raise ConfigError(f"{unit[0]} has no score, so nothing can be allocated by it")
    estimates = dict(zip(sorted(units, key=ranks.__getitem__), sorted(costs.values()), strict=True))
    damping = AUTO_DAMPING if context.damping is None else context.damping
    bench = context.bench
    if bench is None:  # fitted to the text without its last fifth, and measured on that
        text = split_text(context.text, None, sentences=context.text.count)
        refit = Refit(damping=damping, objective=run.objective)
        bench = RefitBench(context.checkpoint, text, refit, batching=context.batching, seed=run.seed)
    if bench.compares:
        estimates = dict.fromkeys(estimates, 0.0)
    projections = [projection for projection, _ in reached_modules(context, moments_of(context))]
    strength = 1.0 if bench.compares else HALF_STRENGTH
    options = Refit(damping=damping, strength=strength, add_bias=bench.options.add_bias)
    moments = bench.anchored_moments(context.anchor or (bench.search_anchor if context.bench else ()))
    return MeasuredAllocation(bench.search_meters(), moments, projections, estimates, options)
