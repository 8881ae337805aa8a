"""Sums of what analyses observe, batch by batch; those of several processes are merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from headscope.bootstrap import FOLDS, GROUPS, GroupSums, Ratio
from headscope.data.encoded import Batch
from headscope.distributed import upload
from headscope.engine.base import Analysis, refuse_non_finite
from headscope.heads import Site

Key: TypeAlias = tuple[str, Site, int]
"""A statistic at a layer: its name, site and layer."""
Sums: TypeAlias = dict[str, dict[Key, GroupSums]]
"""By the name of the analysis."""
STRIP = 64
"""Rows of a product of a matrix with itself that are made at a time."""


class Statistic(NamedTuple):
    """What an analysis measures at one layer."""

    analysis: str
    name: str
    site: Site
    layer: int

    @property
    def key(self) -> Key:
        """Its name and where it is measured."""
        return self.name, self.site, self.layer


@dataclass(frozen=True)
class Observation:
    """What an analysis observed of a batch, sentence by sentence."""

    analysis: Analysis
    statistic: Statistic
    ratio: Ratio

    @property
    def single(self) -> bool:
        """Whether there is one number a head, by sentences."""
        ratio = self.ratio
        plain = not (ratio.per_batch or ratio.centred or ratio.coarse)
        return plain and ratio.total.ndim == ratio.count.ndim == 2 and len(ratio.total) == len(ratio.count)


Packed: TypeAlias = tuple[tuple[Statistic, int, int], ...]
"""Statistics whose totals and counts stand side by side in one tensor, each with how many columns both have."""


@dataclass
class Aggregator:
    """Sums of every statistic of every analysis, in groups of sentences for the bootstrap.

    `budget` is the number of bytes that the sums of one statistic may take at one (site, layer). With `detail` the
    values of single sentences are kept too. Sums stay on the device where the numbers are made until `unstack`.
    """

    budget: int
    detail: bool = False
    sums: Sums = field(default_factory=dict)
    details: dict[str, dict[str, dict[int, Tensor]]] = field(default_factory=dict)
    stacks: dict[Packed, GroupSums] = field(default_factory=dict)
    separate_sums: dict[Statistic, GroupSums] = field(default_factory=dict)
    analyses: dict[str, Analysis] = field(default_factory=dict)

    def add(self, batch: Batch, observations: Sequence[Observation]) -> Iterator[Tensor]:
        """Add what was observed of a batch: statistics of one number a head together, the others by themselves.

        Yields what was added: where that is finite, so are the sums.
        """
        by_device: dict[torch.device, list[Observation]] = {}
        for observation in observations:
            self.analyses[observation.analysis.name] = observation.analysis
            ratio = observation.ratio
            if self.detail and batch.kind == "text" and ratio.total.ndim == 2 and not ratio.per_batch:
                self._keep_sentences(observation.statistic, batch, ratio)
            if observation.single:
                by_device.setdefault(ratio.total.device, []).append(observation)
            else:
                if observation.statistic not in self.separate_sums:
                    groups = FOLDS if ratio.per_batch else GROUPS
                    self.separate_sums[observation.statistic] = GroupSums(groups=groups, budget=self.budget)
                numbers = torch.tensor([batch.fold]) if ratio.per_batch else batch.indices
                self.separate_sums[observation.statistic].add(numbers, ratio)
                if not ratio.centred:  # histograms are whole numbers
                    yield ratio.total
        for device, group in by_device.items():
            yield self._add_packed(group, batch, device)

    def has(self, analysis: Analysis) -> bool:
        """Whether anything of an analysis has been added."""
        return analysis.name in self.analyses

    def refuse_non_finite(self) -> None:
        """NumericalError naming the analysis whose sums are not finite, for a pass in which some numbers were not."""
        self.unstack()
        for name, statistics in self.sums.items():
            for key, sums in statistics.items():
                refuse_non_finite(self.analyses[name], key, sums.total)

    def unstack(self) -> None:
        """Give every statistic sums of its own on the CPU, when the corpus has been read."""
        for statistics, stack in self.stacks.items():
            stack.settle()
            begin = 0
            for statistic, totals, counts in statistics:
                middle, end = begin + totals, begin + totals + counts
                sums = GroupSums(groups=stack.groups, budget=self.budget)
                sums.used = stack.used
                sums.total, sums.count = stack.total[:, begin:middle].clone(), stack.total[:, middle:end].clone()
                self._merge(statistic.analysis, statistic.key, sums)
                begin = end
        for statistic, sums in self.separate_sums.items():
            sums.settle()
            self._merge(statistic.analysis, statistic.key, sums)
        self.stacks.clear()
        self.separate_sums.clear()

    def merge(self, sums: Sums, sentence_values: Mapping[str, dict[str, dict[int, Tensor]]]) -> None:
        """Add the sums of another process, and its values of single sentences."""
        for name, statistics in sums.items():
            for key, statistic in statistics.items():
                self._merge(name, key, statistic)
        for name, sentences in sentence_values.items():
            self.details[name] = {**self.details.get(name, {}), **sentences}

    def _add_packed(self, group: Sequence[Observation], batch: Batch, device: torch.device) -> Tensor:
        columns, statistics, count_on_device = [], [], {}
        for observation in group:
            ratio = observation.ratio
            if id(ratio.count) not in count_on_device:  # several statistics have the same one
                count_on_device[id(ratio.count)] = upload(ratio.count, device)
            columns += [ratio.total, count_on_device[id(ratio.count)]]
            statistics.append((observation.statistic, ratio.total.shape[1], ratio.count.shape[1]))
        values = torch.cat(columns, dim=1)
        sums = self.stacks.setdefault(tuple(statistics), GroupSums(budget=len(group) * self.budget))
        sums.add(batch.indices, Ratio(values, values[:, :0]))
        return values

    def _merge(self, name: str, key: Key, sums: GroupSums) -> None:
        statistics = self.sums.setdefault(name, {})
        if key in statistics:
            statistics[key].merge(sums)
        else:
            statistics[key] = sums

    def _keep_sentences(self, statistic: Statistic, batch: Batch, ratio: Ratio) -> None:
        values = (ratio.total / ratio.count.to(ratio.total.device)).float().cpu()  # [b h]
        by_sentence = self.details.setdefault(statistic.name, {})
        for sentence, value in zip(batch.indices.tolist(), values, strict=True):
            by_sentence.setdefault(f"{sentence}/{statistic.site}", {})[statistic.layer] = value


def add_ratios(earlier: Ratio, later: Ratio) -> Ratio:
    """What blocks of queries contribute together."""
    return replace(later, total=earlier.total + later.total, count=earlier.count + later.count)


def gram(flat: Tensor) -> Tensor:
    """flatᵀ flat of [n d]: what lies right of the diagonal, by strips of `STRIP` rows, and its mirror image.

    On an accelerator it is one product.
    """
    if flat.device.type != "cpu":
        return flat.T @ flat
    width = flat.shape[1]
    product = flat.new_empty(width, width)
    for top in range(0, width, STRIP):
        strip = slice(top, top + STRIP)
        torch.mm(flat[:, strip].T, flat[:, top:], out=product[strip, top:])
        product[top + STRIP :, strip] = product[strip, top + STRIP :].T
    return product
