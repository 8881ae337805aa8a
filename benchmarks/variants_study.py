"""The training variants against their published claims, on Multi30k German to English: benchmarks/variants/PLAN.md.

    python benchmarks/variants_study.py grid   --data DIR --out DIR    rates and pilots, one extra seed
    python benchmarks/variants_study.py train  --data DIR --out DIR    the runs
    python benchmarks/variants_study.py cost   --data DIR --out DIR    time of a step, arms interleaved
    python benchmarks/variants_study.py syntax --parse CONLLU --out DIR  the best models' heads on a treebank
    python benchmarks/variants_study.py relevance --data DIR --out DIR  LRP of finished runs into relevance.csv
    python benchmarks/variants_study.py repeats --out DIR              runs made once more on another machine
    python benchmarks/variants_study.py regimes --out DIR              runs of PLAN-regimes.md into regimes/
    python benchmarks/variants_study.py full-text --out DIR            its runs on all of the text into full-text/
    python benchmarks/variants_study.py full-text-gpu --out DIR        those of a GPU into full-text-gpu/
    python benchmarks/variants_study.py report --out DIR               runs.csv, table.md, figures/ of what is finished

All arms of seed 1 come first, then those of seed 2, … Whatever is finished is skipped and what was stopped goes on,
however it was stopped, so the same command continues. All runs are of one commit, without changes to tracked files, and
those of one --out of one kind of processor; another one is refused. `report` adds the runs of --out to the tables in
--results, where runs that were made elsewhere stay, so without any it makes the committed pages again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
from variants.collect import collect, collect_relevance, collect_repeats
from variants.design import ARMS, GRID_EPOCHS, GRID_SEED, RECIPE, REGIME_ARMS, SEEDS, SWAPS, Arm, swap_schedule
from variants.page import write_page
from variants.regimes import DROPOUT, FULL
from variants.runs import Setting, commit_of_checkout, complete, list_runs, machine, parse_run, relevance_of, result_of

from headscope.files.writing import write_json

RESULTS = Path(__file__).parent / "variants"


def main() -> None:
    """Run the step that the first word names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(STEPS))
    parser.add_argument("--data", type=Path, help="folder with train.de.gz, train.en.gz, val.de.gz, …")
    parser.add_argument("--parse", type=Path, help="German treebank in CoNLL-U, for syntax")
    parser.add_argument("--out", type=Path, required=True, help="directory of the study")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where tables and figures go")
    parser.add_argument("--arms", help="some of the arms, with commas; those of PLAN-regimes.md only so")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds 1 to N; arms of fewer seeds end earlier")
    parser.add_argument("--first-seed", type=int, default=1, help="leave out the seeds before")
    parser.add_argument("--rounds", type=int, default=10, help="of cost")
    parser.add_argument("--max-sentences", type=int, help="a slice of the training text, to try the script")
    parser.add_argument("--max-epochs", type=int, help="shorter runs, to try the script")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    names = args.arms.split(",") if args.arms else [arm.name for arm in ARMS]
    arms_by_name = {arm.name: arm for arm in (*ARMS, *REGIME_ARMS)}
    if unknown := sorted(set(names) - set(arms_by_name)):
        parser.error(f"--arms {unknown[0]!r} is not known; choose from {', '.join(arms_by_name)}")
    if args.what in ("grid", "train", "cost", "relevance") and args.data is None:
        parser.error("--data says where the texts are")
    if args.what == "syntax" and args.parse is None:
        parser.error("--parse says where the treebank is")
    if args.what in ("syntax", "relevance", "repeats", "regimes", *FULL, "report") and args.arms:
        parser.error(f"{args.what} is of all arms that have runs; leave out --arms")
    if args.what == "grid" and args.max_epochs is None:
        args.max_epochs = GRID_EPOCHS
    arms = [arms_by_name[name] for name in arms_by_name if name in names]
    STEPS[args.what](args, arms)


def begin(args: argparse.Namespace) -> Setting:
    """Make the directory, its note of what the study is, and the swap schedule; another study is refused.

    The schedule is named as it lies there, so the directory becomes the current one.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    changes = {"max_sentences": args.max_sentences, "max_epochs": args.max_epochs}
    recipe = {**RECIPE, **{name: value for name, value in changes.items() if value is not None}}
    about = {"recipe": recipe, "commit": commit_of_checkout(), "machine": machine(), "threads": args.threads}
    note = args.out / "study.json"
    if note.exists() and (earlier := json.loads(note.read_text(encoding="utf-8"))) != about:
        different = [name for name in about if about[name] != earlier.get(name)]
        sys.exit(f"{args.out} holds a study of another {', '.join(different)}; choose another --out")
    write_json(note, about)
    write_json(args.out / SWAPS, swap_schedule(recipe["max_epochs"]))
    data, out = args.data.resolve(), args.out.resolve()
    os.chdir(out)
    return Setting(data, out, recipe, args.threads, args.device, str(about["commit"]))


def train_all(args: argparse.Namespace, arms: list[Arm]) -> None:
    """Train every arm on its seeds."""
    setting = begin(args)
    for seed in range(args.first_seed, args.seeds + 1):
        for arm in arms:
            if seed <= arm.seeds:
                complete(setting, arm, seed, with_tests=arm in ARMS)


def grid(args: argparse.Namespace, arms: list[Arm]) -> None:
    """Validation losses of every arm at several rates, on a seed that no run has; nothing else is looked at."""
    setting = begin(args)
    for index in range(max(len(arm.rates) for arm in arms)):
        for arm, rate in ((arm, arm.rates[index]) for arm in arms if index < len(arm.rates)):
            complete(setting, replace(arm, name=f"{arm.name}@{rate:g}", lr=rate), GRID_SEED, with_tests=False)
    rows = [result_of(folder) for folder in list_runs(setting.out)]
    pd.DataFrame(rows).to_csv(setting.out / "grid.csv", index=False)


def cost(args: argparse.Namespace, arms: list[Arm]) -> None:
    """cost.csv among the results."""
    from variants.cost import measure_costs

    setting, results = (
        Setting(args.data.resolve(), args.out.resolve(), RECIPE, args.threads, args.device, ""),
        args.results,
    )
    rows = list(measure_costs(setting, arms, rounds=args.rounds, folder=setting.out))
    pd.DataFrame(rows).to_csv(results / "cost.csv", index=False)


def syntax(args: argparse.Namespace, arms: list[Arm]) -> None:
    """The heads of every finished run on a treebank, for the report."""
    for folder in list_runs(args.out):
        parse_run(args.out, folder.name, args.parse)


def relevance(args: argparse.Namespace, arms: list[Arm]) -> None:
    """relevance.csv among the results: the heads' relevance in every finished run, by the code of this checkout."""
    for folder in list_runs(args.out):
        relevance_of(args.out, folder.name, args.data)
    collect_relevance(args.out, args.results)


def repeats(args: argparse.Namespace, arms: list[Arm]) -> None:
    """repeated.csv among the results."""
    collect_repeats(args.out, args.results)


def regimes(args: argparse.Namespace, arms: list[Arm]) -> None:
    """The tables of regimes/, or of full-text/ or full-text-gpu/, among the results."""
    folder = args.results / (args.what if args.what in FULL else DROPOUT)
    folder.mkdir(exist_ok=True)
    collect(args.out, folder)


def report(args: argparse.Namespace, arms: list[Arm]) -> None:
    """The tables and figures."""
    from variants.figures import draw

    args.results.mkdir(parents=True, exist_ok=True)
    collect(args.out, args.results)
    draw(args.results)
    write_page(args.results)
    print((args.results / "table.md").read_text(encoding="utf-8"))


STEPS = {
    "grid": grid,
    "train": train_all,
    "cost": cost,
    "syntax": syntax,
    "relevance": relevance,
    "repeats": repeats,
    "regimes": regimes,
    **dict.fromkeys(FULL, regimes),
    "report": report,
}

if __name__ == "__main__":
    main()
