"""Which key/value groups become one: sets of equal size in every layer, all heads stay (Ainslie et al. 2023, §2.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import fmean

from headscope.errors import ConfigError
from headscope.heads import HeadId, Site
from headscope.model.discovery import AttentionSite, AttentionSites
from headscope.model.removal_plan import RemovalPlan

GroupSets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Merge:
    """Into how many key/value heads every layer, or each, and the scores of heads by which (None: as they stand).

    `measured`: the one number is a mean, and how many each layer keeps is measured.
    """

    counts: tuple[int, ...]
    scores: Mapping[HeadId, float] | None = None
    measured: bool = False

    @property
    def alike(self) -> bool:
        """Whether all layers come to have the same number."""
        return len(set(self.counts)) == 1 and not self.measured


def plan_merge(
    attention_sites: AttentionSites, counts: int | Sequence[int], *, scores: Mapping[HeadId, float] | None = None
) -> RemovalPlan:
    """Merge the key/value groups of every layer into as many as `counts` says: one number for all, or one for each.

    Neighbours become one, as in the paper; with `scores` of heads those that are neighbours when groups are ordered by
    the mean score of their heads, so that heads of one kind share. Layers that share a module are merged alike. The
    heads of merged groups come to stand side by side, which `RemovalPlan.kept` says. ConfigError where the groups of a
    layer cannot be shared out, where every layer has so many of them already, for a group without a score, and for
    another number of numbers than there are modules.
    """
    modules = list(attention_sites.calls.values())
    numbers = (counts,) if isinstance(counts, int) else tuple(counts)
    typed = ",".join(map(str, numbers))
    if len(numbers) not in (1, len(modules)):
        raise ConfigError(
            f"--merge-kv {typed}: {len(numbers)} numbers of key/value heads for {len(modules)} layers; give one for "
            "all, or one for each"
        )
    kept: dict[tuple[Site, int], tuple[int, ...]] = {}
    groups: dict[tuple[Site, int], tuple[int, ...]] = {}
    merged: dict[tuple[Site, int], GroupSets] = {}
    for sites, count in zip(modules, numbers * (len(modules) // len(numbers)), strict=True):
        sets = _sets(sites, count, attention_sites, scores)
        for site in sites:
            place, shared = (site.site, site.layer), site.heads // max(site.groups, 1)
            kept[place] = tuple(
                head for members in sets for group in members for head in range(group * shared, (group + 1) * shared)
            )
            groups[place] = tuple(members[0] for members in sets)
            if len(sets) < site.groups:
                merged[place] = sets
    if not merged:
        raise ConfigError(f"--merge-kv {typed}: every layer has {typed} key/value heads as it is")
    return RemovalPlan((), kept, groups, merged)


def _sets(
    sites: Sequence[AttentionSite],
    count: int,
    attention_sites: AttentionSites,
    scores: Mapping[HeadId, float] | None,
) -> GroupSets:
    """The sets of groups of one module, ordered by their first members."""
    first = sites[0]
    if not first.heads:
        return ()
    if count < 1 or first.groups % count:
        common = reduce(math.gcd, (site.groups for site in attention_sites.order if site.heads))
        allowed = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
        raise ConfigError(
            f"--merge-kv {count}: {first.site}.{first.layer} has {first.groups} key/value heads, which cannot be "
            f"shared out to {count} alike; choose from {allowed}"
        )
    order = list(range(first.groups))
    if scores is not None:
        means = [_mean_score(sites, group, scores) for group in order]
        order.sort(key=lambda group: -means[group])
    size = first.groups // count
    return tuple(sorted(tuple(sorted(order[start : start + size])) for start in range(0, first.groups, size)))


def _mean_score(sites: Sequence[AttentionSite], group: int, scores: Mapping[HeadId, float]) -> float:
    """The mean over a group's heads, in all layers that share the module."""
    shared = sites[0].heads // sites[0].groups
    heads = [
        HeadId(site.site, site.layer, head) for site in sites for head in range(group * shared, (group + 1) * shared)
    ]
    for head in heads:
        if math.isnan(scores.get(head, math.nan)):
            raise ConfigError(f"{head} has no score, so its keys and values cannot be merged by it")
    return fmean(scores[head] for head in heads)
