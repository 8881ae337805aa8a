"""What an analysis is given after the corpus, its sums, and what it makes of them: columns, tables, labels, remarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.bootstrap import Array, Bootstrap, Estimate, GroupSums, Ratio
from headscope.heads import HeadId, Site
from headscope.progress import Progress, no_progress

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class AnalysisReport:
    """What an analysis found: columns of heads.csv, estimates [h] each, its own tables and arrays, labels, and remarks.

    `unsupported` are labels that the estimates alone would give, with the reason why the evidence does not suffice;
    `evidence` is that of both, a row of labels.csv each (see `headscope.engine.evidence.labels`). `detail` has arrays
    of single sentences beside those that the driver collects, by file and by name in it. `files` are texts for other
    programs, by their path in the run: `NAME/…`, in a folder of the analysis' own name.
    """

    columns: dict[str, dict[tuple[Site, int], Estimate]] = field(default_factory=dict)
    texts: dict[str, dict[HeadId, str]] = field(default_factory=dict)
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    detail: dict[str, dict[str, Array]] = field(default_factory=dict)
    labels: dict[HeadId, list[str]] = field(default_factory=dict)
    unsupported: dict[HeadId, list[str]] = field(default_factory=dict)
    evidence: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


Sums = Mapping[tuple[str, Site, int], GroupSums]
"""Sums of each named statistic of one analysis at each (site, layer)."""


@dataclass(frozen=True)
class Aggregates:
    """The sums of one analysis after the corpus, with the bootstrap that turns them into estimates.

    `progress` shows how far a report is that takes long.
    """

    sums: Sums
    bootstrap: Bootstrap
    progress: Progress = no_progress

    def over_units(self, statistics: Mapping[tuple[str, Site, int], Ratio]) -> Aggregates:
        """Sums over units [n] that are no sentences: tokens, words, trials."""
        sums: dict[tuple[str, Site, int], GroupSums] = {}
        for key, ratio in statistics.items():
            sums[key] = GroupSums()
            sums[key].add(torch.arange(len(ratio.total)), ratio)
        return Aggregates(sums, self.bootstrap, self.progress)

    def site_layers(self, name: str) -> list[tuple[Site, int]]:
        """Where a statistic was measured."""
        return [(site, layer) for statistic, site, layer in self.sums if statistic == name]

    def group_sums(self, name: str, site_layer: tuple[Site, int]) -> GroupSums:
        """The sums of a statistic at one (site, layer)."""
        return self.sums[name, site_layer[0], site_layer[1]]

    def ratio(self, name: str, site: Site, layer: int) -> Estimate:
        """A statistic's mean with its interval."""
        return self.bootstrap.ratio(self.sums[name, site, layer])

    def by_sentence(self, name: str, site_layer: tuple[Site, int]) -> tuple[Tensor, Tensor]:
        """Totals and counts of every sentence [g *cells], or of groups of them where the corpus has many."""
        sums = self.group_sums(name, site_layer)
        return sums.total[: sums.used], sums.count[: sums.used]

    def function(self, name: str, of: Callable[[Tensor, Tensor], Tensor]) -> dict[tuple[Site, int], Estimate]:
        """A function of a statistic's totals and counts, both with a leading axis of replicates, as a column."""
        return {place: self.bootstrap.function(of, self.group_sums(name, place)) for place in self.site_layers(name)}

    def column(self, name: str) -> dict[tuple[Site, int], Estimate]:
        """A statistic of one number a head as a column."""
        site_layers = self.site_layers(name)
        estimates = self.bootstrap.ratios([self.group_sums(name, site_layer) for site_layer in site_layers])
        return dict(zip(site_layers, estimates, strict=True))


def head_table(places: Mapping[tuple[Site, int], Mapping[str, Any]]) -> pd.DataFrame:
    """A row a head: site, layer, head, then by name values [h], text for all heads, and estimates with their ends."""
    import pandas as pd

    rows = []
    for (site, layer), parts in places.items():
        columns: dict[str, Any] = {"site": site.value, "layer": layer, "head": 0}
        for name, part in parts.items():
            part = part.numpy() if isinstance(part, Tensor) else part
            columns |= part.columns(name) if isinstance(part, Estimate) else {name: part}
        frame = pd.DataFrame(columns)
        rows.append(frame.assign(head=range(len(frame))))
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()


def head_ids(site_layer: tuple[Site, int], count: int) -> Sequence[HeadId]:
    """The heads of one (site, layer)."""
    return [HeadId(*site_layer, head) for head in range(count)]
