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
    begun = f"the same after {EARLY}"
    all_of_it = {f"29,000 × 10{of.removeprefix(ON_ALL)}": its for of, its in zip(FULL.values(), full, strict=True)}
    regimes = {f"{SENTENCES:,} × {EPOCHS}": rows, begun: early, "29,000 × 5": of_short, **all_of_it}
    lines = [["less loss", *regimes, "holds"]]
    pairs = [*((one, other) for one, other, *_ in BETTER), *OURS, (CONTROL, "baseline")]
    for arm, against in dict.fromkeys(pairs):
        found = {name: Difference.of(paired_with(its, arm, against, "valid_nll")) for name, its in regimes.items()}
        if any(found.values()):
            shown = ["" if each is None else f"{each.shown(3)}, p {each.p:.2g}" for each in found.values()]
            del found[begun]
            lines.append([f"{arm} than {against}", *shown, _where(found)])
    return lines


def on_all(full: Sequence[Sequence[Row]]) -> list[Row]:
    """Runs on all of the text, by folder, under the names that they have in the claims."""
    return [{**row, "arm": f"{row['arm']}{of}"} for of, rows in zip(FULL.values(), full, strict=True) for row in rows]


def _where(found: Mapping[str, Difference | None]) -> str:
    """In which of the regimes, by p-values of each comparison by itself."""
    words = {name: _word(each) for name, each in found.items()}
    return "; ".join(f"{word} in {name}" for name, word in words.items() if word)


def _word(difference: Difference | None) -> str:
    if difference is None:
        return ""
    return "undecided" if difference.p > LEVEL else "yes" if difference.mean < 0 else "the reverse"


def regularisation(judged: Sequence[Verdict], rows: Sequence[Row]) -> list[str]:
    """What the claims of PLAN-regimes.md say of each variant, by the rule that stands there."""
    pays = any(verdict.claim.arm == CONTROL and verdict.word == REPRODUCED for verdict in judged)
    return [_explained(verdict, rows, pays) for verdict in judged if verdict.claim.against == CONTROL]


def _explained(verdict: Verdict, rows: Sequence[Row], pays: bool) -> str:
    arm, here = verdict.claim.arm, verdict.difference
    plain = Difference.of(paired_with(rows, arm, "baseline", "valid_nll"))
    if here is None:
        return f"{arm}: not tested"
    if verdict.word == REPRODUCED:
        return f"{arm}: more than this dropout brings"
    if pays and plain is not None and here.mean - here.reach > plain.mean:
        return f"{arm}: regularisation ({plain.mean:+.3f} against the plain baseline is outside of {here.shown(3)})"
    return f"{arm}: not decided"


def strictly(rows: Sequence[Row]) -> str:
    """Which claims would be untested by the bound of the first plan, and why."""
    arms = [
        replace(
            arm,
            effects=tuple(
                Effect(e.column, STRICT if e.column == "gate_change" else e.bound, e.least) for e in arm.effects
            ),
        )
        for arm in ARMS
    ]
    lost = idle(arms, rows).keys() - idle(ARMS, rows).keys()
    if not lost:
        return ""
    claims = [claim for claim in CLAIMS if {claim.arm, claim.against} & lost and claim.family != "cost"]
    return (
        f"The bound of gate_change was {100 * STRICT:g} % in the plan as first committed, and was lowered to 2 % while "
        "the first run of MAE was at its epoch 7 (PLAN.md). By the stricter one "
        f"{', '.join(sorted(lost))} would be left out, and {len(claims)} claims untested: "
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
        f"entropy of MAE's encoder gates is {difference.shown(3)} nats from NoBCD's ({difference.pairs} pairs, p "
        f"{difference.p:.2g}; nobcd-gates.csv: means of the last sixty of these updates, of runs made again up to "
        "there).\n"
    )
