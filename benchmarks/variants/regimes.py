"""In which regime a claim holds: little text for long, at the start of it, and all of the text for a short time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from variants.collect import read_table
from variants.design import ARMS, BETTER, CLAIMS, CONTROL, EPOCHS, ON_ALL, ON_GPU, OURS, SENTENCES, Effect
from variants.verdicts import LEVEL, REPRODUCED, Difference, Row, Verdict, idle, paired_with

SHORT = "five-epochs"
DROPOUT = "regimes"
"""The folder of the runs of PLAN-regimes.md."""
FULL: Mapping[str, str] = {"full-text": ON_ALL, "full-text-gpu": ON_GPU}
"""The folders of its runs on all of the text, and what arms are called there."""
NAMES: Mapping[str, str] = {"swap-manual": "swap"}
"""Arms of the study of five epochs that have another name here."""
EARLY = 4  # epochs of the long runs, that many updates of which a G epoch has not come yet
MAE_EVERY = 5  # every so many epochs MAE trains its gates; NoBCD in every update
STRICT = 0.05
"""How far gates had to be from their start by the plan as it was first committed."""


def table_of_regimes(
    rows: Sequence[Row], curves: Sequence[Row], short: Sequence[Row], full: Sequence[Sequence[Row]]
) -> list[list[str]]:
    """A line a comparison: its difference of loss in each regime, and where it has the claimed sign at 5 %."""
    early = [{**row} for row in curves if row["epoch"] == EARLY]
    of_short = [{**row, "arm": NAMES.get(str(row["arm"]), row["arm"])} for row in short]
    early_name = f"the same after {EARLY}"
    full_runs = {f"29,000 × 10{end.removeprefix(ON_ALL)}": runs for end, runs in zip(FULL.values(), full, strict=True)}
    regimes = {f"{SENTENCES:,} × {EPOCHS}": rows, early_name: early, "29,000 × 5": of_short, **full_runs}
    lines = [["less loss", *regimes, "holds"]]
    pairs = [*((first, other) for first, other, *_ in BETTER), *OURS, (CONTROL, "baseline")]
    for arm, against in dict.fromkeys(pairs):
        effects = {name: Difference.of(paired_with(runs, arm, against, "valid_nll")) for name, runs in regimes.items()}
        if any(effects.values()):
            cells = ["" if effect is None else f"{effect.as_text(3)}, p {effect.p:.2g}" for effect in effects.values()]
            del effects[early_name]
            lines.append([f"{arm} than {against}", *cells, _where(effects)])
    return lines


def on_all(full: Sequence[Sequence[Row]]) -> list[Row]:
    """Runs on all of the text, by folder, under the names that they have in the claims."""
    return [{**row, "arm": f"{row['arm']}{end}"} for end, rows in zip(FULL.values(), full, strict=True) for row in rows]


def _where(effects: Mapping[str, Difference | None]) -> str:
    """In which of the regimes, by p-values of each comparison by itself."""
    words = {name: _word(effect) for name, effect in effects.items()}
    return "; ".join(f"{word} in {name}" for name, word in words.items() if word)


def _word(difference: Difference | None) -> str:
    if difference is None:
        return ""
    return "undecided" if difference.p > LEVEL else "yes" if difference.mean < 0 else "the reverse"


def regularisation(results: Sequence[Verdict], rows: Sequence[Row]) -> list[str]:
    """The conclusion of PLAN-regimes.md for each variant, by the rule that stands there."""
    pays = any(verdict.claim.arm == CONTROL and verdict.word == REPRODUCED for verdict in results)
    return [_explain(verdict, rows, pays) for verdict in results if verdict.claim.against == CONTROL]


def _explain(verdict: Verdict, rows: Sequence[Row], pays: bool) -> str:
    arm, effect = verdict.claim.arm, verdict.difference
    plain = Difference.of(paired_with(rows, arm, "baseline", "valid_nll"))
    if effect is None:
        return f"{arm}: not tested"
    if verdict.word == REPRODUCED:
        return f"{arm}: more than this dropout brings"
    if pays and plain is not None and effect.mean - effect.reach > plain.mean:
        return f"{arm}: regularisation ({plain.mean:+.3f} against the plain baseline is outside of {effect.as_text(3)})"
    return f"{arm}: not decided"


def old_plan(rows: Sequence[Row]) -> str:
    """The claims that the first plan's bound would leave untested, and why."""
    arms = [
        replace(
            arm,
            effects=tuple(
                Effect(e.column, STRICT if e.column == "gate_change" else e.bound, e.is_minimum) for e in arm.effects
            ),
        )
        for arm in ARMS
    ]
    missing = idle(arms, rows).keys() - idle(ARMS, rows).keys()
    if not missing:
        return ""
    claims = [claim for claim in CLAIMS if {claim.arm, claim.against} & missing and claim.family != "cost"]
    return (
        f"The bound of gate_change was {100 * STRICT:g} % in the plan as first committed, and was lowered to 2 % while "
        "the first run of MAE was at its epoch 7 (PLAN.md). By the stricter one "
        f"{', '.join(sorted(missing))} would be left out, and {len(claims)} claims untested: "
        + "; ".join(f"{claim.arm} against {claim.against} ({claim.family})" for claim in claims)
        + ".\n"
    )


def gate_steps(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The entropy of encoder gates after equal numbers of their steps, where nobcd-gates.csv has that of NoBCD."""
    early = read_table(path)
    if not early:
        return ""
    mae = {int(row["seed"]): float(row["gate_entropy"]) for row in rows if row["arm"] == "mae"}
    pairs = [mae[int(row["seed"])] - float(row["gate_entropy"]) for row in early if int(row["seed"]) in mae]
    difference = Difference.of(pairs)
    if difference is None:
        return ""
    steps = int(early[0]["gate_steps"])
    return (
        f"Gates of MAE have {steps} steps in a run, those of NoBCD {steps * MAE_EVERY}. After {steps} of both the "
        f"entropy of MAE's encoder gates is {difference.as_text(3)} nats from NoBCD's ({difference.pairs} pairs, p "
        f"{difference.p:.2g}; nobcd-gates.csv: means of the last sixty of these updates, of runs made again up to "
        "there).\n"
    )
