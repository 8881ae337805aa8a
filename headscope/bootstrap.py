"""Running sums over a corpus in bounded memory, and bootstrap intervals from them.

Every number that headscope prints is a ratio of sums over the corpus (Σ value / Σ count: a mean over all
tokens, not a mean of sentence means) or a function of such ratios. Sums are kept per *group* of
sentences: sentence i belongs to group i mod G with G = 1024, so for up to 1024 sentences a group is one
sentence and the intervals are the ordinary bootstrap over sentences (Efron 1979); beyond that the groups
are resampled, which estimates the same variance with 1023 degrees of freedom. Statistics with many
cells (`Ratio.coarse`) use 256 groups, and fewer where they would take more than `BUDGET`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.distributed import upload, widest

GROUPS = 1024
COARSE = 256
FOLDS = 8
BUDGET = 512 * 2**20  # bytes of the group sums of one statistic, all layers together
STACKED_CELLS = 4096  # cells of several statistics that are resampled in one matrix product
SORTED_NUMBERS = 2**18  # replicates of all cells that are sorted at once
PART_NUMBERS = 2**20  # replicates of all cells in one of `Bootstrap.parts`: 8 MiB
REPLICATES = 1000
LEVEL = 0.95

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """The contribution of one batch to a statistic: totals [b *cells] and counts that broadcast to them.

    With `per_batch=True` the leading axis has one entry for the whole batch (such as a moment matrix), which is added
    to the batch's fold instead of to its sentences' groups. With `centred=True` the last axis is a histogram of offsets
    around its middle. Its length may differ between batches; counts have as many cells or one for all offsets. With
    `coarse=True` (many cells) at most 256 groups of sentences are kept.
    """

    total: Tensor
    count: Tensor
    per_batch: bool = False
    centred: bool = False
    coarse: bool = False


@dataclass(eq=False)
class GroupSums:
    """Σ value and Σ count of one statistic for every group of sentences; groups from `n_used` on have no sentences."""

    groups: int = GROUPS
    budget: int = BUDGET
    n_used: int = 0
    total: Tensor = field(default_factory=lambda: torch.empty(0))
    count: Tensor = field(default_factory=lambda: torch.empty(0))
    centred: bool = False

    def add(self, indices: Tensor, ratio: Ratio) -> None:
        """Add the ratio of one batch; `indices` [b], on the CPU, are the sentences' numbers in the corpus.

        The sums stay on the ratio's device, and the host does not wait for them. They are on the CPU if they exceed the
        budget or if the device lacks float64.
        """
        if self.n_used == 0:
            self._begin(ratio)
        total, count = ratio.total.to(self.total.device), upload(ratio.count, self.count.device)
        if ratio.centred:
            self.centred = True
            width = max(total.shape[-1], self.total.shape[-1])
            total, count = pad_centred(total, width), _pad_counts(count, width)
            self._widen(width)
        while self.total.numel() * torch.float64.itemsize > self.budget and self.groups > 2:
            self.halve()
        self.n_used = max(self.n_used, min(self.groups, int(indices.max()) + 1))
        slots = indices % self.groups
        for sums, values in ((self.total, total), (self.count, count)):
            if len(slots) == 1:  # no copy in float64: a moment matrix is large
                sums[int(slots)].add_(values[0])
            elif values.numel():
                sums.index_add_(0, upload(slots, sums.device), values.to(sums.dtype))

    def _begin(self, ratio: Ratio) -> None:
        """Start with zeros, in as many groups as the budget allows."""
        cells = ratio.total[0].numel()
        self.groups = min(self.groups, COARSE) if ratio.coarse else self.groups
        while self.groups > 2 and self.groups * cells * torch.float64.itemsize > self.budget:
            self.groups //= 2
        fits = self.groups * cells * torch.float64.itemsize <= self.budget
        for name, part in (("total", ratio.total), ("count", ratio.count)):
            device = part.device if fits and widest(part.device) is torch.float64 else torch.device("cpu")
            setattr(self, name, torch.zeros(self.groups, *part.shape[1:], dtype=torch.float64, device=device))

    def _widen(self, width: int) -> None:
        self.total, self.count = pad_centred(self.total, width), _pad_counts(self.count, width)

    def to_cpu(self) -> None:
        """Move the sums to the CPU, once the corpus has been read."""
        self.total, self.count = self.total.cpu(), self.count.cpu()

    def merge(self, other: GroupSums) -> None:
        """Add the sums over other sentences of the same corpus, such as another process's."""
        if other.n_used == 0:
            return
        if self.n_used == 0:
            vars(self).update(vars(other))
            return
        while self.groups > other.groups:
            self.halve()
        while other.groups > self.groups:
            other.halve()
        if self.centred:
            width = max(self.total.shape[-1], other.total.shape[-1])
            self._widen(width)
            other._widen(width)
            while self.total.nbytes > self.budget and self.groups > 2:
                self.halve()
                other.halve()
        self.total, self.count = self.total + other.total, self.count + other.count
        self.n_used = max(self.n_used, other.n_used)

    def leave_out_empty(self) -> None:
        """Drop groups without counts, such as those of skipped sentences, so that they are not resampled."""
        nonempty = self.count[: self.n_used].flatten(1).any(dim=1).nonzero()[:, 0]
        self.total, self.count, self.n_used = self.total[nonempty], self.count[nonempty], len(nonempty)

    def halve(self) -> None:
        """Merge groups g and g + G/2: sentence i is then in group i mod G/2."""
        self.groups //= 2
        self.total = self.total[: self.groups] + self.total[self.groups :]
        self.count = self.count[: self.groups] + self.count[self.groups :]
        self.n_used = min(self.n_used, self.groups)


def pad_centred(cells: Tensor, width: int) -> Tensor:
    """Pad the last axis with zeros on both sides to `width`."""
    missing = width - cells.shape[-1]
    return torch.nn.functional.pad(cells, (missing // 2, missing // 2)) if missing else cells


def _pad_counts(counts: Tensor, width: int) -> Tensor:
    return counts if counts.shape[-1] == 1 else pad_centred(counts, width)


@dataclass(frozen=True)
class Estimate:
    """A number over the corpus with its 95 % bootstrap interval; arrays of the statistic's cells."""

    value: Array
    low: Array
    high: Array

    @classmethod
    def exact(cls, values: Tensor) -> Estimate:
        """Numbers without a sample, such as parameters': low = high = value."""
        array = values.detach().cpu().numpy()
        return cls(array, array, array)

    def columns(self, name: str) -> dict[str, Array]:
        """Value and interval under the names of their columns."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def cell(self, name: str, at: Any = ()) -> dict[str, float]:
        """The value and interval of one cell, under the same names."""
        return {column: float(values[at]) for column, values in self.columns(name).items()}

    def at(self, cells: Any) -> Estimate:
        """The estimates of some cells, `cells` being an index of arrays."""
        return Estimate(self.value[cells], self.low[cells], self.high[cells])


def concatenate_estimates(parts: Sequence[Estimate]) -> Estimate:
    """One estimate of estimates of consecutive cells, such as parts of the heads."""
    return Estimate(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("value", "low", "high")))


class Bootstrap:
    """Resamples groups of sentences with replacement, the same resamples for every statistic.

    `seed` fixes the resamples; `replicates` is their number. Percentile intervals (Efron 1979).
    """

    def __init__(self, *, seed: int, replicates: int = REPLICATES) -> None:
        self.seed = seed
        self.replicates = replicates
        self._draws_by_groups: dict[int, Tensor] = {}

    def draws(self, groups: int) -> Tensor:
        """The number of times that each of `groups` groups is drawn in each replicate: [replicates groups].

        NaN for a single group, which has no variance to estimate.
        """
        if groups not in self._draws_by_groups:
            generator = np.random.default_rng([self.seed, groups])
            picks = generator.integers(groups, size=(self.replicates, groups))
            cells = (picks + groups * np.arange(self.replicates)[:, None]).ravel()
            counts = np.bincount(cells, minlength=self.replicates * groups).reshape(picks.shape)
            self._draws_by_groups[groups] = torch.from_numpy(counts).double() * (1 if groups > 1 else torch.nan)
        return self._draws_by_groups[groups]

    def sums(self, group_sums: GroupSums) -> tuple[Tensor, Tensor]:
        """Totals and counts [1 + replicates *cells]: the whole corpus first, then each replicate."""
        n_used = group_sums.n_used
        return self._resample(group_sums.total[:n_used]), self._resample(group_sums.count[:n_used])

    def parts(self, group_sums: GroupSums) -> Iterator[tuple[Tensor, Tensor]]:
        """`sums` of a few heads at a time, if the first axis of cells is heads: [1 + replicates h *cells].

        This bounds the memory of histograms with thousands of cells a head. Counts that all heads share are
        [1 + replicates 1 *cells].
        """
        total = group_sums.total[: group_sums.n_used]
        count = self._resample(group_sums.count[: group_sums.n_used])
        numbers = total[0, :1].numel() * (1 + self.replicates)
        for heads in torch.arange(total.shape[1]).split(max(1, PART_NUMBERS // numbers)):
            yield self._resample(total[:, heads]), count if count.shape[1] == 1 else count[:, heads]

    def _resample(self, groups: Tensor) -> Tensor:
        """Sums of groups [g *cells] over the corpus and over each replicate: [1 + r *cells]."""
        flat = groups.flatten(1).T  # [c g]
        corpus = flat.sum(dim=-1)
        sums = torch.zeros(len(flat), 1 + self.replicates, dtype=torch.float64)  # a row a cell, as rows are sorted next
        occurring = flat.any(dim=-1).nonzero()[:, 0]  # cells of rare offsets are often zero in all groups
        sums[:, 0] = corpus
        sums[:, 1:].index_copy_(0, occurring, flat[occurring] @ self.draws(len(groups)).T)
        return sums.T.view(-1, *groups.shape[1:])

    def ratio(self, group_sums: GroupSums) -> Estimate:
        """Σ value / Σ count with its interval; NaN without any count, and no interval with counts in one group only."""
        total, count = self.sums(group_sums)
        return interval(total / count, units=units_of(group_sums.count[: group_sums.n_used]))

    def over_units(self, total: Tensor, count: Tensor, *, units: Tensor | None = None) -> Estimate:
        """Σ total / Σ count over rows [n *cells], with intervals over `units`, the sentence number of every row.

        Without `units` every row is a unit, such as a trial or a token.
        """
        sums = GroupSums()
        sums.add(torch.arange(len(total)) if units is None else units, Ratio(total, count))
        return self.ratio(sums)

    def ratios(self, group_sums: Sequence[GroupSums]) -> list[Estimate]:
        """`ratio` of each statistic; statistics of one shape are resampled together, which is faster."""
        estimates: dict[int, Estimate] = {}
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, statistic in enumerate(group_sums):
            alike.setdefault((statistic.n_used, statistic.total.shape, statistic.count.shape), []).append(number)
        for (n_used, cells, counts), numbers in alike.items():
            group_size = max(1, STACKED_CELLS // max(1, cells[1:].numel())) if len(cells) == len(counts) else 1
            for part in (numbers[first : first + group_size] for first in range(0, len(numbers), group_size)):
                if len(part) == 1:
                    estimates[part[0]] = self.ratio(group_sums[part[0]])
                    continue
                total = torch.stack([group_sums[number].total for number in part], dim=1)
                count = torch.stack([group_sums[number].count for number in part], dim=1)
                estimate = self.ratio(GroupSums(n_used=n_used, total=total, count=count))
                estimates |= {number: estimate.at(index) for index, number in enumerate(part)}
        return [estimates[number] for number in range(len(group_sums))]

    def function(self, compute: Callable[[Tensor, Tensor], Tensor], group_sums: GroupSums) -> Estimate:
        """The estimate of any function of a statistic's totals and counts, which have a leading replicate axis."""
        return interval(compute(*self.sums(group_sums)))


def units_of(counts: Tensor) -> Tensor:
    """The number of groups with a count in each cell [*cells], of counts [g *cells]."""
    return (counts != 0).sum(dim=0)


def interval(samples: Tensor, *, units: Tensor | None = None) -> Estimate:
    """Value and interval of samples [1 + replicates *cells], the value first; NaN replicates are left out.

    Cells with fewer than two `units`, which broadcast to [*cells], have no interval.
    """
    value, replicates = samples[0].numpy(), samples[1:]
    cells = replicates.reshape(len(replicates), -1).T  # [cells r], as they lie in memory where they are resampled
    parts = [_bounds(part) for part in cells.split(max(1, SORTED_NUMBERS // max(1, len(replicates))))]
    low, high = (np.concatenate(bounds).reshape(value.shape) for bounds in zip(*parts, strict=True))
    if units is not None:
        low, high = (np.where(units.numpy() > 1, bound, np.nan) for bound in (low, high))
    return Estimate(value, low, high)


def _bounds(replicates: Tensor) -> list[Array]:
    """Both bounds of every cell of replicates [cells r]: linearly interpolated quantiles, without NaN."""
    by_size = np.sort(replicates.contiguous().numpy(), axis=-1)  # NaN last; much faster than torch
    last = np.maximum((~np.isnan(by_size)).sum(axis=-1) - 1, 0)
    bounds = []
    for share in ((1 - LEVEL) / 2, (1 + LEVEL) / 2):
        rank = last * share
        lower = rank.astype(int)
        ends = np.stack([lower, np.minimum(lower + 1, last)], axis=-1)
        below, above = np.take_along_axis(by_size, ends, axis=-1).T
        bounds.append(below + (above - below) * (rank - lower))
    return bounds
