"""Scores of heads from moments: the shape that all criteria of this kind share."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from headscope.data.corpus import Corpus
from headscope.engine.faithfulness.orders import Scores
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, all_heads
from headscope.model.taps import masked
from headscope.pruning.closed_form.anchors import anchor_sources
from headscope.pruning.closed_form.bench import refitted
from headscope.pruning.closed_form.compensate import MEASURED, ModuleOrder, measured_allocation
from headscope.pruning.closed_form.damage import DamageMeter, lines, spread
from headscope.pruning.closed_form.moments import ContextMoments, Mixture, ModuleMoments, Moments, collect_moments
from headscope.pruning.closed_form.output_projections import OutputProjection, output_projections
from headscope.pruning.closed_form.refit import RemovalStep, damp, greedy_order
from headscope.pruning.gate_layout import Unit
from headscope.pruning.options.refit import RefitOptions, anchor_name
from headscope.pruning.ranking.criterion import ScoringContext

FEWEST_MEASURED = 16
"""Lines that an allocation is measured on at least (benchmarks/allocation_lines.py)."""


def moments_of(context: ScoringContext, *, gradients: bool = False, removed: Sequence[HeadId] = ()) -> Moments:
    """The moments of a context's text, with `removed` heads masked; those of the intact model are collected once.

    With `gradients` also Fisher matrices of the context's objective. ConfigError where there is no text.
    """
    if context.corpus is None:
        raise ConfigError("moments of contexts are measured on text: give --source FILE")
    objective, seed = (context.options.objective, context.options.seed) if gradients else (None, 0)
    text_key = "moments", id(context.checkpoint), id(context.corpus), context.batching
    key = *text_key, objective, seed
    if removed or key not in context.measured:
        with masked(context.checkpoint.model, removed):
            moments = collect_moments(
                context.checkpoint,
                context.corpus,
                batching=context.batching,
                objective=objective,
                seed=seed,
                processes=context.processes,
            )
        if removed:
            return moments
        context.measured[text_key] = context.checkpoint, context.corpus  # no other object gets their ids
        context.measured[key] = context.measured[(*text_key, None, 0)] = moments
    intact: Moments = context.measured[key]
    return intact


def reached_modules(context: ScoringContext, moments: Moments) -> Iterator[tuple[OutputProjection, ContextMoments]]:
    """The output projections that the text reaches, with their moments."""
    for projection in output_projections(context.checkpoint, whole_groups=context.whole_groups):
        if (sums := moments.of(projection)) is not None:
            yield projection, sums


def refitted_checkpoint(context: ScoringContext, heads: Collection[HeadId], options: RefitOptions) -> Checkpoint:
    """The checkpoint `refitted` on the context's text; as it is without text, without heads and for "none"."""
    checkpoint, corpus = context.checkpoint, context.corpus
    if options.method == "none" or not heads or corpus is None:
        return checkpoint
    moments = None if options.sequential else moments_of(context)
    return refitted(checkpoint, corpus, heads, options, moments=moments, batching=context.batching)


def scores_by_layer(context: ScoringContext, score: Callable[[Tensor, ContextMoments], Tensor]) -> Scores:
    """What `score` makes of W_O [d h k] and the moments of every (site, layer): a number for each head [h]."""
    moments = moments_of(context, removed=context.removed)
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


def removal_order(
    context: ScoringContext, projection: OutputProjection, moments: ContextMoments, *, weight: Tensor | None = None
) -> list[RemovalStep]:
    """The units of a module, the cheapest to remove first, when the others are refitted after each.

    The refit is affine where the projection has a bias. `weight` [d m] stands for W_O where errors are weighted.
    """
    candidates, units = context.candidates, None
    if candidates is not None:
        units = [number for number, unit in enumerate(projection.units) if candidates.issuperset(unit)]
    second = moments.covariance if projection.has_bias else moments.second
    weight = projection.weight if weight is None else weight
    return greedy_order(weight, damp(second, share=context.damping).inverse(), projection.blocks, candidates=units)


def cumulative_error(orders: Sequence[tuple[OutputProjection, list[RemovalStep]]]) -> dict[HeadId, float]:
    """The error of all modules together once a head and all those before it are gone, the cheapest first."""
    waiting = [(steps[0].error, number, 0) for number, (_, steps) in enumerate(orders) if steps]
    heapq.heapify(waiting)
    error, scores = 0.0, {}
    while waiting:
        cost, number, turn = heapq.heappop(waiting)
        projection, steps = orders[number]
        error += cost
        scores.update(dict.fromkeys(projection.units[steps[turn].block], error))
        if turn + 1 < len(steps):
            heapq.heappush(waiting, (steps[turn + 1].error, number, turn + 1))
    return scores


def measured_scores(
    context: ScoringContext,
    orders: Sequence[ModuleOrder],
    *,
    most: int | None = None,
    step: Callable[[int], None] = lambda count: None,
    known: MutableMapping[str, float] | None = None,
) -> Scores:
    """Scores by `measured_allocation` of a context's objective, on lines of its text that no refit is fitted to.

    With an anchor refits are anchored; where that is a text, lines of it are held out and measured on as well.
    """
    moments, meters = _measuring(context)
    options = RefitOptions(damping=context.damping)
    return for_all_heads(
        context, measured_allocation(meters, moments, orders, options, most=most, step=step, known=known)
    )


def _measuring(context: ScoringContext) -> tuple[ModuleMoments, list[DamageMeter]]:
    """What allocations of one context are refitted by, and measured with; made once."""
    checkpoint, corpus, seed = context.checkpoint, context.corpus, context.options.seed
    if corpus is None:
        raise ConfigError("an allocation is measured on text: give --source FILE")
    objective = context.options.objective
    key = "allocation", id(checkpoint), id(corpus), context.batching, objective, seed, anchor_name(context.anchor)
    if key not in context.measured:
        fitted, measured = held_apart(corpus)
        beside = {name: text() for name, text in anchor_sources(checkpoint, fitted, context.anchor, seed=seed).items()}
        held_out = [measured]
        if own := beside.get("text"):
            beside["text"], measured = held_apart(own)
            held_out.append(measured)
        of_texts = [
            collect_moments(checkpoint, text, batching=context.batching, processes=context.processes)
            for text in (fitted, *beside.values())
        ]
        reading: dict[str, Any] = {"batching": context.batching, "seed": seed, "objective": objective}
        meters = [DamageMeter.of(checkpoint, text, **reading) for text in held_out]
        context.measured[key] = Mixture([(each, 1 / len(of_texts)) for each in of_texts]), meters
    made: tuple[ModuleMoments, list[DamageMeter]] = context.measured[key]
    return made


def held_apart(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """A text to refit on, and a fourth of its lines, 16 to 128, as far apart as can be, which are held out of it."""
    count = min(MEASURED, max(FEWEST_MEASURED, corpus.count // 4))
    if corpus.count < 2 * FEWEST_MEASURED:
        raise ConfigError(
            f"{corpus.name}: too few lines to allocate heads by measuring, {corpus.count} of at least "
            f"{2 * FEWEST_MEASURED} ({count} are held out to measure on); give more text, or rank without measuring "
            "(--by obs, --allocate global)"
        )
    chosen = spread(corpus.count, count)
    return lines(corpus, [not each for each in chosen]), lines(corpus, chosen)


def orders_of(context: ScoringContext, units: Collection[Unit], scores: Scores) -> list[ModuleOrder]:
    """The units of every module that the context's text reaches, those of the lowest mean score first.

    Only `units` go. ConfigError where one of them has no score.
    """
    orders: list[ModuleOrder] = []
    for projection, _ in reached_modules(context, moments_of(context)):
        means = {
            number: fmean(scores.get(head, math.nan) for head in unit)
            for number, unit in enumerate(projection.units)
            if unit in units
        }
        if unscored := [number for number, mean in means.items() if math.isnan(mean)]:
            raise ConfigError(f"{projection.units[unscored[0]][0]} has no score, so nothing can be allocated by it")
        orders.append((projection, sorted(means, key=means.__getitem__)))
    return orders
