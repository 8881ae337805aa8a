"""Scores of heads from moments: the shape that all criteria of this kind share."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from headscope.data.batching import BatchingOptions
from headscope.distributed import ALONE, Processes
from headscope.engine.base import RunOptions
from headscope.engine.faithfulness.orders import Scores
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, all_heads
from headscope.model.taps import masked
from headscope.progress import Progress
from headscope.pruning.closed_form.allocation import MeasuredAllocation
from headscope.pruning.closed_form.bench import HALF, RefitBench, refit_copy
from headscope.pruning.closed_form.compensate import split_text
from headscope.pruning.closed_form.moments import ContextMoments, Moments, collect_moments
from headscope.pruning.closed_form.output_projections import OutputProjection, output_projections
from headscope.pruning.closed_form.refit import RemovalStep, damp, greedy_order
from headscope.pruning.gate_layout import Unit
from headscope.pruning.options.choice import RankConfig, SweepConfig
from headscope.pruning.options.shared import AUTO_DAMPING, DAMPING, Refit
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from headscope.pruning.selection import OpenedSelection, pass_tokens


def scoring_context(
    setup: OpenedSelection, config: RankConfig | SweepConfig, *, processes: Processes = ALONE, **others: Any
) -> ScoringContext:
    """What criteria are asked about: an open checkpoint on the first sentences of an open text, and the `others`."""
    tokens = config.batch_tokens or pass_tokens(setup, config.objective, seed=config.seed, processes=processes)
    return ScoringContext(
        setup.checkpoint,
        None if setup.corpus is None else setup.corpus.first(config.score_sentences),
        BatchingOptions(tokens=tokens, limit=config.max_length),
        RunOptions(seed=config.seed, objective=config.objective),
        candidates=setup.gating.gated_heads,
        whole_groups=not setup.gating.groups,
        processes=processes,
        **others,
    )


def moments_of(context: ScoringContext, *, gradients: bool = False, heads_off: Sequence[HeadId] = ()) -> Moments:
    """The moments of a context's text, with `heads_off` masked; those of the intact model are collected once.

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
    """The checkpoint `refitted` on the context's text; as it is without text, without heads and for "none"."""
    checkpoint, corpus = context.checkpoint, context.corpus
    if options.method == "none" or not heads or corpus is None:
        return checkpoint
    moments = None if options.sequential else moments_of(context)
    return refit_copy(checkpoint, corpus, heads, options, moments=moments, batching=context.batching)


def scores_by_layer(context: ScoringContext, score: Callable[[Tensor, ContextMoments], Tensor]) -> Scores:
    """What `score` makes of W_O [d h k] and the moments of every (site, layer): a number for each head [h]."""
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
    orders = [
        (projection, _removal_order(context, projection, moments, weight)) for projection, moments, weight in modules
    ]
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


def _removal_order(
    context: ScoringContext, projection: OutputProjection, moments: ContextMoments, weight: Tensor
) -> list[RemovalStep]:
    candidates, units = context.candidates, None
    if candidates is not None:
        units = [number for number, unit in enumerate(projection.units) if candidates.issuperset(unit)]
    second = moments.covariance if projection.has_bias else moments.second
    share = DAMPING if context.damping is None else context.damping
    return greedy_order(weight, damp(second, share=share).inverse(), projection.blocks, candidates=units)


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
    bench = context.bench
    if bench is None:  # fitted to the text without its last fifth, and measured on that
        text, refit = split_text(context.text, None, sentences=context.text.count), Refit(objective=run.objective)
        bench = RefitBench(context.checkpoint, text, refit, batching=context.batching, seed=run.seed)
    if bench.compares:
        estimates = dict.fromkeys(estimates, 0.0)
    projections = [projection for projection, _ in reached_modules(context, moments_of(context))]
    damping = AUTO_DAMPING if context.damping is None else context.damping
    options = Refit(damping=damping, strength=1.0 if bench.compares else HALF, add_bias=bench.add_bias)
    moments = bench.anchored_moments(context.anchor or (bench.search_anchor if context.bench else ()))
    return MeasuredAllocation(bench.search_meters(), moments, projections, estimates, options)


def take_heads(search: MeasuredAllocation, count: int, progress: Progress) -> Mapping[HeadId, float]:
    """Scores of all heads once a search has taken out `count`; the progress says how many measurements that may be."""
    passes = search.max_passes(count)
    with progress(f"measuring, at most {passes} times", passes) as step:
        return search.take(count, step=step)
