"""What a label needs: evidence that a head's true value passes the threshold, not only that its estimate does.

A test asks whether the value over all text of this kind is at most the threshold (see `significance`). Percentile
intervals of few sentences are too narrow (Hesterberg 2015), so below ten there are no labels.

All tests of one analysis, of every head and relation and direction that has instances enough, are one family, and
labels go to those that Benjamini & Hochberg's procedure (1995) rejects at 5 %: of the labels given one in twenty at
most is expected to be wrong, and in a model that has no such head the chance of a single label is at most 5 %. Tests
share sentences, so that they are dependent; the procedure holds where that is positively so (Benjamini & Yekutieli
2001). Not the simultaneous bootstrap: its p-values end at one part in `--bootstrap`, which thousands of tests use up,
and it needs a variance where sentences agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.bootstrap import Array, Estimate
from headscope.config.declarations import head_functions, measure_of
from headscope.description.pair_function import PAIR_FUNCTIONS
from headscope.engine.evidence.significance import FALSE_DISCOVERIES, MIN_UNITS, above_chance, adjust, share_p
from headscope.heads import HeadId, Site

if TYPE_CHECKING:
    import pandas as pd

    from headscope.config import LabelOptions
    from headscope.engine.analysis_report import Aggregates, AnalysisReport


IN_WORDS = {
    "aligned:predicted": "looks at the source word of the token being predicted",
    "aligned:fed": "looks at the source word of the token that was fed",
    "aligned:successor": "looks at the word after the source word of the token that was fed",
    "averages:after": "gives what follows even weight",
    "averages:before": "gives what precedes even weight",
}
PARTS = {"q": "queries", "k": "keys", "v": "values"}


def label_in_words(label: str) -> str:
    """What a head with a label does: `positional:-1` → looks at the token before.

    The meaning of its function, but for the detail that some labels have; the label itself where no analysis declares
    its function.
    """
    kind, _, detail = label.partition(":")
    if label in IN_WORDS:
        return IN_WORDS[label]
    if kind == "positional" and detail:
        return _offset(int(detail))
    if kind == "looks" and detail in PAIR_FUNCTIONS.names():
        return f"looks at {PAIR_FUNCTIONS.get(detail).meaning}"
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
    """What the number of a label is `of` ("of its largest weights"), and what its baseline is ("by chance").

    `value` and `baseline` [h] or [h c] are said where they are not those that were tested.
    """

    of: str
    against: str = "by chance"
    value: Array | None = None
    baseline: Array | None = None

    def phrase(self, label: str, value: float, baseline: float) -> str:
        """A label in words with its number: "…: 0.72 of the words, 0.35 by chance"."""
        text = f"{label_in_words(label)}: {value:.2f} {self.of}"
        return text if np.isnan(baseline) else f"{text}, {baseline:.2f} {self.against}"


Texts = npt.NDArray[np.object_]


@dataclass(frozen=True)
class Evidence:
    """Tests at one (site, layer), a cell for each head and whatever else is looked at [h c].

    `value` with its interval is compared with `threshold`; `baseline` is what the threshold is made of, where it is
    (NaN elsewhere). `p` is one-sided, of `instances` in so many `units`: sentences, or groups of them where a corpus
    has more than are kept apart. `labels` are what each cell stands for, `rate` says what their numbers are. Numbers
    without a sample (of parameters) have neither (`sampled` False): their p says how likely so large a value is by
    chance.
    """

    site_layer: tuple[Site, int]
    measure: str
    labels: Texts
    rate: Rate
    value: Estimate
    threshold: Array
    baseline: Array
    instances: Array
    units: Array
    p: Array
    sampled: bool = True


@dataclass(frozen=True)
class LabelRule:
    """Heads with `label` have a `measure` of at least `threshold`, and so many `times` the statistic `chance`, if any.

    `rate` says what the measure is a share of (default: its title).
    """

    label: str
    measure: str
    threshold: float
    chance: str = ""
    times: float = 2.0
    rate: Rate | None = None


@dataclass
class LabelTests:
    """The tests of one analysis: labels for heads whose evidence suffices, reasons for those whose does not.

    With `published` every head whose estimate reaches the threshold has its label, whatever the evidence, which is
    reported all the same: Voita et al. (2019) label so.
    """

    min_instances: int
    published: bool = False
    parts: list[Evidence] = field(default_factory=list)

    @classmethod
    def of(cls, options: LabelOptions) -> LabelTests:
        """As the options of an analysis say."""
        return cls(options.min_instances, published=is_published(options))

    def add_rule(self, rule: LabelRule, column: Mapping[tuple[Site, int], Estimate], aggregates: Aggregates) -> None:
        """Test a rule over sentences, for every head of the column of its measure.

        With `published` the threshold alone counts.
        """
        for site_layer, value in column.items():
            sums = aggregates.by_sentence(rule.measure, site_layer)
            about: dict[str, Any] = {"threshold": rule.threshold, "counts": sums[1], "rate": rule.rate}
            if not rule.chance:
                p = share_p(*sums, threshold=rule.threshold)
            else:
                by_chance, _ = aggregates.by_sentence(rule.chance, site_layer)
                p, least = above_chance(sums[0], by_chance, sums[1], threshold=rule.threshold, times=rule.times)
                about["baseline"] = (by_chance.sum(dim=0) / sums[1].sum(dim=0)).numpy()
                about["threshold"] = rule.threshold if self.published else least
            self.add(site_layer, rule.measure, rule.label, value, p, **about)

    def add(
        self,
        site_layer: tuple[Site, int],
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
        """Tests of heads [h] or of heads and cells [h c]; `counts` [g h|1 (c)] are the instances of every sentence.

        Numbers without a sample, such as those of weights, have no counts (None); `p` is that of such a number by
        chance. `rate` says what was measured and on what (default: the title of the measure).
        """
        shape = (*value.value.shape, 1)[:2]
        has_sample = counts is not None
        instances = torch.zeros(1, *shape) if counts is None else counts.reshape(len(counts), -1, shape[1])

        def cells(values: Any, kind: Any = np.float64) -> Any:
            array = np.asarray(values, dtype=kind)
            return np.broadcast_to(array.reshape(shape) if array.size == shape[0] * shape[1] else array, shape)

        rate = rate or Rate(f"({measure_of(measure).words})")
        value_tested = value.value if rate.value is None else rate.value
        baseline_tested = baseline if rate.baseline is None else rate.baseline
        self.parts.append(
            Evidence(
                site_layer,
                measure,
                cells(labels, object),
                replace(rate, value=cells(value_tested), baseline=cells(baseline_tested)),
                Estimate(*(cells(part) for part in (value.value, value.low, value.high))),
                cells(threshold),
                cells(baseline),
                cells(instances.sum(dim=0).numpy()),
                cells((instances > 0).sum(dim=0).numpy()),
                cells(p),
                has_sample,
            )
        )

    def conclude(self, report: AnalysisReport) -> list[Array]:
        """Put the labels into a report, with the reasons against others and the evidence for all of them.

        Returns the adjusted p [h c] of each part; NaN where there are too few instances to test.
        """
        adjusted_p = self._adjust_all()
        tests = sum(int((~np.isnan(part)).sum()) for part in adjusted_p)
        rows: list[dict[str, Any]] = []
        for part, p in zip(self.parts, adjusted_p, strict=True):
            passing = part.value.value >= part.threshold
            for head, cell in sorted(
                np.argwhere(passing).tolist(), key=lambda at: (at[0], -part.value.value[tuple(at)])
            ):
                lacking = self._missing(part, float(p[head, cell]), (head, cell), tests)
                missing = "" if self.published else lacking
                rows.append(_row(part, (head, cell), float(p[head, cell]), tests, missing))
        _label(report, rows)
        return adjusted_p

    def _adjust_all(self) -> list[Array]:
        """Adjusted p of every part, over all tests that have instances and units enough."""
        testable = [
            (part.instances >= self.min_instances) & (part.units >= MIN_UNITS) if part.sampled else ~np.isnan(part.p)
            for part in self.parts
        ]
        p = [np.where(is_testable, part.p, np.nan) for part, is_testable in zip(self.parts, testable, strict=True)]
        flat = adjust(np.concatenate([part.ravel() for part in p])) if p else np.empty(0)
        ends = np.cumsum([part.size for part in p])[:-1]
        return [part.reshape(its.shape) for part, its in zip(np.split(flat, ends), p, strict=True)] if p else []

    def _missing(self, part: Evidence, p_adjusted: float, at: tuple[int, int], tests: int) -> str:
        """Why a cell whose estimate passes has no label; empty where it has one."""
        instances, units, low = int(part.instances[at]), int(part.units[at]), float(part.value.low[at])
        if part.sampled and instances < self.min_instances:
            return f"{instances} instances, {self.min_instances} are needed"
        if part.sampled and units < MIN_UNITS:
            return f"{instances} instances are in {units} sentences, {MIN_UNITS} are needed"
        if not low >= part.threshold[at]:
            return f"interval from {round(low, 3) + 0.0:.3f}, below {part.threshold[at]:.3g}"
        if not p_adjusted <= FALSE_DISCOVERIES:
            return f"p {float(part.p[at]):.2g} is {p_adjusted:.2g} among {tests} test{'s' * (tests != 1)}"
        return ""


def is_published(options: LabelOptions) -> bool:
    """Whether labels are given by the rule of the paper that they are of."""
    return getattr(options, "label_rule", "tested") == "published"


def evidence_signature(options: LabelOptions) -> dict[str, str]:
    """How labels were given, for the signature of an analysis."""
    if is_published(options):
        return {"label-rule": "published"}
    return {"labels": f"bh{FALSE_DISCOVERIES}(min={options.min_instances},sentences={MIN_UNITS})"}


def _row(part: Evidence, at: tuple[int, int], p_adjusted: float, tests: int, missing: str) -> dict[str, Any]:
    rate = part.rate
    assert rate.value is not None and rate.baseline is not None
    return {
        "site": part.site_layer[0].value,
        "layer": part.site_layer[1],
        "head": at[0],
        "label": part.labels[at],
        "description": rate.phrase(part.labels[at], float(rate.value[at]), float(rate.baseline[at])),
        "given": not missing,
        "measure": part.measure,
        "value": float(part.value.value[at]),
        "value_low": float(part.value.low[at]),
        "value_high": float(part.value.high[at]),
        "threshold": float(part.threshold[at]),
        "baseline": float(part.baseline[at]),
        "instances": int(part.instances[at]),
        "units": int(part.units[at]),
        "p": float(part.p[at]),
        "p_adjusted": p_adjusted,
        "tests": tests,
        "missing": missing,
    }


def _label(report: AnalysisReport, rows: list[dict[str, Any]]) -> None:
    """Labels of heads, each once; what one measure does not support is of no account where another does."""
    supported_labels = {(row["site"], row["layer"], row["head"], row["label"]) for row in rows if row["given"]}
    keys_seen: set[tuple[Any, ...]] = set()
    for row in rows:
        key = (row["site"], row["layer"], row["head"], row["label"])
        head, label = HeadId.of_row(row), row["label"]
        if key in keys_seen or (key in supported_labels and not row["given"]):
            continue
        keys_seen.add(key)
        if row["given"]:
            report.label(head, label)
        else:
            report.unsupported.setdefault(head, []).append(f"{label} ({row['missing']})")
    report.evidence = rows


def evidence_table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """`labels.csv`: every label that the estimates alone would give, with its evidence, and what is missing."""
    import pandas as pd

    first = "site layer head label description given measure value value_low value_high threshold baseline"
    last = "instances units p p_adjusted tests missing"
    return pd.DataFrame(list(rows), columns=[*first.split(), *last.split()])
