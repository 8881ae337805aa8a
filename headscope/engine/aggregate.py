"""Sums of the observations of analyses, over batches and processes, and the tables made from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import FOLDS, GROUPS, Array, Bootstrap, GroupSums, Ratio
from headscope.data.encoded import Batch
from headscope.description.features import describe_heads
from headscope.description.tokens import TokenReader
from headscope.distributed import upload
from headscope.engine.base import Aggregates, Analysis, AnalysisReport
from headscope.engine.evidence.need import agreement_table, function_need_table, need_table, significant_agreement
from headscope.engine.evidence.report import COLUMNS
from headscope.errors import NumericalError, flag
from headscope.files.writing import hold_signals
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site, all_heads
from headscope.model.nonfinite import is_finite
from headscope.progress import Progress

Key: TypeAlias = tuple[str, Site, int]
"""A statistic at a layer: its name, site and layer."""
Sums: TypeAlias = dict[str, dict[Key, GroupSums]]
"""Sums of statistics, by the name of the analysis."""
Statistic: TypeAlias = tuple[str, Key]
"""The name of an analysis, and the key of one of its statistics."""
STRIP = 64  # rows of a Gram matrix that are computed at a time


StackKey: TypeAlias = tuple[tuple[Statistic, int, int], ...]
"""Statistics that are columns of one tensor, each with its number of columns among the totals and among the counts."""


@dataclass
class Aggregator:
    """Sums of every statistic of every analysis, in groups of sentences for the bootstrap.

    `budget` is the number of bytes for the sums of one statistic at one (site, layer). With `detail` the values of
    single sentences are kept too. Sums stay on the device of the observations until `unstack`. Statistics with one
    number a head are added together, as columns of one tensor (`stacks`), others by themselves (`separate_sums`).
    """

    budget: int
    detail: bool = False
    sums: Sums = field(default_factory=dict)
    details: dict[str, dict[str, dict[int, Tensor]]] = field(default_factory=dict)
    stacks: dict[StackKey, GroupSums] = field(default_factory=dict)
    separate_sums: dict[Statistic, GroupSums] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """Names of the analyses with observations."""

    def add(self, batch: Batch, observations: Mapping[Statistic, Ratio]) -> Iterator[Tensor]:
        """Add the observations of a batch, and yield the added tensors: if these are finite, so are the sums."""
        by_device: dict[torch.device, dict[Statistic, Ratio]] = {}
        for statistic, ratio in observations.items():
            self.names.add(statistic[0])
            if self.detail and batch.kind == "text" and ratio.total.ndim == 2 and not ratio.per_batch:
                name, site, layer = statistic[1]
                by_sentence, means = self.details.setdefault(name, {}), ratio.total / ratio.count.to(ratio.total.device)
                for sentence, value in zip(batch.indices.tolist(), means.float().cpu(), strict=True):  # [h]
                    by_sentence.setdefault(f"{sentence}/{site}", {})[layer] = value
            is_plain = not (ratio.per_batch or ratio.centred or ratio.coarse)
            if is_plain and ratio.total.ndim == ratio.count.ndim == 2 and len(ratio.total) == len(ratio.count):
                by_device.setdefault(ratio.total.device, {})[statistic] = ratio
            else:
                if statistic not in self.separate_sums:
                    groups = FOLDS if ratio.per_batch else GROUPS
                    self.separate_sums[statistic] = GroupSums(groups=groups, budget=self.budget)
                numbers = torch.tensor([batch.fold]) if ratio.per_batch else batch.indices
                self.separate_sums[statistic].add(numbers, ratio)
                if not ratio.centred:  # histograms are whole numbers
                    yield ratio.total
        for device, group in by_device.items():
            yield self._add_packed(group, batch, device)

    def refuse_non_finite(self) -> None:
        """NumericalError naming the analysis whose sums are not finite; called after a pass with such numbers."""
        self.unstack()
        for name, statistics in self.sums.items():
            for (_, site, layer), sums in statistics.items():
                if not is_finite(sums.total):
                    raise NumericalError(
                        f"{name} gives NaN or infinite numbers at {site}.{layer}; leave it out with {flag.skip} "
                        f"{name}, or take a wider {flag.dtype}"
                    )

    def unstack(self) -> None:
        """Split the sums by statistic, on the CPU, after the corpus has been read."""
        for statistics, stack in self.stacks.items():
            stack.to_cpu()
            begin = 0
            for statistic, totals, counts in statistics:
                middle, end = begin + totals, begin + totals + counts
                sums = GroupSums(groups=stack.groups, budget=self.budget)
                sums.n_used = stack.n_used
                sums.total, sums.count = stack.total[:, begin:middle].clone(), stack.total[:, middle:end].clone()
                self._merge(*statistic, sums)
                begin = end
        for statistic, sums in self.separate_sums.items():
            sums.to_cpu()
            self._merge(*statistic, sums)
        self.stacks.clear()
        self.separate_sums.clear()

    def _add_packed(self, group: Mapping[Statistic, Ratio], batch: Batch, device: torch.device) -> Tensor:
        columns, statistics, count_on_device = [], [], {}
        for statistic, ratio in group.items():
            if id(ratio.count) not in count_on_device:  # several statistics have the same one
                count_on_device[id(ratio.count)] = upload(ratio.count, device)
            columns += [ratio.total, count_on_device[id(ratio.count)]]
            statistics.append((statistic, ratio.total.shape[1], ratio.count.shape[1]))
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


def gram(flat: Tensor) -> Tensor:
    """The Gram matrix flatᵀ flat [d d] of flat [n d].

    On a CPU only the upper triangle is computed, in strips of `STRIP` rows, and mirrored; on an accelerator it is one
    product.
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


def heads_table(heads: Sequence[HeadId], reports: Sequence[AnalysisReport]) -> pd.DataFrame:
    """One row per head: site, layer, head, every measure with its interval, the labels, and those without evidence."""
    columns: dict[str, list[Any]] = {
        "site": [head.site.value for head in heads],
        "layer": [head.layer for head in heads],
        "head": [head.head for head in heads],
    }
    for report in reports:
        for name, texts in report.texts.items():
            columns[name] = [texts.get(head, "") for head in heads]
        for name, estimates in report.columns.items():
            cells = [(estimates.get((head.site, head.layer)), head.head) for head in heads]
            for end, part in (("", "value"), ("_low", "low"), ("_high", "high")):
                columns[name + end] = [getattr(of, part)[at].item() if of else float("nan") for of, at in cells]
    for name, kind in (("functions", "labels"), ("functions_unsupported", "unsupported")):
        of_reports: list[dict[HeadId, list[str]]] = [getattr(report, kind) for report in reports]
        columns[name] = [";".join(text for texts in of_reports for text in texts.get(head, ())) for head in heads]
    return pd.DataFrame(columns)


def stack_layers(layers: Mapping[int, Tensor]) -> Array:
    """Values [… h] of each layer as one array [… layer h], filled with NaN for fewer heads or positions."""
    *positions, heads = (max(sizes) for sizes in zip(*(values.shape for values in layers.values()), strict=True))
    by_layer: Array = np.full((*positions, max(layers) + 1, heads), np.nan)
    for layer, values in layers.items():
        cells: Any = (*map(slice, values.shape[:-1]), layer, slice(values.shape[-1]))
        by_layer[cells] = values
    return by_layer


def make_reports(
    analyses: Sequence[Analysis], sums: Sums, bootstrap: Bootstrap, progress: Progress
) -> dict[Analysis, AnalysisReport]:
    """The reports of the analyses; a KeyboardInterrupt leaves out those that follow, and is raised if it stops all."""
    reports: dict[Analysis, AnalysisReport] = {}
    with suppress(KeyboardInterrupt), torch.no_grad():
        for fits in (False, True):  # what takes long comes last, and may be stopped
            with nullcontext() if fits else hold_signals():
                for analysis in (analysis for analysis in analyses if analysis.fits is fits):
                    aggregates = Aggregates(sums.get(analysis.name, {}), bootstrap, progress)
                    reports[analysis] = analysis.report(aggregates)
    if analyses and not reports:
        raise KeyboardInterrupt
    return {analysis: reports[analysis] for analysis in analyses if analysis in reports}


def study_tables(
    reports: Mapping[Analysis, AnalysisReport], sums: Sums, bootstrap: Bootstrap, checkpoint: Checkpoint
) -> dict[str, pd.DataFrame]:
    """The tables of a study: "heads", those of every analysis, labels, and comparisons of importances."""
    site_layers = {(site, layer) for statistics in sums.values() for _, site, layer in statistics}
    layout_seen = {
        layer: heads for layer, heads in checkpoint.layout.items() if layer in site_layers or not site_layers
    }
    heads = heads_table(list(all_heads(layout_seen)), list(reports.values()))
    tables = {"heads": heads}
    for report in reports.values():
        tables |= report.tables
    if any(analysis.functions for analysis in reports):
        evidence = [row for report in reports.values() for row in report.evidence]
        tables["labels"] = pd.DataFrame(evidence, columns=[*COLUMNS])
    for group in ("importance", "prompts"):
        members = [analysis for analysis in reports if analysis.group == group]
        measures = [m for analysis in members for m in analysis.measures if m.keep and m.name in heads]
        sums_by_measure = {key: value for analysis in members for key, value in sums.get(analysis.name, {}).items()}
        if measures and group == "importance":
            tables["importance"] = need_table(heads, measures, sums_by_measure)
            tables["importance_agreement"] = agreement_table(heads, measures)
            if len(functions := function_need_table(heads, measures)):
                tables["importance_functions"] = functions
        elif measures:
            exact_first = sorted(measures, key=lambda measure: measure.name != "patching")
            tables["patching"] = need_table(heads, exact_first, sums_by_measure)
            tables["patching_agreement"] = significant_agreement(tables["patching"], sums_by_measure, bootstrap)
    if "explained" in heads:
        heads["description"] = describe_heads(heads, tables, TokenReader.of(checkpoint, "target").marks)
    return tables
