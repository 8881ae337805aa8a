"""How many key/value heads each layer keeps, chosen by what merging them costs on text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headscope.data.corpus import Corpus
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.pruning.closed_form.allocation import MEASURED
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.removal.merge_plan import Merge, plan_merge


def with_measured_counts(checkpoint: Checkpoint, merge: Merge, corpus: Corpus, *, objective: str = "") -> Merge:
    """The merge with a number of key/value heads for every module; its one number is their mean, where there are heads.

    Greedy from all heads: each step takes the module whose next smaller divisor of its heads adds least damage a head
    saved, as `objective` ("": what fits) measures it on 128 sentences with projections averaged in place; the first of
    equal ones. Steps after which the total cannot be met any more are left out. Every step runs the model over the text
    once a module. ConfigError where no divisors have that mean.
    """
    groups = [sites[0].groups if sites[0].heads else 0 for sites in checkpoint.attention_sites.calls.values()]
    (mean,) = merge.counts
    total = mean * sum(map(bool, groups))
    if not _reachable(groups, total):
        raise ConfigError(
            f"--merge-kv {mean} --allocate measured: divisors of {', '.join(map(str, groups))} key/value heads never "
            f"make {total} in all; choose a mean from 1 to {max(groups, default=0)} that they make"
        )
    meter = DamageMeter.of(checkpoint, corpus.first(MEASURED), objective=objective)
    counts, damage = groups, 0.0
    while sum(counts) > total:
        costs = []
        for module, now in enumerate(counts):
            fewer = [*counts]
            fewer[module] = max((count for count in _divisors(groups[module]) if count < now), default=now)
            if fewer[module] < now and _reachable(fewer, total, groups):
                plan = plan_merge(checkpoint.attention_sites, fewer, scores=merge.scores)
                after = meter.measure(checkpoint.with_pooled_groups(plan).model).damage
                costs.append(((after - damage) / (now - fewer[module]), module, after, fewer))
        _, _, damage, counts = min(costs)
    return replace(merge, counts=tuple(counts), measured=False)


def _reachable(counts: Sequence[int], total: int, groups: Sequence[int] | None = None) -> bool:
    """Whether divisors of `groups`, each at most what `counts` says, make a total."""
    sums = {0}
    for most, heads in zip(counts, groups or counts, strict=True):
        sums = {sum_ + count for sum_ in sums for count in _divisors(heads) if count <= most}
    return total in sums


def _divisors(number: int) -> list[int]:
    """All divisors in order; those of 0 are 0."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0] or [0]
