"""Reports of analyses: columns, tables, remarks, and labels with the evidence that they need.

A label needs evidence that a head's true value passes the threshold, not only that its estimate does. A test asks
whether the value over all text of this kind is at most the threshold (see `significance`). Percentile intervals of few
sentences are too narrow (Hesterberg 2015), so below ten there are no labels.

All tests of one analysis, of every head, relation and direction with enough instances, are one family. A label is given
where Benjamini & Hochberg's procedure (1995) rejects at 5 %: at most one in twenty of the labels given is expected to
be wrong, and in a model that has no such head the chance of a single label is at most 5 %. Tests share sentences, so
they are dependent; the procedure holds under positive dependence (Benjamini & Yekutieli 2001). The simultaneous
bootstrap is not used: its smallest p-value is one over `--bootstrap`, too large for thousands of tests, and it needs a
variance, which is zero where all sentences agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Array, Bootstrap, Estimate, GroupSums, Ratio
from headscope.config import LabelOptions
from headscope.config.declarations import head_functions, measure_of
from headscope.config.option import MIN_UNITS
from headscope.description.pair_function import PAIR_FUNCTIONS
from headscope.engine.evidence.significance import FALSE_DISCOVERIES, above_chance, adjust, share_p
from headscope.heads import HeadId, Site, SiteLayer
from headscope.progress import Progress, no_progress


@dataclass
class AnalysisReport:
    """The report of an analysis: columns of heads.csv, estimates [h] each, tables, arrays, labels, and remarks.

    `unsupported` are labels that the estimates alone would give, each with the reason why its evidence does not
    suffice. `evidence` has a row of labels.csv for every label of `labels` and `unsupported`. `detail` has arrays of
    single sentences beside those that the driver collects, by file and by name in it. `files` are texts for other
    programs, by their path in the run: `NAME/…`, in a folder of the analysis' own name.
    """

    columns: dict[str, dict[SiteLayer, Estimate]] = field(default_factory=dict)
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
    """The sums of one analysis over the whole corpus, with the bootstrap that turns them into estimates.

    `progress` counts the steps of a report that takes long.
    """

    sums: Sums
    bootstrap: Bootstrap
    progress: Progress = no_progress

    def over_units(self, statistics: Mapping[tuple[str, Site, int], Ratio]) -> Aggregates:
        """Aggregates of statistics whose units [n] are not sentences but tokens, words or trials."""
        sums: dict[tuple[str, Site, int], GroupSums] = {}
        for key, ratio in statistics.items():
            sums[key] = GroupSums()
            sums[key].add(torch.arange(len(ratio.total)), ratio)
        return Aggregates(sums, self.bootstrap, self.progress)

    def site_layers(self, name: str) -> list[SiteLayer]:
        """Every (site, layer) where a statistic was measured."""
        return [(site, layer) for statistic, site, layer in self.sums if statistic == name]

    def ratio(self, name: str, site: Site, layer: int) -> Estimate:
        """A statistic's mean with its interval."""
        return self.bootstrap.ratio(self.sums[name, site, layer])

    def by_sentence(self, name: str, site_layer: SiteLayer) -> tuple[Tensor, Tensor]:
        """Totals and counts of every sentence [g *cells], or of groups of sentences if the corpus has many."""
        sums = self.sums[(name, *site_layer)]
        return sums.total[: sums.n_used], sums.count[: sums.n_used]

    def function(self, name: str, of: Callable[[Tensor, Tensor], Tensor]) -> dict[SiteLayer, Estimate]:
        """Estimates, as a column, of a function of a statistic's totals and counts [replicates …]."""
        return {
            site_layer: self.bootstrap.function(of, self.sums[(name, *site_layer)])
            for site_layer in self.site_layers(name)
        }

    def column(self, name: str) -> dict[SiteLayer, Estimate]:
        """Estimates of the mean of a statistic with one number a head, as a column."""
        site_layers = self.site_layers(name)
        estimates = self.bootstrap.ratios([self.sums[(name, *site_layer)] for site_layer in site_layers])
        return dict(zip(site_layers, estimates, strict=True))


def head_table(site_layers: Mapping[SiteLayer, Mapping[str, Any]]) -> pd.DataFrame:
    """One row a head: site, layer, head, then by name values [h], one text for all, or an estimate with interval."""
    rows = []
    for (site, layer), parts in site_layers.items():
        columns: dict[str, Any] = {"site": site.value, "layer": layer, "head": 0}
        for name, part in parts.items():
            part = part.numpy() if isinstance(part, Tensor) else part
            columns |= part.columns(name) if isinstance(part, Estimate) else {name: part}
        frame = pd.DataFrame(columns)
        rows.append(frame.assign(head=range(len(frame))))
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()


def head_ids(site_layer: SiteLayer, count: int) -> Sequence[HeadId]:
    """The heads of one (site, layer)."""
    return [HeadId(*site_layer, head) for head in range(count)]


LABEL_WORDS = {
    "aligned:predicted": "looks at the source word of the token being predicted",
    "aligned:fed": "looks at the source word of the token that was fed",
    "aligned:successor": "looks at the word after the source word of the token that was fed",
    "averages:after": "gives what follows even weight",
    "averages:before": "gives what precedes even weight",
}
PARTS = {"q": "queries", "k": "keys", "v": "values"}


def describe_label(label: str) -> str:
    """A label in words: `positional:-1` → looks at the token before.

    A label without a wording of its own gets the meaning of its function, or stays as it is if no analysis declares
    that function.
    """
    kind, _, detail = label.partition(":")
    if label in LABEL_WORDS:
        return LABEL_WORDS[label]
    if kind == "positional" and detail:
        return _offset(int(detail))
    if kind == "looks" and detail in PAIR_FUNCTIONS.names():
        return PAIR_FUNCTIONS.get(detail).summary
    if kind == "syntactic" and detail:
        ends = ("head", "dependent") if detail.endswith(">") else ("dependent", "head")
        return f"looks from {ends[0]} to {ends[1]} along {detail[:-1]}"
    if kind.endswith("-composition") and kind[0] in PARTS and detail:
        return f"its {PARTS[kind[0]]} read what head {detail} writes"
    function = head_functions().get(kind)
    return function.meaning.removeprefix(f"{kind}: ") if function else label


def _offset(offset: int) -> str:
    if offset == 0:
        return "looks at the token itself"
    where = "before" if offset < 0 else "after"
    return f"looks at the token {where}" if abs(offset) == 1 else f"looks {abs(offset)} tokens {where}"


@dataclass(frozen=True)
class Rate:
    """The words after a label's rate, `of` ("of its largest weights"), and after its baseline, `against` ("by chance").

    `value` and `baseline` [h] or [h c] are the numbers to print, if these are not the tested ones.
    """

    of: str
    against: str = "by chance"
    value: Array | None = None
    baseline: Array | None = None

    def phrase(self, label: str, value: float, baseline: float) -> str:
        """A label in words with its number: "…: 0.72 of the words, 0.35 by chance"."""
        text = f"{describe_label(label)}: {value:.2f} {self.of}"
        return text if np.isnan(baseline) else f"{text}, {baseline:.2f} {self.against}"


Texts = npt.NDArray[np.object_]
COLUMNS = (
    *("site", "layer", "head", "label", "description", "given", "measure", "value", "value_low", "value_high"),
    *("threshold", "baseline", "instances", "units", "p", "p_adjusted", "tests", "missing"),
)
"""Columns of `labels.csv`: every label that the estimates alone would give, its evidence, and what is missing."""


@dataclass(frozen=True)
class LabelRule:
    """A head gets `label` if its `measure` is at least `threshold`, and twice the statistic `chance` if one is named.

    `rate` says what the measure is a share of (default: its title).
    """

    label: str
    measure: str
    threshold: float
    chance: str = ""
    rate: Rate | None = None


@dataclass
class LabelTests:
    """The tests of one analysis: labels for heads whose evidence suffices, reasons for those whose does not.

    With `by_paper` every head whose estimate reaches the threshold has its label, as Voita et al. (2019) label heads;
    the evidence is reported all the same.
    """

    min_instances: int
    by_paper: bool = False
    tables: list[pd.DataFrame] = field(default_factory=list)

    @classmethod
    def of(cls, options: LabelOptions) -> LabelTests:
        """Tests with the options of an analysis."""
        return cls(options.min_instances, by_paper=is_published(options))

    def add_rule(self, rule: LabelRule, column: Mapping[SiteLayer, Estimate], aggregates: Aggregates) -> None:
        """Test a rule over sentences, for every head of the column of its measure.

        With `by_paper` the threshold alone counts.
        """
        for site_layer, value in column.items():
            sums = aggregates.by_sentence(rule.measure, site_layer)
            about: dict[str, Any] = {"threshold": rule.threshold, "counts": sums[1], "rate": rule.rate}
            if not rule.chance:
                p = share_p(*sums, threshold=rule.threshold)
            else:
                by_chance, _ = aggregates.by_sentence(rule.chance, site_layer)
                p, thresholds = above_chance(sums[0], by_chance, sums[1], threshold=rule.threshold, times=2.0)
                about["baseline"] = (by_chance.sum(dim=0) / sums[1].sum(dim=0)).numpy()
                about["threshold"] = rule.threshold if self.by_paper else thresholds
            self.add(site_layer, rule.measure, rule.label, value, p, **about)

    def add(
        self,
        site_layer: SiteLayer,
        measure: str,
        labels: Texts | str,
        value: Estimate,
        p: Array,
        *,
        threshold: Array | float,
        counts: Tensor | None,
        baseline: Array | float = np.nan,
        rate: Rate | None = None,
    ) -> None:
        """Add tests of heads [h], or of heads and cells [h c]; `counts` [g h|1 (c)] are instances of every sentence.

        Numbers that are not from a sample of text, such as those of weights, have no counts (None); their `p` is the
        probability of such a number by chance. `rate` says of what the measure is a share (default: its title).
        """
        shape = (*value.value.shape, 1)[:2]
        instances = torch.zeros(1, *shape) if counts is None else counts.reshape(len(counts), -1, shape[1])
        rate = rate or Rate(f"({measure_of(measure).words})")
        columns: dict[str, Any] = {
            "label": np.asarray(labels, dtype=object),
            **value.columns("value"),
            "threshold": threshold,
            "baseline": baseline,
            "instances": instances.sum(dim=0).numpy().astype(int),
            "units": (instances > 0).sum(dim=0).numpy(),
            "p": p,
            "rate_value": value.value if rate.value is None else rate.value,
            "rate_baseline": baseline if rate.baseline is None else rate.baseline,
        }
        cells: dict[str, Any] = {"head": np.repeat(np.arange(shape[0]), shape[1])}
        for name, array in zip(columns, map(np.asarray, columns.values()), strict=True):
            of_cells = array.reshape(shape) if array.size == shape[0] * shape[1] else array
            cells[name] = np.broadcast_to(of_cells, shape).ravel()
        about = {"site": site_layer[0].value, "layer": site_layer[1], "measure": measure, "rate": rate}
        self.tables.append(pd.DataFrame({**about, **cells, "sampled": counts is not None}))

    def conclude(self, report: AnalysisReport) -> list[Array]:
        """Put labels into a report, unsupported labels with their reasons, and the evidence of both.

        Returns the adjusted p [h c] of each call of `add`; NaN where there are too few instances to test. All other
        tests are one family; numbers that are not from a sample need no instances.
        """
        if not self.tables:
            return []
        table = pd.concat(self.tables, keys=range(len(self.tables)), names=["part", None])
        is_testable = (table["instances"] >= self.min_instances) & (table["units"] >= MIN_UNITS) | ~table["sampled"]
        table["p_adjusted"] = adjust(table["p"].where(is_testable).to_numpy())
        table["tests"] = table["p_adjusted"].count()
        passing = table[table["value"] >= table["threshold"]]
        passing = passing.sort_values(["part", "head", "value"], ascending=[True, True, False], kind="stable")
        report.evidence = [self._line(row) for row in passing.to_dict("records")]
        _sort_labels(report)
        parts = (part for _, part in table.groupby(level="part"))
        return [part["p_adjusted"].to_numpy().reshape(part["head"].nunique(), -1) for part in parts]

    def _line(self, row: dict[Any, Any]) -> dict[str, Any]:
        """The line of labels.csv for one cell whose estimate reaches the threshold."""
        row["description"] = row["rate"].phrase(row["label"], row["rate_value"], row["rate_baseline"])
        row["missing"] = "" if self.by_paper else self._missing(row)
        return row | {"given": not row["missing"]}

    def _missing(self, row: Mapping[str, Any]) -> str:
        """The reason why a cell whose estimate reaches the threshold gets no label; empty if it gets one."""
        if row["sampled"] and row["instances"] < self.min_instances:
            return f"{row['instances']} instances, {self.min_instances} are needed"
        if row["sampled"] and row["units"] < MIN_UNITS:
            return f"{row['instances']} instances are in {row['units']} sentences, {MIN_UNITS} are needed"
        if not row["value_low"] >= row["threshold"]:
            return f"interval from {round(row['value_low'], 3) + 0.0:.3f}, below {row['threshold']:.3g}"
        if not row["p_adjusted"] <= FALSE_DISCOVERIES:
            tests = row["tests"]
            return f"p {row['p']:.2g} is {row['p_adjusted']:.2g} among {tests} test{'s' * (tests != 1)}"
        return ""


def is_published(options: LabelOptions) -> bool:
    """Whether labels follow the rule of the paper that defined them, without tests."""
    return getattr(options, "label_rule", "tested") == "published"


def evidence_signature(options: LabelOptions) -> dict[str, str]:
    """The rule for labels, for the signature of an analysis."""
    if is_published(options):
        return {"label-rule": "published"}
    return {"labels": f"bh{FALSE_DISCOVERIES}(min={options.min_instances},sentences={MIN_UNITS})"}


def _sort_labels(report: AnalysisReport) -> None:
    """Sort labels into given and unsupported, each once for a head; one measure that supports a label suffices."""
    by_label: dict[tuple[HeadId, str], list[str]] = {}
    for row in sorted(report.evidence, key=lambda row: not row["given"]):
        by_label.setdefault((HeadId.of_row(row), row["label"]), []).append(row["missing"])
    for (head, label), (missing, *_) in by_label.items():
        if missing:
            report.unsupported.setdefault(head, []).append(f"{label} ({missing})")
        else:
            report.labels.setdefault(head, []).append(label)
