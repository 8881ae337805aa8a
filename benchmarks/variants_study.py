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
from variants.runs import Setting, commit_of_checkout, complete, finished, machine, parsed, relevance_of, result_of

from headscope.files.writing import write_json

RESULTS = Path(__file__).parent / "variants"


def main() -> None:
    """Do what the first word says."""
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
    asked = parser.parse_args()
    names = asked.arms.split(",") if asked.arms else [arm.name for arm in ARMS]
    known = {arm.name: arm for arm in (*ARMS, *REGIME_ARMS)}
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"--arms {unknown[0]!r} is not known; choose from {', '.join(known)}")
    if asked.what in ("grid", "train", "cost", "relevance") and asked.data is None:
        parser.error("--data says where the texts are")
    if asked.what == "syntax" and asked.parse is None:
        parser.error("--parse says where the treebank is")
    if asked.what in ("syntax", "relevance", "repeats", "regimes", *FULL, "report") and asked.arms:
        parser.error(f"{asked.what} is of all arms that have runs; leave out --arms")
    if asked.what == "grid" and asked.max_epochs is None:
        asked.max_epochs = GRID_EPOCHS
    arms = [known[name] for name in known if name in names]
    STEPS[asked.what](asked, arms)


def begin(asked: argparse.Namespace) -> Setting:
    """Make the directory, its note of what the study is, and the swap schedule; another study is refused.

    The schedule is named as it lies there, so the directory becomes the current one.
    """
    asked.out.mkdir(parents=True, exist_ok=True)
    changes = {"max_sentences": asked.max_sentences, "max_epochs": asked.max_epochs}
    recipe = {**RECIPE, **{name: value for name, value in changes.items() if value is not None}}
    about = {"recipe": recipe, "commit": commit_of_checkout(), "machine": machine(), "threads": asked.threads}
    note = asked.out / "study.json"
    if note.exists() and (earlier := json.loads(note.read_text(encoding="utf-8"))) != about:
        different = [name for name in about if about[name] != earlier.get(name)]
        sys.exit(f"{asked.out} holds a study of another {', '.join(different)}; choose another --out")
    write_json(note, about)
    write_json(asked.out / SWAPS, swap_schedule(recipe["max_epochs"]))
    data, out = asked.data.resolve(), asked.out.resolve()
    os.chdir(out)
    return Setting(data, out, recipe, asked.threads, asked.device, str(about["commit"]))


def train_all(asked: argparse.Namespace, arms: list[Arm]) -> None:
    """Every arm on its seeds."""
    setting = begin(asked)
    for seed in range(asked.first_seed, asked.seeds + 1):
        for arm in arms:
            if seed <= arm.seeds:
                complete(setting, arm, seed, measured=arm in ARMS)


def grid(asked: argparse.Namespace, arms: list[Arm]) -> None:
    """Validation losses of every arm at several rates, on a seed that no run has; nothing else is looked at."""
    setting = begin(asked)
    for place in range(max(len(arm.rates) for arm in arms)):
        for arm, rate in ((arm, arm.rates[place]) for arm in arms if place < len(arm.rates)):
            complete(setting, replace(arm, name=f"{arm.name}@{rate:g}", lr=rate), GRID_SEED, measured=False)
    rows = [result_of(folder) for folder in finished(setting.out)]
    pd.DataFrame(rows).to_csv(setting.out / "grid.csv", index=False)


def cost(asked: argparse.Namespace, arms: list[Arm]) -> None:
    """cost.csv among the results."""
    from variants.cost import measured

    setting, results = (
        Setting(asked.data.resolve(), asked.out.resolve(), RECIPE, asked.threads, asked.device, ""),
        asked.results,
    )
    rows = list(measured(setting, arms, rounds=asked.rounds, folder=setting.out))
    pd.DataFrame(rows).to_csv(results / "cost.csv", index=False)


def syntax(asked: argparse.Namespace, arms: list[Arm]) -> None:
    """The heads of every finished run on a treebank, for what report says of them."""
    for folder in finished(asked.out):
        parsed(asked.out, folder.name, asked.parse)


def relevance(asked: argparse.Namespace, arms: list[Arm]) -> None:
    """relevance.csv among the results: the heads' relevance in every finished run, by the code of this checkout."""
    for folder in finished(asked.out):
        relevance_of(asked.out, folder.name, asked.data)
    collect_relevance(asked.out, asked.results)


def repeats(asked: argparse.Namespace, arms: list[Arm]) -> None:
    """repeated.csv among the results."""
    collect_repeats(asked.out, asked.results)


def regimes(asked: argparse.Namespace, arms: list[Arm]) -> None:
    """The tables of regimes/, or of full-text/ or full-text-gpu/, among the results."""
    folder = asked.results / (asked.what if asked.what in FULL else DROPOUT)
    folder.mkdir(exist_ok=True)
    collect(asked.out, folder)


def report(asked: argparse.Namespace, arms: list[Arm]) -> None:
    """The tables and figures."""
    from variants.figures import draw

    asked.results.mkdir(parents=True, exist_ok=True)
    collect(asked.out, asked.results)
    draw(asked.results)
    write_page(asked.results)
    print((asked.results / "table.md").read_text(encoding="utf-8"))


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
