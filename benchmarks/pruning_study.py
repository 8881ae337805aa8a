"""Which criterion, which refit, which allocation: heads removed from the translation model that ships, all ways.

Run: python benchmarks/pruning_study.py measure --data DIR --ud DIR [--criteria NAMES] [--refits NAMES] [--kept NUMBERS]
     [--calibration captions,news,mixed] [--seed N] [--tested N] [--bleu N] [--tune UPDATES] [--out FILE.csv]
     python benchmarks/pruning_study.py draw [--out FILE.csv]

A cell is a calibration text, a seed (of the lines that are drawn), a criterion, a number of heads kept, a refit and a
number of updates of tuning. It is measured in domain (`--data`: Multi30k, test_2016_flickr) and out of it (`--ud`: the
parallel treebanks PUD, news and Wikipedia, the second half; calibration on news is on the first): nats a token, and
with `--bleu` BLEU of so many sentences. Cells that the file has are left out, so that the command goes on where it
stopped, and others are added by naming them. NAME:measured is `--allocate measured`, NAME:per-layer `--allocate
per-layer`. `low-rank` removes no head: all projections of attention get the best rank on the calibration text that has
as many parameters as the heads kept (`low_rank`); it is a row here and no compensation of headscope's, because a
product of two matrices has no place in the formats that are written.

A refit is an entry of `REFITS`: a function from the context and the heads that go to the model. `draw` draws the figure
of benchmarks/pruning/README.md.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from closed_form_pruning import METHODS, lines, open_model, scoring_context

from headscope.config.commands import TranslateOptions
from headscope.data.corpus import Corpus, open_corpus
from headscope.evaluation.metrics.base import Translations
from headscope.evaluation.metrics.predictions import Bleu
from headscope.evaluation.translation import translate_lines
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.projections import WeightOwners
from headscope.pruning.closed_form.compensate import RefittedCopy, compensate
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.closed_form.moments import text_batches
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.learning.examples import TrainingExamples
from headscope.pruning.learning.finetuning import Recipe, Tuner
from headscope.pruning.options.shared import Refit
from headscope.pruning.ranking.criterion import (
    ScoringContext,
    criterion_named,
    for_all_heads,
    measured_allocation,
    moments_of,
    refitted_checkpoint,
)
from headscope.pruning.ranking.ranking import rank_heads

FILE = Path(__file__).parent / "pruning" / "study.csv"
FIGURE = Path(__file__).parent / "pruning" / "figure.svg"
CRITERIA = (*METHODS, "layer-drop", "low-rank", "obs:per-layer", "obs-task:per-layer")
KEPT_HEADS, LINES, LIMIT = (60, 48, 36, 24), 400, 99
KEYS = ["calibration", "seed", "criterion", "kept", "refit", "tuned"]

Refitter = Callable[[ScoringContext, Sequence[HeadId]], Checkpoint]


def by_options(options: Refit, context: ScoringContext, heads: Sequence[HeadId]) -> Checkpoint:
    """The masked model, refitted as options say."""
    if options.method == "none":
        refits = compensate(context.checkpoint, moments_of(context), heads, options)
        return context.checkpoint.with_model(RefittedCopy.of(context.checkpoint, refits).model)
    return refitted_checkpoint(context, heads, options)


REFITS: dict[str, Refitter] = {
    "none": partial(by_options, Refit(method="none")),
    "mean": partial(by_options, Refit(method="mean")),
    "least-squares": partial(by_options, Refit()),
    "sequential": partial(by_options, Refit(sequential=True)),
    "damping 0.1": partial(by_options, Refit(damping=0.1)),
    "feed-forward": partial(by_options, Refit(sequential=True, feed_forward=True)),
}


@dataclass(frozen=True)
class Texts:
    """Calibration texts by name, test texts by domain."""

    calibration: dict[str, Corpus]
    tests: dict[str, Corpus]


def treebank(path: Path) -> list[str]:
    """The sentences of a .conllu.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.removeprefix("# text = ").rstrip("\n") for line in file if line.startswith("# text = ")]


def texts(data: Path, ud: Path, *, seed: int, test_count: int) -> Texts:
    """Captions and news, drawn by a seed; the tests are always the same."""
    captions = [lines(data / f"train.{side}.gz") for side in ("en", "de")]
    news = [treebank(ud / f"{side}_pud-ud-test.conllu.gz") for side in ("en", "de")]
    home = [lines(data / f"test_2016_flickr.{side}.gz", test_count) for side in ("en", "de")]
    middle, rng = len(news[0]) // 2, random.Random(seed)

    def pairs(sides: list[list[str]], numbers: Sequence[int]) -> list[list[str]]:
        return [[side[number] for number in numbers] for side in sides]

    in_domain = pairs(captions, rng.sample(range(len(captions[0])), LINES))
    out_domain = pairs(news, rng.sample(range(middle), LINES))
    mixture = [first[: LINES // 2] + second[: LINES // 2] for first, second in zip(in_domain, out_domain, strict=True)]
    test = pairs(news, range(middle, middle + min(test_count, middle)))
    calibration = {"captions": in_domain, "news": out_domain, "mixed": mixture}
    return Texts(
        {name: open_corpus(sides[0], target=sides[1]) for name, sides in calibration.items()},
        {name: open_corpus(sides[0], target=sides[1]) for name, sides in {"in": home, "out": test}.items()},
    )


def choose_removals(name: str, context: ScoringContext, sizes: Sequence[int]) -> dict[int, list[HeadId]]:
    """The removed heads for every number of heads kept."""
    layout = GateLayout(context.checkpoint.attention_sites)
    criterion, _, allocation = name.partition(":")
    ranking = criterion_named(criterion)
    scores = ranking.direction().apply(ranking.scores(context))
    if allocation == "measured":
        search = measured_allocation(context, layout.units, scores)
        scores = for_all_heads(context, search.take(layout.heads - min(sizes)))
    mode = "per-layer" if allocation == "per-layer" else "global"
    return {
        kept: layout.closed_heads(rank_heads(layout, kept, lambda removed: scores, allocation=mode).stays_open)
        for kept in sizes
    }


def low_rank(context: ScoringContext, share: float) -> Checkpoint:
    """Every projection of attention W [d m] as U Uᵀ W, U [d r] the principal directions of its outputs, mean kept.

    The best approximation of W x on the calibration text of rank r = share · d m / (d + m): with so many parameters. In
    float64; activation-aware (Yuan et al. 2023, ASVD, scale inputs instead).
    """
    checkpoint, owners = context.checkpoint, WeightOwners(context.checkpoint.model)
    names = {
        owner_names[0]
        for projection in checkpoint.projections.values()
        for slices in (projection.query, projection.key, projection.value, projection.output)
        if (owner_names := owners.of(slices)) is not None
    }
    sums: dict[str, list[Any]] = {name: [0, 0.0, 0.0] for name in names}
    model: Any = copy.deepcopy(checkpoint.model)
    approximation = checkpoint.with_model(model)

    def add(name: str, outputs: torch.Tensor) -> None:
        rows = outputs.detach().double().flatten(0, -2)  # [n d], padding too
        of_module = sums[name]
        of_module[0], of_module[1], of_module[2] = (
            of_module[0] + len(rows),
            of_module[1] + rows.sum(dim=0),
            of_module[2] + rows.T @ rows,
        )

    hooks = [
        model.get_submodule(name).register_forward_hook(lambda module, args, out, name=name: add(name, out))
        for name in names
    ]
    assert context.corpus is not None
    with torch.no_grad():
        for batch in text_batches(approximation, context.corpus, None):
            approximation.forward(batch)
        for hook in hooks:
            hook.remove()
        for name in names:
            linear, (count, total, second) = model.get_submodule(name), sums[name]
            mean = total / count
            weight = linear.weight.double()
            rank = max(round(share * weight.numel() / sum(weight.shape)), 1)
            directions = torch.linalg.eigh(second / count - mean.outer(mean))[1][:, -rank:]
            part = directions @ directions.T
            linear.weight.copy_(part @ weight)
            if linear.bias is not None:
                linear.bias.copy_(part @ linear.bias.double() + mean - part @ mean)
    return approximation


def tune_model(checkpoint: Checkpoint, corpus: Corpus, heads: Sequence[HeadId], updates: int) -> Checkpoint:
    """Train on the calibration text, the heads closed."""
    if updates:
        data = TrainingExamples(checkpoint, corpus, limit=LIMIT)
        recipe = Recipe(updates=updates, lr=3e-4, schedule="linear", tokens=1024)
        Tuner(checkpoint, data, recipe, list(checkpoint.model.parameters()), closed_heads=heads).run()
    return checkpoint


def bleu(checkpoint: Checkpoint, corpus: Corpus, sentences: int) -> float:
    """BLEU of the first sentences, as the checkpoint searches."""
    pairs = list(corpus.first(sentences))
    beams = translate_lines(checkpoint, (line.source for line in pairs), options=TranslateOptions(), tokens=2048)
    sums = Bleu().sums(Translations([best[0].text for best in beams], [line.target or "" for line in pairs]))
    return float(Bleu().of(sums[:, 0].sum(axis=0)[None])[0])


def cells(args: argparse.Namespace, existing: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """A row for every missing cell; the first is the intact model."""
    checkpoint = open_model("translation")
    corpora = texts(args.data, args.ud, seed=args.seed, test_count=args.tested)
    meters = {name: DamageMeter(checkpoint, test) for name, test in corpora.tests.items()}

    def metrics_of(model: Checkpoint) -> dict[str, float]:
        values = {f"nats_{name}": meter.measure(model.model).value for name, meter in meters.items()}
        if args.bleu:
            values |= {f"bleu_{name}": bleu(model, test, args.bleu) for name, test in corpora.tests.items()}
        return values

    if ("", 0, "intact", 72, "", 0) not in existing:
        yield dict(zip(KEYS, ("", 0, "intact", 72, "", 0), strict=True)) | metrics_of(checkpoint)
    for calibration in args.calibration:
        context = scoring_context(checkpoint, corpora.calibration[calibration], seed=args.seed)
        for kept in args.kept if "low-rank" in args.criteria else ():
            key = (calibration, args.seed, "low-rank", kept, "", 0)
            if key not in existing:
                yield dict(zip(KEYS, key, strict=True)) | metrics_of(low_rank(context, kept / 72))
        for criterion in (name for name in args.criteria if name != "low-rank"):
            keys = [
                (calibration, args.seed, criterion, kept, refit, args.tune)
                for kept in args.kept
                for refit in args.refits
            ]
            if not set(keys) - existing:
                continue
            removed = choose_removals(criterion, context, args.kept)
            for key in (key for key in keys if key not in existing):
                start, heads = time.monotonic(), removed[key[3]]
                model = REFITS[key[4]](context, heads)
                model = tune_model(model, corpora.calibration[calibration], heads, args.tune)
                seconds = time.monotonic() - start
                yield dict(zip(KEYS, key, strict=True)) | metrics_of(model) | {"seconds": seconds}


def measure(args: argparse.Namespace) -> None:
    """Measure the missing cells, print and write them."""
    torch.set_num_threads(1)
    table = pd.read_csv(args.out, keep_default_na=False) if args.out.exists() else pd.DataFrame(columns=KEYS)
    rows: list[dict[Any, Any]] = list(table.to_dict("records"))
    for row in cells(args, {tuple(record[key] for key in KEYS) for record in rows}):
        rows.append(row)
        print(row, flush=True)
        pd.DataFrame(rows).to_csv(args.out, index=False, float_format="%.5g")


# The figure.


def draw(args: argparse.Namespace) -> None:
    """Draw the figure of benchmarks/pruning/README.md."""
    table = pd.read_csv(args.out, keep_default_na=False)
    for name in [column for column in table if str(column).startswith("nats")]:
        table[name] = pd.to_numeric(table[name])
    draw_figure(table[table["criterion"] != "intact"], table[table["criterion"] == "intact"].iloc[0])


def draw_figure(rows: pd.DataFrame, intact: Any) -> None:
    """Loss against heads kept, a line a criterion: heads masked, and refitted."""
    import matplotlib.pyplot as plt

    rows = rows[(rows["calibration"] == rows["calibration"].iloc[0]) & (rows["tuned"] == 0)]
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), sharex=True, sharey="row", layout="constrained")
    names = sorted(set(rows["criterion"]))  # a colour is a criterion in all panels
    for row, (domain, title) in zip(axes, (("in", "captions"), ("out", "news")), strict=True):
        for axis, refit in zip(row, ("none", "least-squares"), strict=True):
            for name, part in rows[rows["refit"] == refit].groupby("criterion", sort=True):
                part, number = part.sort_values("kept"), names.index(name)
                style = dict(color=plt.get_cmap("tab20")(number % 20), marker="os^D"[number // 10], linewidth=1)
                axis.plot(part["kept"], part[f"nats_{domain}"], label=str(name), **style)
            axis.axhline(float(intact[f"nats_{domain}"]), color="0.4", linestyle=":", label="intact")
            axis.set_title(f"{title}, {'heads off' if refit == 'none' else 'refitted (least squares)'}")
            axis.set_xlabel("heads kept of 72")
            axis.set_xticks(sorted(set(rows["kept"])))
            axis.set_ylabel("nats a token")
    axes[0, 1].legend(fontsize=7, ncols=2)
    with plt.rc_context({"svg.hashsalt": "headscope"}):
        figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    """Measure, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "draw"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--ud", type=Path)
    parser.add_argument("--out", type=Path, default=FILE)
    for name, values in (("criteria", CRITERIA), ("refits", REFITS), ("calibration", ("captions", "news", "mixed"))):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=list(values))
    parser.add_argument("--kept", type=lambda text: [int(part) for part in text.split(",")], default=list(KEPT_HEADS))
    for name, number in (("seed", 1), ("tested", 500), ("bleu", 0), ("tune", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args()
    measure(args) if args.what == "measure" else draw(args)


if __name__ == "__main__":
    main()
