"""Alignment heads of decoder language models: what the rule of scrambled sources names."""

from __future__ import annotations

import numpy as np
import pandas as pd

from headscope.bootstrap import Array
from headscope.engine.analysis_report import Aggregates, AnalysisReport, head_table
from headscope.engine.evidence.labels import LabelTests, Rate
from headscope.engine.evidence.significance import p_values
from headscope.engine.heads.source_spans import RELATIONS
from headscope.heads import Site

RUNS = ("", "_scrambled")
LIFT = 0.2
"""What a named head has beyond rolled links, at least, in both runs."""


def template_report(aggregates: Aggregates, tests: LabelTests) -> AnalysisReport:
    """Columns, labels and the table of heads in texts of a template; no labels where scrambled texts are missing."""
    names = [f"{kind}{run}" for name in RELATIONS for kind, run in _statistics(name)]
    report = AnalysisReport(columns={name: aggregates.column(name) for name in names if aggregates.site_layers(name)})
    tables = []
    for name in RELATIONS:
        rows = {}
        for place in aggregates.site_layers(f"aligned_{name}_scrambled"):
            share, lift, scrambled_lift = (aggregates.ratio(f"{kind}{run}", *place) for kind, run in _statistics(name))
            rolled_share, on_diagonal = (
                aggregates.ratio(f"{kind}_{name}", *place).value for kind in ("rolled", "diagonal")
            )
            counts = aggregates.by_sentence(f"aligned_{name}", place)[1]
            tests.add(
                place,
                f"aligned_{name}",
                f"aligned:{name}",
                share,
                np.max([_lift_p(aggregates, name, run, place) for run in RUNS], axis=0),
                threshold=np.where(np.minimum(lift.value, scrambled_lift.value) >= LIFT, rolled_share, np.inf),
                counts=counts,
                baseline=rolled_share,
                rate=Rate("of the linked words", "by links of the word before"),
            )
            rows[place] = {
                **{"relation": name, "positions": int(counts.sum()), "share": share, "lift": lift},
                **{"lift_scrambled": scrambled_lift, "baseline_rolled": rolled_share, "baseline_diagonal": on_diagonal},
            }
        tables.append(head_table(rows))
    tests.conclude(report)
    report.tables["alignment"] = pd.concat(tables, ignore_index=True)
    return report


def _statistics(name: str) -> tuple[tuple[str, str], ...]:
    return (f"aligned_{name}", ""), (f"lift_{name}", ""), (f"lift_{name}", "_scrambled")


def _lift_p(aggregates: Aggregates, name: str, run: str, place: tuple[Site, int]) -> Array:
    """One-sided p of a lift being at most half of what is asked for."""
    hits, counts = aggregates.by_sentence(f"aligned_{name}{run}", place)
    rolled_hits, _ = aggregates.by_sentence(f"rolled_{name}{run}", place)
    units = ((hits > 0) & (hits < counts)).sum(dim=0)
    return p_values(hits, rolled_hits, counts, threshold=LIFT / 2, divided_sentences=units)
