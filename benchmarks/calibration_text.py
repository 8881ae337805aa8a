"""How much text a refit needs, and what text of another kind does: removal in closed form × calibration texts.

Run: python benchmarks/calibration_text.py bert|translation --data DIR --ud DIR --out FILE.csv [--seeds N] [--sizes N,N]

DIR of --data has Multi30k (captions), that of --ud the UD treebank EWT (web text). A third to two thirds of the heads
go by `obs` (the BERT) or `obs-task` (the translation model), ranked and refitted on the calibration text; metrics are
those of closed_form_pruning.py. For the BERT both kinds of text are calibrated on and tested on, 200 test sentences
each. A row for every calibration text, size, seed, number of heads kept and test text; seconds are of ranking and
refits together.
"""

from __future__ import annotations

import argparse
import gzip
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from closed_form_pruning import keep_highest, lines, open_model, refit_model, scoring_context, texts

from headscope.data.corpus import Corpus, open_corpus
from headscope.formats.base import Checkpoint
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.ranking.criterion import criterion_named

SIZES = (50, 100, 200, 400, 1000, 2000, 5000)
KEPT_HEADS = (48, 36, 24)


def treebank(path: Path) -> list[str]:
    """The sentences of a .conllu.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.removeprefix("# text = ").rstrip("\n") for line in file if line.startswith("# text = ")]


def results(
    checkpoint: Checkpoint, calibration: Corpus, tests: dict[str, Corpus], *, method: str, seed: int
) -> Iterator[dict[str, Any]]:
    """A row for every number of heads kept and every test text."""
    layout, start = GateLayout(checkpoint.attention_sites), time.monotonic()
    context = scoring_context(checkpoint, calibration, seed=seed)
    scores = criterion_named(method).scores(context)
    ranking_seconds = time.monotonic() - start
    meters = {name: DamageMeter(checkpoint, test) for name, test in tests.items()}
    for kept in KEPT_HEADS:
        start = time.monotonic()
        heads = layout.closed_heads(keep_highest(scores, layout, kept))
        model = refit_model("least-squares", context, heads)
        seconds = ranking_seconds + time.monotonic() - start
        for name, meter in meters.items():
            value = meter.measure(model).value
            yield {"method": method, "kept": kept, "tested": name, "value": value, "seconds": seconds}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("bert", "translation"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ud", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    args = parser.parse_args()
    bert, checkpoint, rows = args.model == "bert", open_model(args.model), []
    web = treebank(args.ud / "en_ewt-ud-train.conllu.gz")
    captions = lines(args.data / "train.en.gz")
    tests = {"captions": texts(args.data, seed=1, count=8, target=not bert, test_count=200 if bert else None)[1]}
    if bert:
        tests["web"] = open_corpus(treebank(args.ud / "en_ewt-ud-test.conllu.gz")[:200])
    for seed in range(1, args.seeds + 1):
        for size in map(int, args.sizes.split(",")):
            calibrations = {"captions": texts(args.data, seed=seed, count=size, target=not bert)[0]}
            if bert:
                calibrations = {
                    name: open_corpus(random.Random(seed).sample(text, size))
                    for name, text in (("captions", captions), ("web", web))
                }
            for name, calibration in calibrations.items():
                method = "obs" if bert else "obs-task"
                for row in results(checkpoint, calibration, tests, method=method, seed=seed):
                    rows.append({"seed": seed, "calibrated": name, "sentences": size, **row})
                    print(rows[-1], flush=True)
                pd.DataFrame(rows).to_csv(args.out, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
