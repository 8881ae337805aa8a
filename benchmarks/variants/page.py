"""The report of the study, table.md and table.csv, from runs.csv and cost.csv alone."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from variants.collect import read_table, rows_of_runs
from variants.design import ARMS, CLAIMS, EPOCHS, RECIPE, REGIME_ARMS, REGIME_CLAIMS, SENTENCES, TEST, Arm
from variants.regimes import DROPOUT, EARLY, FULL, SHORT, gate_steps, old_plan, on_all, regularisation, table_of_regimes
from variants.verdicts import UNTESTED, Difference, Row, Verdict, idle, paired_with, seeds_needed, verdicts

REACH = 0.02  # nats: how narrow the primary interval is to be
COLUMNS = ("bleu", "valid_nll", "cost_ratio")
HEAD_NUMBERS = {
    **{
        f"{column}.{site}": f"{title}, {name}"
        for column, title in (
            ("confidence", "confidence"),
            ("confidence_spread", "its deviation over heads"),
            ("offset_share", "share of the modal offset"),
            ("cka", "likeness of contexts (CKA)"),
        )
        for site, name in (("encoder-self", "encoder"), ("decoder-self", "decoder"), ("cross", "cross"))
    },
    "heads_with_function": "heads with a function",
    "syntactic_margin": "syntax: the best head over a fixed offset, encoder",
    "relevant_heads": "heads that share the relevance (LRP)",
}


def cost_rows(path: Path) -> list[dict[str, Any]]:
    """CPU time of a step as a share of the baseline's, a row for every arm and round, which stands for a seed."""
    table = read_table(path)
    of_baseline = {row["round"]: row["seconds"] for row in table if row["arm"] == "baseline"}
    return [
        {"arm": row["arm"], "seed": row["round"], "cost_ratio": row["seconds"] / of_baseline[row["round"]]}
        for row in table
    ]


def write_page(folder: Path) -> None:
    """Make table.md and table.csv anew."""
    rows, costs = rows_of_runs(folder), cost_rows(folder / "cost.csv")
    table = [line for arm in ARMS if (line := summary(arm, rows, costs))]
    pd.DataFrame(table).to_csv(folder / "table.csv", index=False)
    (folder / "table.md").write_text(markdown(folder, rows, costs), encoding="utf-8")


def summary(arm: Arm, rows: Sequence[Row], costs: Sequence[Row]) -> dict[str, Any] | None:
    """A line of the table: means and deviations (n − 1) over seeds; None where no seed has finished."""
    of_arm = [row for row in rows if row["arm"] == arm.name]
    if not of_arm:
        return None
    line: dict[str, Any] = {
        "arm": arm.name,
        "title": arm.title,
        "seeds": len(of_arm),
        "parameters": of_arm[0]["parameters"],
    }
    all_rows = [*of_arm, *(row for row in costs if row["arm"] == arm.name)]
    for column in (*COLUMNS, "best_epoch"):
        values = [float(row[column]) for row in all_rows if column in row]
        line[column] = statistics.fmean(values) if values else None
        line[f"{column}_sd"] = statistics.stdev(values) if len(values) > 1 else None
    return line


def markdown(folder: Path, rows: Sequence[Row], costs: Sequence[Row]) -> str:
    """The report."""
    out_of_work = idle(ARMS, rows)
    results = verdicts(CLAIMS, [*rows, *costs], out_of_work)
    parts = [
        "# Variants on Multi30k, German to English: what holds\n",
        about(rows),
        "## Arms\n",
        table_of_arms(rows, costs, out_of_work),
        *(f"\n{name} is left out: {why}.\n" for name, why in out_of_work.items()),
        "\n## Claims\n",
        "Loss is the primary outcome, BLEU the secondary one. *Reproduced*: the difference has the claimed direction "
        "at 5 %, corrected for the claims of the family (Holm); *contradicted*: the other direction; *undecided*: "
        "neither is; *untested*: no pairs of runs. Intervals are 95 % (Student's t over seeds), each by itself.\n",
        markdown_table(
            [("claim", "published difference", "here", "p, corrected", "verdict"), *map(line_of_claim, results)]
        ),
        "\n" + power(results) + "\n",
        repeats(folder, rows),
        *regimes(folder, rows),
        *dropout(folder, rows),
        "## What the arms did\n",
        "Numbers of the runs' own histories and best models without which an arm is not in the tables, least and most "
        "over seeds: swapped pairs of heads, share of a matrix off its diagonal, mean entropy of the encoder's gates "
        "(nats of 2.079), distance of gates from their start as a share of its norm, steps of gates.\n",
        table_of_effects(rows),
        "\n" + old_plan(rows),
        gate_steps(folder / "nobcd-gates.csv", rows),
        table_of_words(folder / "words.csv"),
        "\n## What the heads did\n",
        "Difference from the baseline of the same seed, mean and 95 % interval, without correction (empty: too few "
        f"have it): the best models on {TEST}, references read in; syntax on the German treebank GSD (test).\n",
        table_of_heads(rows, out_of_work),
        related_again(folder, rows),
        "\n## Commands\n",
        markdown_table([("arm", "command"), *((arm.title, f"`{arm.command}`") for arm in ARMS)]),
        *figures(folder),
    ]
    return "\n".join(part for part in parts if part)


def about(rows: Sequence[Row]) -> str:
    """What was run, where and when."""
    values = {
        name: sorted({str(row.get(name, "")) for row in rows} - {""}) for name in ("ended", "threads", "bleu_signature")
    }
    period = " to ".join(dict.fromkeys(values["ended"][:1] + values["ended"][-1:])) or "-"
    shared = ", ".join(f"{name} {value}" for name, value in RECIPE.items())
    return (
        "Made by `python benchmarks/variants_study.py report` from runs.csv, curves.csv and cost.csv; the design is in "
        f"[PLAN.md](PLAN.md). {len(rows)} runs on {SENTENCES:,} sentences for {EPOCHS} epochs ({shared}), the "
        f"checkpoint of the lowest validation loss; {note_missing(rows)}; commit {commits(rows)}; "
        f"{machines(rows)}; {', '.join(values['threads']) or '-'} thread; ended {period}. "
        f"BLEU: {TEST}, beam 5, lower-cased ({', '.join(values['bleu_signature'])}).\n"
    )


def commits(rows: Sequence[Row]) -> str:
    """The commits of runs."""
    return ", ".join(sorted({str(row["signature"]).rsplit("|commit:", 1)[-1][:12] for row in rows})) or "-"


def machines(rows: Sequence[Row]) -> str:
    """The kinds of processor, which runs are not of the commonest, and which differences are between two kinds."""
    of_run = {(str(row["arm"]), int(row["seed"])): str(row.get("machine", "-")) for row in rows}
    commonest, *rare = [kind for kind, _ in Counter(of_run.values()).most_common()] or ["-"]
    text = "".join(f", and {kind} ({list_arms(run for run, cpu in of_run.items() if cpu == kind)})" for kind in rare)
    crossing = [run for run, kind in of_run.items() if of_run.get(("baseline", run[1]), kind) != kind]
    note = f", so differences of {list_arms(crossing)} from the baseline are between two machines" if crossing else ""
    return f"{commonest}{text}{note}"


def list_arms(runs: Iterable[tuple[str, int]]) -> str:
    """Arms with their seeds."""
    seeds: dict[str, list[str]] = {}
    for arm, seed in runs:
        seeds.setdefault(arm, []).append(str(seed))
    return "; ".join(f"{arm} {', '.join(numbers)}" for arm, numbers in seeds.items())


def note_missing(rows: Sequence[Row]) -> str:
    """The planned runs that are missing."""
    existing = {(str(row["arm"]), int(row["seed"])) for row in rows}
    plan = ((arm.name, seed) for arm in ARMS for seed in range(1, arm.seeds + 1))
    missing = list_arms(run for run in plan if run not in existing)
    return f"seeds that are missing: {missing}" if missing else "all seeds of the plan"


def table_of_arms(rows: Sequence[Row], costs: Sequence[Row], out_of_work: Mapping[str, str]) -> str:
    """Means of every arm, and its paired differences from the baseline."""
    lines = [
        ("arm", "rate", "seeds", "validation loss", "− baseline", "BLEU", "− baseline", "parameters", "CPU time a step")
    ]
    for arm in ARMS:
        line = summary(arm, rows, costs)
        if line is None or arm.name in out_of_work:
            continue
        loss, bleu = (
            Difference.of(paired_with(rows, arm.name, "baseline", column)) for column in ("valid_nll", "bleu")
        )
        apart = arm.name != "baseline"
        cost = Difference.of(paired_with(costs, arm.name, 1.0, "cost_ratio"))
        reach = f" ± {cost.reach:.2f}" if cost and apart else ""
        losses = (cell(line, "valid_nll", 4), loss.as_text(4) if apart and loss else "")
        scores = (cell(line, "bleu", 2), bleu.as_text(2) if apart and bleu else "")
        size = (f"{line['parameters']:,}", f"{line['cost_ratio']:.2f}{reach}" if line["cost_ratio"] else "")
        lines.append((arm.title, f"{arm.lr:g}", str(line["seeds"]), *losses, *scores, *size))
    return markdown_table(lines)


def cell(line: Row, column: str, digits: int) -> str:
    """A mean with its deviation over seeds."""
    value, spread = line[column], line[f"{column}_sd"]
    if value is None:
        return ""
    return f"{value:.{digits}f}" + (f" ({spread:.{digits}f})" if spread is not None else "")


def line_of_claim(verdict: Verdict) -> tuple[str, ...]:
    """The cells of a claim."""
    claim, difference = verdict.claim, verdict.difference
    in_paper = "" if claim.published_value is None else f"{claim.published_value:+.2f}"
    within = {None: "", True: ", inside", False: ", outside"}[verdict.holds_published]
    digits = 2 if claim.family == "bleu" else 4
    pairs = "rounds" if claim.family == "cost" else "pairs"
    in_study = f"{difference.as_text(digits)} ({difference.pairs} {pairs}{within})" if difference else ""
    word = f"{verdict.word}: {verdict.why}" if verdict.word == UNTESTED else f"**{verdict.word}**"
    p = "" if verdict.p_adjusted is None else f"{verdict.p_adjusted:.2g}"
    return f"{claim.text} ({claim.source})", in_paper, in_study, p, word


def power(results: Sequence[Verdict]) -> str:
    """Whether the primary intervals are as narrow as planned, and what it would take where they are not."""
    primary = [verdict for verdict in results if verdict.claim.family == "loss" and verdict.difference]
    wide = [
        f"{verdict.claim.arm} against {verdict.claim.against} ± {verdict.difference.reach:.4f} "
        f"({seeds_needed(verdict.difference.deviation, REACH)} seeds would do)"
        for verdict in primary
        if verdict.difference and verdict.difference.reach > REACH
    ]
    if not primary:
        return ""
    return f"The intervals of the loss that are wider than ± {REACH}: {'; '.join(wide) if wide else 'none'}."


def repeats(folder: Path, rows: Sequence[Row]) -> str:
    """How far the same run ends from itself on another kind of processor, whose rounding is another."""
    lines = []
    for first, again in made_again(folder / "repeated.csv", rows):
        loss = float(first["valid_nll"])
        change = f"{float(again['valid_nll']) - loss:+.4f}"
        lines.append(f"{again['arm']} {again['seed']} {loss:.4f} on {first['machine']}, {change} on {again['machine']}")
    return f"The same run on another kind of processor (repeated.csv): {'; '.join(lines)}.\n" if lines else ""


def made_again(path: Path, rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each run of a table of those that were made again, behind the run that it repeats."""
    first = {(row["arm"], row["seed"]): row for row in rows}
    return [(first[run], row) for row in read_table(path) if (run := (row["arm"], row["seed"])) in first]


def related_again(folder: Path, rows: Sequence[Row]) -> str:
    """Whose relevance was taken of a run that was made again, and how near its loss is to the first one's."""
    pairs = made_again(folder / "relevance.csv", rows)
    if not pairs:
        return ""
    arms = " and ".join(sorted({str(first["arm"]) for first, _ in pairs}))
    away = [abs(float(again["valid_nll"]) - float(first["valid_nll"])) for first, again in pairs]
    other = [distance for distance in away if distance]
    note = f", {len(other)} one that is at most {max(other):.4f} away, on another processor" if other else ""
    return (
        f"\nRelevance of {arms} is that of {len(pairs)} runs made again from the same commit, by later code "
        f"(relevance.csv): {len(pairs) - len(other)} have the same loss to the last digit{note}.\n"
    )


def regimes(folder: Path, rows: Sequence[Row]) -> list[str]:
    """What the study of five epochs on the whole text says of the same comparisons."""
    short = read_table(folder / SHORT / "runs.csv")
    if not short:
        return []
    long = [*rows, *read_table(folder / DROPOUT / "runs.csv")]
    lines = table_of_regimes(long, read_table(folder / "curves.csv"), short, full_runs(folder))
    return [
        "## In which regime\n",
        f"The same differences of validation loss on {SENTENCES:,} sentences for {EPOCHS} epochs (the claims above), "
        f"after epoch {EARLY} of those runs, and in the [earlier study](five-epochs/table.md): all 29,000 sentences "
        "for 5 epochs, three seeds, bf16, where nothing overfits and MAE's gates started even and did not learn. p of "
        "each comparison by itself. Where the two disagree the claim is about a regime.\n",
        markdown_table(lines),
        *(full_text(folder, name) for name in FULL),
        "\nFive seeds are few: that differences are normally distributed, which every interval and p-value here takes "
        "for granted, carries everything. It cannot be seen from five numbers, and a sign test of five pairs cannot go "
        "below p 0.06, whatever they are.\n",
    ]


def full_runs(folder: Path) -> Sequence[Sequence[Row]]:
    """The runs on all of the text, by their folders."""
    return [read_table(folder / name / "runs.csv") for name in FULL]


def full_text(folder: Path, name: str) -> str:
    """What the runs on all of the text in such a folder are, their losses and BLEU, and whether they overfit."""
    if not (full := read_table(folder / name / "runs.csv")):
        return ""
    curves = pd.read_csv(folder / name / "curves.csv").pivot_table(index="epoch", columns=["arm", "seed"])
    late = curves["valid_nll"].tail(3).diff().dropna()
    rising = [f"{arm} {seed}" for arm, seed in late.columns if (late[arm, seed] > 0).all()]
    losses = table_by_seed(
        "lowest validation loss (after epoch), BLEU",
        full,
        lambda row: (
            f"{row['valid_nll']:.4f} ({row['best_epoch']})" + (f", {row['bleu']:.1f}" if row.get("bleu") else "")
        ),
    )
    return (
        f"\n{name}: 29,000 × 10, by [PLAN-regimes.md](PLAN-regimes.md) (float32, commit {commits(full)}; "
        f"{machines(full)}). Losses that rise over the last three epochs: {', '.join(rising) or 'none'}.\n\n{losses}"
    )


def dropout(folder: Path, rows: Sequence[Row]) -> list[str]:
    """The control that separates a variant from mere regularisation."""
    controls = read_table(folder / DROPOUT / "runs.csv")
    if not controls:
        return []
    results = verdicts(REGIME_CLAIMS, [*rows, *controls, *on_all(full_runs(folder))], idle(ARMS, rows))
    seeds = {row["seed"] for row in controls}
    plain = [row for row in rows if row["arm"] == "baseline" and row["seed"] in seeds]
    claims = ((claim, *cells) for claim, _, *cells in map(line_of_claim, results))
    return [
        "## Variant or regularisation\n",
        f"More dropout on {SENTENCES:,} sentences for {EPOCHS} epochs: the part of [PLAN-regimes.md](PLAN-regimes.md) "
        f"that was run (commit {commits(controls)}; {machines([*plain, *controls])}), of which only losses were looked "
        f"at. Tried for 8 epochs on seed 100: {list_grid_losses(folder)}.\n",
        table_by_seed(
            "lowest validation loss (after epoch), at the end",
            [*plain, *controls],
            lambda row: f"{row['valid_nll']:.4f} ({row['best_epoch']}), {row['last_nll']:.4f}",
        ),
        "\nClaims, corrected together (Holm); arms without a number have dropout 0.1 and are those of above:\n",
        markdown_table([("claim", "here", "p, corrected", "verdict"), *claims]),
        f"\nBy the rule of the plan: {'; '.join(regularisation(results, rows))}.\n",
    ]


def table_by_seed(title: str, rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """A line an arm, a column a seed."""
    seeds = sorted({row["seed"] for row in rows})
    lines = [(title, *(f"seed {seed}" for seed in seeds))]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = {row["seed"]: cell(row) for row in rows if row["arm"] == arm}
        lines.append((arm, *(cells.get(seed, "") for seed in seeds)))
    return markdown_table(lines)


def list_grid_losses(folder: Path) -> str:
    """The losses of the grid of dropout."""
    rows = [*read_table(folder / "grid.csv"), *read_table(folder / DROPOUT / "grid.csv")]
    losses = {str(row["arm"]).removesuffix("@0.003"): row["valid_nll"] for row in rows}
    names = ("baseline", *(arm.name for arm in REGIME_ARMS if arm.rates))
    return ", ".join(f"{name} {losses[name]:.4f}" for name in names if name in losses)


def table_of_effects(rows: Sequence[Row]) -> str:
    """What every arm must have done, and did."""
    lines = [("arm", "number", "must be", "was")]
    for arm in ARMS:
        for effect in arm.effects:
            values = [float(row[effect.column]) for row in rows if row["arm"] == arm.name and effect.column in row]
            if values:
                lines.append((arm.title, effect.column, effect.demand, f"{min(values):.4g} to {max(values):.4g}"))
    return markdown_table(lines)


def table_of_words(path: Path) -> str:
    """The pieces that stand in sentences of each expert of the encoder's first layer more than by chance."""
    if not path.exists():
        return ""
    table = pd.read_csv(path, keep_default_na=False).query("arm == 'mae'")
    if table.empty:
        return ""
    seed = table["seed"].min()
    lines = [("expert", "pieces, with their pointwise mutual information in nats and how often they stand with it")]
    for expert, rows in table[table["seed"] == seed].groupby("expert"):
        lines.append((str(expert), ", ".join(f"{row.token} {row.pmi:.2f} ({row.count})" for row in rows.itertuples())))
    title = f"\nWhat goes with the experts of MAE's first encoder layer (seed {seed}; Peng et al. 2020, appendix C):\n"
    return "\n".join([title, markdown_table(lines)])


def table_of_heads(rows: Sequence[Row], out_of_work: Mapping[str, str]) -> str:
    """Differences of the numbers of heads, an arm a column."""
    arms = [arm for arm in ARMS if arm.name != "baseline" and arm.name not in out_of_work]
    lines = [("number", "baseline", *(arm.name for arm in arms))]
    for column, title in HEAD_NUMBERS.items():
        base = [float(row[column]) for row in rows if row["arm"] == "baseline" and column in row]
        if not base:
            continue
        cells = []
        for arm in arms:
            difference = Difference.of(paired_with(rows, arm.name, "baseline", column))
            cells.append(difference.as_text(3) if difference else "")
        lines.append((title, f"{statistics.fmean(base):.3f}", *cells))
    return markdown_table(lines)


def figures(folder: Path) -> list[str]:
    """The picture, where it is there."""
    text = "Differences from the baseline of the same seed, with 95 % intervals"
    return [f"\n## Figure\n\n![{text}](figures/effects.png)\n"] if (folder / "figures" / "effects.png").exists() else []


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is its head."""
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *body])
