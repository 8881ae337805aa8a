"""How often a verdict of non-inferiority is wrong, and how often it is given where it is right: simulated texts.

Run: python benchmarks/verdicts.py --out FILE.csv [--texts 1000] [--seed 1] [--only sentences,seeds,sizes]

Losses of sentences are drawn, `headscope.evaluation.non_inferiority.judge` decides. `false` is the share of texts that
are called non-inferior although the true loss is the margin (which is 1 everywhere); `false_worse` the share that are
called worse there; `power` the share that are called non-inferior where the true loss is 0 (of the same shape);
`student` is what Student's limit of the same sentences would have as `false`. `baseline` is what a sentence can lose
altogether, in margins: 1 says nothing about tails that come, 20 and 100 are margins of 5 % and 1 %.

- sentences: shapes of losses × numbers of sentences × baselines.
- seeds: seeds as a random factor, of a deviation that is so many times that of the sentences' mean.
- sizes: the share of sweeps with any false "non-inferior", of methods × sizes whose losses are all the margin (each
  sentence's loss is half its own and half the cell's), each by itself and as sweeps do it: a fixed sequence within a
  method, methods sharing the level.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headscope.bootstrap import LEVEL, Array
from headscope.evaluation.non_inferiority import NON_INFERIOR, WORSE, established, judge
from headscope.tails import student_quantile

Draw = Callable[[np.random.Generator, int], Array]

SHAPES: dict[str, Draw] = {
    "normal, sd 1.5": lambda luck, n: luck.normal(0, 1.5, n),
    "normal, sd 5": lambda luck, n: luck.normal(0, 5, n),
    "Student's t, 3 degrees": lambda luck, n: luck.standard_t(3, n),
    "exponential": lambda luck, n: luck.exponential(1, n) - 1,
    "exponential, to the left": lambda luck, n: 1 - luck.exponential(1, n),
    "gamma, shape 0.5": lambda luck, n: luck.gamma(0.5, 2, n) - 1,
    "log-normal, sd 1 of the log": lambda luck, n: luck.lognormal(0, 1, n) / math.exp(0.5) - 1,
    "Pareto, exponent 3": lambda luck, n: 2 * luck.pareto(3, n) - 1,
}
"""Losses [n] less their mean."""

LOST = 0.03
MANY = 1000  # sentences: a quarter of the texts then
SENTENCES, BASELINES = (8, 20, 60, 100, 300, 1000), (1.0, 20.0, 100.0)


def left_out(losses: Array) -> Array:
    """The mean of losses [... n], and without each [... 1 + n]."""
    total = losses.sum(axis=-1, keepdims=True)
    n = losses.shape[-1]
    return np.concatenate([total / n, (total - losses) / (n - 1)], axis=-1)


def verdict(losses: Array, *, baseline: float, level: float = LEVEL) -> str:
    """Of losses [n] or [seed n], with a margin of 1."""
    return judge(left_out(losses), margin=1.0, baseline=baseline, level=level).verdict


def student(losses: Array) -> bool:
    """Whether Student's limit of losses [n] is inside the margin."""
    error = float(losses.std(ddof=1)) / math.sqrt(len(losses))
    return float(losses.mean()) + student_quantile(LEVEL, len(losses) - 1) * error <= 1


def of_sentences(luck: np.random.Generator, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Shapes × numbers of sentences × baselines."""
    for n in map(int, asked.sentences.split(",")):
        count = asked.texts if n < MANY else asked.texts // 4
        for name, draw in SHAPES.items():
            samples = [draw(luck, n) for _ in range(count)]
            for baseline in map(float, asked.baselines.split(",")):
                yield row("sentences", name, n, baseline, [each + 1 for each in samples], samples)
        lost = [(luck.random(n) < LOST) / LOST + luck.normal(0, 0.1, n) for _ in range(count)]
        none = [luck.normal(0, 0.1, n) for _ in range(count)]
        yield row("sentences", "3 % of sentences lost", n, 1 / LOST, lost, none)


def row(
    part: str, name: str, n: int, baseline: float, margin: list[Array], none: list[Array], **more: Any
) -> dict[str, Any]:
    """The shares of texts with losses that are the margin in the mean, and of texts with none."""
    wrong = [verdict(losses, baseline=baseline) for losses in margin]
    right = [verdict(losses, baseline=baseline) for losses in none]
    flat = [losses.mean(axis=0) if losses.ndim == 2 else losses for losses in margin]
    return {
        "part": part,
        "losses": name,
        "sentences": n,
        "baseline": round(baseline, 1),
        **more,
        "texts": len(margin),
        "false": wrong.count(NON_INFERIOR) / len(wrong),
        "false_worse": wrong.count(WORSE) / len(wrong),
        "power": right.count(NON_INFERIOR) / len(right),
        "student": sum(map(student, flat)) / len(flat),
    }


def of_seeds(luck: np.random.Generator, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Numbers of seeds × deviations: loss = seed + sentence + both, normal."""
    for n in (100, 1000):
        count = asked.texts if n < MANY else asked.texts // 4
        for seeds in (2, 3, 5, 10):
            for times in (0.0, 0.5, 1.0, 4.0):
                deviation = times * 2 / math.sqrt(n)
                drawn = [
                    luck.normal(0, deviation, (seeds, 1)) + luck.normal(0, 2, n) + luck.normal(0, 1, (seeds, n))
                    for _ in range(count)
                ]
                shifted = [each + 1 for each in drawn]
                yield row("seeds", "normal", n, 1.0, shifted, drawn, seeds=seeds, deviation=times)


def of_sizes(luck: np.random.Generator, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Any false verdict among methods × sizes."""
    n, texts = 300, asked.texts
    for methods, sizes in ((1, 21), (7, 3), (21, 1)):
        for name in ("normal, sd 1.5", "exponential"):
            draw, alone, together = SHAPES[name], 0, 0
            for _ in range(texts):
                shared = draw(luck, n)
                cells = [[1 + (shared + draw(luck, n)) / 2 for _ in range(sizes)] for _ in range(methods)]
                alone += any(student(losses) for sequence in cells for losses in sequence)
                together += any(_any_established(sequence, methods) for sequence in cells)
            yield {
                "part": "sizes",
                "losses": name,
                "sentences": n,
                "baseline": 1.0,
                "methods": methods,
                "sizes": sizes,
                "texts": texts,
                "false": together / texts,
                "student": alone / texts,
            }


def _any_established(sequence: list[Array], methods: int) -> bool:
    level = 1 - (1 - LEVEL) / methods
    judged = (judge(left_out(losses), margin=1.0, baseline=1.0, level=level) for losses in sequence)
    return any(True for _ in established(judged))


PARTS = {"sentences": of_sentences, "seeds": of_seeds, "sizes": of_sizes}


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--sentences", default=",".join(map(str, SENTENCES)))
    parser.add_argument("--baselines", default=",".join(map(str, BASELINES)))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part in given.only.split(","):
        luck = np.random.default_rng([given.seed, len(part)])
        for found in PARTS[part](luck, given):
            rows.append(found)
            print({name: value for name, value in found.items() if name != "part"}, flush=True)
            pd.DataFrame(rows).to_csv(given.out, index=False)
    print(f"largest share of false verdicts: {max(each['false'] for each in rows):.3f}")


if __name__ == "__main__":
    main()
