"""How many lines a measured allocation needs that the moments of its refits did not see.

Run: python benchmarks/allocation_lines.py bert|translation --data DIR --out FILE.csv [--seeds N]

Moments are of 200 lines of Multi30k, `seen` lines are the first of these, `unseen` others; least squares with damping
0.1 once half of the heads are gone. Cosine (bert) or loss (translation) on 200 other captions and on the text of many
kinds that ships. A row for every seed, number of lines and kind; lower `damage` is better.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from closed_form_pruning import kept_by, open_model, texts

from headscope.pruning.closed_form.anchors import second_text
from headscope.pruning.closed_form.bench import refitted
from headscope.pruning.closed_form.compensate import measured_allocation
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.closed_form.moments import collect_moments
from headscope.pruning.gate_layout import gate_layout
from headscope.pruning.options.refit import RefitOptions
from headscope.pruning.ranking.criterion import ScoringContext
from headscope.pruning.ranking.scoring import for_all_heads, reached_modules, removal_order

FITTED, LINES = 200, (4, 8, 16, 32, 64)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("bert", "translation"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    checkpoint, bert, rows = open_model(given.model), given.model == "bert", []
    gates = gate_layout(checkpoint.attention_sites)
    for seed in range(1, given.seeds + 1):
        text, test = texts(given.data, seed=seed, count=FITTED + max(LINES), target=not bert, tested=200)
        fitted, others = text.first(FITTED), text.after(FITTED)
        moments = collect_moments(checkpoint, fitted)
        context = ScoringContext(checkpoint, fitted, damping=0.1)
        context.measured["moments", id(checkpoint), id(fitted), context.batching, None, 0] = moments
        orders = [
            (each, [step.block for step in removal_order(context, each, sums)])
            for each, sums in reached_modules(context, moments)
        ]
        tests = {"captions": test, "varied": second_text(checkpoint, fitted)[0]}
        meters = {name: DamageMeter.of(checkpoint, corpus) for name, corpus in tests.items()}
        most = gates.heads // 2
        for kind, source in (("seen", fitted), ("unseen", others)):
            for count in LINES:
                measured = DamageMeter.of(checkpoint, source.first(count))
                scores = measured_allocation([measured], moments, orders, RefitOptions(damping=0.1), most=most)
                heads = gates.closed(kept_by(for_all_heads(context, scores), gates, gates.heads - most))
                model = refitted(checkpoint, fitted, heads, RefitOptions(damping=0.1), moments=moments).model
                found = {name: round(meter.measure(model).damage, 5) for name, meter in meters.items()}
                rows.append({"model": given.model, "seed": seed, "lines": count, "kind": kind, **found})
                print(rows[-1], flush=True)
                pd.DataFrame(rows).to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
