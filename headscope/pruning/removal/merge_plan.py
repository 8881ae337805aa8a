"""Plan the merging of key/value groups in sets of equal size; all query heads stay (Ainslie et al. 2023, §2.1).

The number of key/value heads of each layer is given, or chosen by the damage of merging on text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from statistics import fmean

from headscope.data.corpus import Corpus
from headscope.errors import ConfigError, flag
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, SiteLayer
from headscope.model.discovery import AttentionSite, AttentionSites
from headscope.model.removal_plan import RemovalPlan
from headscope.pruning.closed_form.damage import MAX_SENTENCES, DamageMeter

GroupSets = tuple[tuple[int, ...], ...]


def plan_merge(
    attention_sites: AttentionSites, counts: Sequence[int], *, scores: Mapping[HeadId, float] | None = None
) -> RemovalPlan:
    """Merge the key/value groups of every layer into `counts` groups: one number for all layers, or one for each.

    Neighbours are merged, as in the paper; with `scores` of heads, neighbours in the order of the groups' mean scores.
    Layers that share a module are merged alike. The query heads of a merged group become neighbours
    (`RemovalPlan.kept`).
    """
    modules = list(attention_sites.calls.values())
    counts_text = ",".join(map(str, counts))
    if len(counts) not in (1, len(modules)):
        problem = f"{flag.merge_kv} {counts_text}: {len(counts)} numbers for {len(modules)} layers"
        raise ConfigError(f"{problem}; give one for all, or one for each")
    head_order: dict[SiteLayer, tuple[int, ...]] = {}
    groups: dict[SiteLayer, tuple[int, ...]] = {}
    merged_sets: dict[SiteLayer, GroupSets] = {}
    for sites, count in zip(modules, (*counts,) * (len(modules) // len(counts)), strict=True):
        sets = _group_sets(sites, count, attention_sites, scores)
        for site in sites:
            head_order[site.site_layer] = tuple(
                head for members in sets for group in members for head in site.group_heads(group)
            )
            groups[site.site_layer] = tuple(members[0] for members in sets)
            if len(sets) < site.groups:
                merged_sets[site.site_layer] = sets
    if not merged_sets:
        raise ConfigError(f"{flag.merge_kv} {counts_text}: every layer has {counts_text} key/value heads as it is")
    return RemovalPlan((), head_order, groups, merged_sets)


def _group_sets(
    sites: Sequence[AttentionSite], count: int, attention_sites: AttentionSites, scores: Mapping[HeadId, float] | None
) -> GroupSets:
    """The sets of groups of one module that are merged, ordered by their first members."""
    first = sites[0]
    if not first.heads:
        return ()
    if count < 1 or first.groups % count:
        common = reduce(math.gcd, (site.groups for site in attention_sites.order if site.heads))
        divisors = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
        raise ConfigError(
            f"{flag.merge_kv} {count}: {first.site}.{first.layer} has {first.groups} of them; choose from {divisors}"
        )
    order = list(range(first.groups))
    if scores is not None:
        members = [
            [HeadId(*site.site_layer, head) for site in sites for head in site.group_heads(group)] for group in order
        ]
        means = [fmean(scores.get(head, math.nan) for head in heads) for heads in members]
        if any(map(math.isnan, means)):
            raise ConfigError(
                f"heads of {first.site}.{first.layer} have no score, by which keys and values are merged; give scores "
                "of all heads"
            )
        order.sort(key=lambda group: -means[group])
    size = first.groups // count
    return tuple(sorted(tuple(sorted(order[start : start + size])) for start in range(0, first.groups, size)))


def measured_counts(
    checkpoint: Checkpoint,
    mean: int,
    corpus: Corpus,
    *,
    scores: Mapping[HeadId, float] | None = None,
    objective: str = "",
) -> tuple[int, ...]:
    """The number of key/value heads of every module, with this `mean` over modules with heads, chosen by damage.

    A greedy search from all heads: each step lowers one module to the next smaller divisor of its number, the one that
    adds the least damage per saved head, on 128 sentences with projections averaged in place. Steps after which the
    total cannot be reached are skipped.
    """
    groups = [sites[0].groups if sites[0].heads else 0 for sites in checkpoint.attention_sites.calls.values()]
    total = mean * sum(map(bool, groups))
    if not _is_reachable(groups, total):
        raise ConfigError(
            f"{flag.merge_kv} {mean}: divisors of {', '.join(map(str, groups))} never make {total}; choose another mean"
        )
    meter = DamageMeter(checkpoint, corpus.first(MAX_SENTENCES), objective=objective)
    counts, damage = groups, 0.0
    while sum(counts) > total:
        costs = []
        for module, count in enumerate(counts):
            fewer = [*counts]
            fewer[module] = max((divisor for divisor in _divisors(groups[module]) if divisor < count), default=count)
            if fewer[module] < count and _is_reachable(fewer, total, groups):
                plan = plan_merge(checkpoint.attention_sites, fewer, scores=scores)
                new_damage = meter.measure(checkpoint.alter_heads(plan, "pool").model).damage
                costs.append(((new_damage - damage) / (count - fewer[module]), module, new_damage, fewer))
        _, _, damage, counts = min(costs)
    return tuple(counts)


def _is_reachable(counts: Sequence[int], total: int, groups: Sequence[int] | None = None) -> bool:
    """Whether a total is a sum of one divisor of each of `groups` (default: `counts`), no larger than in `counts`."""
    sums = {0}
    for max_count, heads in zip(counts, groups or counts, strict=True):
        divisors = [divisor for divisor in _divisors(heads) if divisor <= max_count]
        sums = {partial_sum + divisor for partial_sum in sums for divisor in divisors}
    return total in sums


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0] or [0]
