"""The contract of a pruning criterion, the registry that finds it by name, and scores that several make of moments.

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
from headscope.pruning.closed_form.bench import HALF, RefitBench, rounded_copy
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

REPLICATES = 2  # intervals are not looked at


@dataclass(frozen=True)
class Direction:
    """The end of a criterion's numbers that stays, why the other goes first, and whether the user chose it."""

    keep: End
    why: str = ""
    is_requested: bool = False

    def apply(self, scores: Scores) -> Scores:
        """The scores with the sign by which the highest stay."""
        return dict(scores) if self.keep == "highest" else {head: -value for head, value in scores.items()}

    def __str__(self) -> str:
        first = "highest" if self.keep == "lowest" else "lowest"
        why = "as asked" if self.is_requested else self.why and f"as {self.why}"
        return ", ".join(filter(None, [f"removes the {first} first", why]))


@dataclass(frozen=True)
class ScoringContext:
    """The inputs of a criterion: a model, a text (None: there is none), and the heads removed so far.

    Only `candidates` may go (None: all heads). `damping` is for criteria that refit W_O (None: as usual), `anchor` for
    what is measured with W_O refitted, `bench` for what that is fitted to and measured on (None: parts of the corpus).
    Of several `processes` each reads its share of the text, and all get the scores. `cache` holds what several
    criteria, and a refit, measure alike of the intact model; `replace` hands it on.
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
        """The corpus, of criteria that read one: for others it is never asked."""
        assert self.corpus is not None, "a criterion that reads text is refused without any"
        return self.corpus


class Criterion(Declared, ABC):
    """Scores every head of a model.

    `keep` says which end of the scores stays ("" where that is not agreed upon), and `why` completes "the others are
    removed first, as …". `reads_text` says whether it needs a text; `changes` whether scores depend on which heads are
    gone, so that scoring anew means something; `one_pass` whether a pass over the text gives them; `refits` whether
    other heads are refitted, so that damping means something; `explains` whether scores are about the objective,
    `probes` whether by random probes of the vectors that it compares (`explained_values`);
    `sampled` whether they follow from the seed whatever that is.
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
        """As the user says, or where that is None as the criterion declares; ConfigError where neither does."""
        if self.keep and keep in (None, self.keep):
            return Direction(self.keep, self.why)
        if keep is None:
            raise ConfigError(
                f"{flag.by} {self.name} has no agreed direction: give {flag.keep_lowest} or {flag.keep_highest}"
            )
        return Direction(keep, is_requested=True)


class MeasuredColumn(Criterion):
    """A column of `heads.csv`; its analysis measures it, and its `Measure` says which end stays.

    Heads of several layers are ranked, so that it is the `column` that orders them where the measure names one.
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
        """Runs the analysis on the text, with the heads that are gone masked."""
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
    """The criterion of that name, or that column of `heads.csv`; ConfigError for another, with the nearest one."""
    if name not in rankable_names():
        message = unknown("criterion", name, rankable_names())
        raise ConfigError(f"{message}; other columns of heads.csv: give {flag('from')} RUN")
    return CRITERIA.get(name)() if name in CRITERIA.names() else column_named(name)


def column_named(name: str) -> MeasuredColumn:
    """The column of that name, as its analysis declares it; one that no analysis declares has no direction."""
    measures = measured_columns()
    if name not in measures:
        return MeasuredColumn(Measure(name))
    analysis, measure = measures[name]
    return MeasuredColumn(measure, analysis=analysis.name)


def scores_by_criteria(context: ScoringContext) -> dict[str, Scores]:
    """The scores of every criterion that takes one pass over a text, the highest stay; without those that refuse."""
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
    """The inputs of criteria: an open checkpoint, the first sentences of an open text, and the `others`.

    A batch has as many positions as memory allows a backward pass on an accelerator, unless the options say.
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
    """The moments of a context's text, with `heads_off` masked; the intact model's are collected once.

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
        context.cache[text_key] = context.checkpoint, context.corpus  # no other object gets their ids
        context.cache[key] = context.cache[(*text_key, None, 0)] = moments
    return context.cache[key]


def reached_modules(context: ScoringContext, moments: Moments) -> Iterator[tuple[OutputProjection, ContextMoments]]:
    """The output projections that the text reaches, with their moments."""
    for projection in output_projections(context.checkpoint, whole_groups=context.whole_groups):
        if (sums := moments.of(projection)) is not None:
            yield projection, sums


def refitted_checkpoint(context: ScoringContext, heads: Collection[HeadId], options: Refit) -> Checkpoint:
    """The checkpoint refitted on the context's text for the removal of `heads`, of the same size, rounded as its files.

    As it is without text, without heads and for "none".
    """
    checkpoint, corpus = context.checkpoint, context.corpus
    if options.method == "none" or not heads or corpus is None:
        return checkpoint
    moments = {} if options.sequential else {"": moments_of(context)}
    bench = RefitBench(checkpoint, CalibrationText(corpus, corpus), options, batching=context.batching, moments=moments)
    return rounded_copy(checkpoint.with_model(bench.copy_with(bench.refits(heads, bench.options)).model))


def scores_by_layer(context: ScoringContext, score: Callable[[Tensor, ContextMoments], Tensor]) -> Scores:
    """The `score` [h] of W_O [d h k] and the moments of every (site, layer)."""
    moments = moments_of(context, heads_off=context.removed)
    scores: dict[HeadId, float] = {}
    for projection in output_projections(context.checkpoint):
        weight = projection.weight.view(len(projection.weight), projection.heads, -1)
        for site, layer in projection.places:
            if (site, layer) in moments.sites:
                values = score(weight, moments.sites[site, layer]).tolist()
                scores.update({HeadId(site, layer, head): value for head, value in enumerate(values)})
    return for_all_heads(context, scores)


def for_all_heads(context: ScoringContext, scores: Mapping[HeadId, float]) -> Scores:
    """The numbers of all heads in their usual order, NaN where there is none."""
    return {head: scores.get(head, float("nan")) for head in all_heads(context.checkpoint.layout)}


def cumulative_scores(
    context: ScoringContext, modules: Iterable[tuple[OutputProjection, ContextMoments, Tensor]]
) -> Scores:
    """The error of all modules together once a head and all those before it are gone, the cheapest first.

    The heads that stay are refitted after each unit that goes: affinely where the projection has a bias. Beside a
    module and its moments stands the weight [d m] for W_O by which its errors are weighted.
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
        cost, number, turn = heapq.heappop(waiting)
        projection, steps = orders[number]
        error += cost
        scores.update(dict.fromkeys(projection.units[steps[turn].block], error))
        if turn + 1 < len(steps):
            heapq.heappush(waiting, (steps[turn + 1].error, number, turn + 1))
    return for_all_heads(context, scores)


def measured_allocation(context: ScoringContext, units: Collection[Unit], scores: Scores) -> MeasuredAllocation:
    """The search for the `units` that go, by a context's objective; they are tried first in the order of `scores`.

    A unit is estimated to cost what `fisher` says of the one with the same rank, so scores need no unit of their own;
    nothing where vectors are compared, whose curvature is only sampled. ConfigError for a unit without a score.
    """
    fisher, run = criterion_named("fisher").scores(context), context.options
    costs, ranks = ({unit: fmean(by.get(head, math.nan) for head in unit) for unit in units} for by in (fisher, scores))
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
    options = Refit(damping=damping, strength=1.0 if bench.compares else HALF, add_bias=bench.options.add_bias)
    moments = bench.anchored_moments(context.anchor or (bench.search_anchor if context.bench else ()))
    return MeasuredAllocation(bench.search_meters(), moments, projections, estimates, options)
