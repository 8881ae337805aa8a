"""How often a verdict of non-inferiority is wrong, and how often it is given where it is right: simulated texts.

Run: python benchmarks/verdicts.py --out FILE.csv [--texts 1000] [--seed 1] [--only accuracy,sentences,seeds,sizes]
     python benchmarks/verdicts.py --out FILE.csv --draw

Losses of sentences are drawn, `headscope.evaluation.non_inferiority.judge` decides. `false` is the share of texts that
are called non-inferior although the true loss is the margin (which is 1 everywhere); `false_worse` the share that are
called worse there; `power` the share that are called non-inferior where the true loss is 0 (of the same shape);
`student` is what Student's limit of the same sentences would have as `false`. `largest` is what a sentence can lose
altogether, in margins: 1 says nothing about tails that come, 20 and 100 are margins of 5 % and 1 % of it.

- accuracy: models of an accuracy × margins, judged as `prune` does it. Right lines are lost; with `gains` 2 % of all
  lines are besides, and as many won.
- sentences: shapes of losses × numbers of sentences × largest losses.
- seeds: seeds as a random factor, of a deviation that is so many times that of the sentences' mean.
- sizes: the share of sweeps with any false "non-inferior", of methods × sizes whose losses are all the margin (each
  sentence's loss is half its own and half the cell's), each by itself and as sweeps do it: a fixed sequence within a
  method, methods sharing the level.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtrit

from headscope.bootstrap import LEVEL, Array
from headscope.evaluation.before_after import judge_loss
from headscope.evaluation.margin import Margin
from headscope.evaluation.metrics.base import METRICS
from headscope.evaluation.non_inferiority import NON_INFERIOR, WORSE, judge, take_established

Draw = Callable[[np.random.Generator, int], Array]

SHAPES: dict[str, Draw] = {
    "normal, sd 1.5": lambda rng, n: rng.normal(0, 1.5, n),
    "normal, sd 5": lambda rng, n: rng.normal(0, 5, n),
    "Student's t, 3 degrees": lambda rng, n: rng.standard_t(3, n),
    "exponential": lambda rng, n: rng.exponential(1, n) - 1,
    "exponential, to the left": lambda rng, n: 1 - rng.exponential(1, n),
    "gamma, shape 0.5": lambda rng, n: rng.gamma(0.5, 2, n) - 1,
    "log-normal, sd 1 of the log": lambda rng, n: rng.lognormal(0, 1, n) / math.exp(0.5) - 1,
    "Pareto, exponent 3": lambda rng, n: 2 * rng.pareto(3, n) - 1,
}
"""Losses [n] less their mean."""

LOST_SHARE = 0.03
GAINS = 0.02
LARGE_TEXT = 1000  # sentences: a quarter of the texts then
SENTENCES, LARGEST = (8, 20, 60, 100, 300, 1000), (1.0, 20.0, 100.0)


def left_out(losses: Array) -> Array:
    """The mean of losses [... n], and without each [... 1 + n]."""
    total = losses.sum(axis=-1, keepdims=True)
    n = losses.shape[-1]
    return np.concatenate([total / n, (total - losses) / (n - 1)], axis=-1)


def verdict(losses: Array, *, largest: float, level: float = LEVEL) -> str:
    """The verdict on losses [n] or [seed n], with a margin of 1."""
    return judge(left_out(losses), margin=1.0, largest=largest, level=level).verdict


def student(losses: Array) -> bool:
    """Whether Student's limit of losses [n] is inside the margin."""
    error = float(losses.std(ddof=1)) / math.sqrt(len(losses))
    return float(losses.mean()) + float(stdtrit(len(losses) - 1, LEVEL)) * error <= 1


def of_sentences(rng: np.random.Generator, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Shapes × numbers of sentences × largest losses."""
    for n in map(int, args.sentences.split(",")):
        count = args.texts if n < LARGE_TEXT else args.texts // 4
        for name, draw in SHAPES.items():
            samples = [draw(rng, n) for _ in range(count)]
            for largest in map(float, args.largest.split(",")):
                yield row("sentences", name, n, largest, [losses + 1 for losses in samples], samples)
        rare = [(rng.random(n) < LOST_SHARE) / LOST_SHARE + rng.normal(0, 0.1, n) for _ in range(count)]
        no_loss = [rng.normal(0, 0.1, n) for _ in range(count)]
        yield row("sentences", "3 % of sentences lost", n, 1 / LOST_SHARE, rare, no_loss)


def row(
    part: str, name: str, n: int, largest: float, margin: list[Array], no_loss: list[Array], **more: Any
) -> dict[str, Any]:
    """Shares of verdicts on texts whose mean loss is the margin, and on texts without loss."""
    wrong = [verdict(losses, largest=largest) for losses in margin]
    right = [verdict(losses, largest=largest) for losses in no_loss]
    flat = [losses.mean(axis=0) if losses.ndim == 2 else losses for losses in margin]
    return {
        "part": part,
        "losses": name,
        "sentences": n,
        "largest": round(largest, 1),
        **more,
        **shares(wrong, right, flat),
    }


def shares(wrong: list[str], right: list[str], losses: list[Array]) -> dict[str, float]:
    """Shares of verdicts on texts whose mean loss is the margin (`losses`, in margins), and on texts without loss."""
    return {
        "texts": len(wrong),
        "false": wrong.count(NON_INFERIOR) / len(wrong),
        "false_worse": wrong.count(WORSE) / len(wrong),
        "power": right.count(NON_INFERIOR) / len(right),
        "student": sum(map(student, losses)) / len(losses),
    }


def of_accuracy(rng: np.random.Generator, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Numbers of lines × accuracies × margins, without and with gains."""
    for n, accuracy, share, gains in product((300, 600, 1000), (0.98, 0.8, 0.5, 0.3), (0.01, 0.02), (0.0, GAINS)):
        by_loss: dict[float, list[str]] = {share * accuracy: [], 0.0: []}
        losses = []
        for true_loss, verdicts in by_loss.items():
            for _ in range(args.texts):
                before = rng.random(n) < accuracy
                after = np.where(
                    before, rng.random(n) * accuracy >= true_loss + gains, rng.random(n) * (1 - accuracy) < gains
                )
                margin = share * before.mean()  # of the accuracy that is measured
                losses += [(before.astype(float) - after) / margin] if true_loss else []
                verdicts.append(accuracy_verdict(before, after, margin))
        about = {"part": "accuracy", "losses": f"lines lost{', others won' * (gains > 0)}", "sentences": n}
        yield about | {"accuracy": accuracy, "margin": share} | shares(by_loss[share * accuracy], by_loss[0.0], losses)


def accuracy_verdict(before: npt.NDArray[np.bool_], after: npt.NDArray[np.bool_], margin: float) -> str:
    """The verdict of `prune` on lines [n] that are right before and after."""
    metric = METRICS.get("accuracy")
    first, second = (np.stack([right, np.ones_like(right)], axis=1).astype(float) for right in (before, after))
    return judge_loss(metric, [second], first, Margin(margin)).verdict


def of_seeds(rng: np.random.Generator, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Numbers of seeds × deviations: loss = seed + sentence + both, normal."""
    for n in (100, 1000):
        count = args.texts if n < LARGE_TEXT else args.texts // 4
        for seeds in (2, 3, 5, 10):
            for times in (0.0, 0.5, 1.0, 4.0):
                deviation = times * 2 / math.sqrt(n)
                samples = [
                    rng.normal(0, deviation, (seeds, 1)) + rng.normal(0, 2, n) + rng.normal(0, 1, (seeds, n))
                    for _ in range(count)
                ]
                at_margin = [losses + 1 for losses in samples]
                yield row("seeds", "normal", n, 1.0, at_margin, samples, seeds=seeds, deviation=times)


def of_sizes(rng: np.random.Generator, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Any false verdict among methods × sizes."""
    n, texts = 300, args.texts
    for methods, sizes in ((1, 21), (7, 3), (21, 1)):
        for name in ("normal, sd 1.5", "exponential"):
            draw, alone, together = SHAPES[name], 0, 0
            for _ in range(texts):
                shared = draw(rng, n)
                cells = [[1 + (shared + draw(rng, n)) / 2 for _ in range(sizes)] for _ in range(methods)]
                alone += any(student(losses) for sequence in cells for losses in sequence)
                together += any(_any_established(sequence, methods) for sequence in cells)
            yield {
                "part": "sizes",
                "losses": name,
                "sentences": n,
                "largest": 1.0,
                "methods": methods,
                "sizes": sizes,
                "texts": texts,
                "false": together / texts,
                "student": alone / texts,
            }


def _any_established(sequence: list[Array], methods: int) -> bool:
    level = 1 - (1 - LEVEL) / methods
    results = (judge(left_out(losses), margin=1.0, largest=1.0, level=level) for losses in sequence)
    return any(True for _ in take_established(results))


PARTS = {"accuracy": of_accuracy, "sentences": of_sentences, "seeds": of_seeds, "sizes": of_sizes}


def draw(table: pd.DataFrame, path: Path) -> None:
    """False verdicts and power of models that lose lines, by accuracy and number of lines, at a margin of 1 %."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = table[(table["part"] == "accuracy") & (table["margin"] == 0.01) & (table["losses"] == "lines lost")]
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    titles = {"false": "called non-inferior, true loss 1 %", "power": "called non-inferior, no loss"}
    for axes, (column, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for accuracy, part in rows.groupby("accuracy"):
            axes.plot(part["sentences"], part[column], "o-", label=f"accuracy {accuracy}")
        axes.set(title=title, xlabel="held-out lines", ylabel="share of texts")
    figure.axes[0].axhline(0.05, color="0.6", linestyle=":")
    figure.axes[1].legend(fontsize=7)
    with rc_context({"svg.hashsalt": "headscope"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Simulate, print and write; or draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--sentences", default=",".join(map(str, SENTENCES)))
    parser.add_argument("--largest", default=",".join(map(str, LARGEST)))
    parser.add_argument("--draw", action="store_true", help="figure.svg beside FILE.csv, which is there")
    args = parser.parse_args()
    if args.draw:
        return draw(pd.read_csv(args.out), args.out.with_name("figure.svg"))
    rows: list[dict[str, Any]] = []
    for part in args.only.split(","):
        rng = np.random.default_rng([args.seed, len(part)])
        for result in PARTS[part](rng, args):
            rows.append(result)
            print({name: value for name, value in result.items() if name != "part"}, flush=True)
            pd.DataFrame(rows).to_csv(args.out, index=False)
    print(f"largest share of false verdicts: {max(row['false'] for row in rows):.3f}")


if __name__ == "__main__":
    main()
