"""Sums of what analyses observe, batch by batch; those of several processes are merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from headscope.bootstrap import FOLDS, GROUPS, GroupSums, Ratio, stack_ratios, unstack_statistics
from headscope.data.encoded import Batch
from headscope.engine.base import Analysis, refuse_non_finite
from headscope.heads import Site
from headscope.model.nonfinite import is_finite

Key: TypeAlias = tuple[str, Site, int]
"""A statistic at a layer: its name, site and layer."""
Observation: TypeAlias = tuple[Analysis, Key, Ratio]
"""What an analysis observed of a batch, sentence by sentence."""
Sums: TypeAlias = dict[str, dict[Key, GroupSums]]
"""By the name of the analysis."""


@dataclass
class Aggregator:
    """Sums of every statistic of every analysis, in groups of sentences for the bootstrap.

    `budget` is the number of bytes that the sums of one statistic may take at one (site, layer). With `detail` the
    values of single sentences are kept too.
    """

    budget: int
    detail: bool = False
    sums: Sums = field(default_factory=dict)
    detailed: dict[str, dict[str, dict[int, Tensor]]] = field(default_factory=dict)
    stacks: dict[tuple[tuple[str, Key], ...], GroupSums] = field(default_factory=dict)

    def add(self, batch: Batch, observations: Sequence[Observation]) -> None:
        """Add what was observed of a batch: statistics of one number a head together, the others by themselves."""
        alike: dict[Any, list[Observation]] = {}
        for number, (analysis, key, ratio) in enumerate(observations):
            single = ratio.total.ndim == 2 and not (ratio.per_batch or ratio.centred or ratio.coarse)
            form = (ratio.total.shape, ratio.count.shape, ratio.total.dtype, ratio.count.dtype) if single else number
            alike.setdefault(form, []).append((analysis, key, ratio))
            if self.detail and batch.kind == "text" and ratio.total.ndim == 2 and not ratio.per_batch:
                self._keep_sentences(key, batch, ratio)
        for group in alike.values():
            if len(group) > 1:
                self._add_stacked(group, batch)
            else:
                self._add_single(*group[0], batch)

    def has(self, analysis: Analysis) -> bool:
        """Whether anything of an analysis has been added."""
        return analysis.name in {*self.sums, *(name for keys in self.stacks for name, _ in keys)}

    def unstack(self) -> None:
        """Give every statistic sums of its own, when the corpus has been read."""
        for keys, stack in self.stacks.items():
            for (name, key), sums in zip(keys, unstack_statistics(stack), strict=True):
                self._include(name, key, sums)
        self.stacks.clear()

    def merge(self, sums: Sums, detailed: Mapping[str, dict[str, dict[int, Tensor]]]) -> None:
        """Add the sums of another process, and its values of single sentences."""
        for name, statistics in sums.items():
            for key, statistic in statistics.items():
                self._include(name, key, statistic)
        for name, sentences in detailed.items():
            self.detailed[name] = {**self.detailed.get(name, {}), **sentences}

    def _add_stacked(self, group: Sequence[Observation], batch: Batch) -> None:
        stacked = stack_ratios([ratio for _, _, ratio in group])
        if not is_finite(stacked.total):
            for analysis, key, ratio in group:
                refuse_non_finite(analysis, key, ratio)
        keys = tuple((analysis.name, key) for analysis, key, _ in group)
        sums = self.stacks.setdefault(keys, GroupSums(budget=len(keys) * self.budget))
        sums.add(batch.indices, stacked)

    def _add_single(self, analysis: Analysis, key: Key, ratio: Ratio, batch: Batch) -> None:
        statistics = self.sums.setdefault(analysis.name, {})
        refuse_non_finite(analysis, key, ratio)
        if key not in statistics:
            statistics[key] = GroupSums(groups=FOLDS if ratio.per_batch else GROUPS, budget=self.budget)
        statistics[key].add(torch.tensor([batch.fold]) if ratio.per_batch else batch.indices, ratio)

    def _include(self, name: str, key: Key, sums: GroupSums) -> None:
        statistics = self.sums.setdefault(name, {})
        if key in statistics:
            statistics[key].merge(sums)
        else:
            statistics[key] = sums

    def _keep_sentences(self, key: Key, batch: Batch, ratio: Ratio) -> None:
        name, site, layer = key
        values = (ratio.total / ratio.count).float().cpu()  # [b h]
        for sentence, value in zip(batch.indices.tolist(), values, strict=True):
            self.detailed.setdefault(name, {}).setdefault(f"{sentence}/{site}", {})[layer] = value
