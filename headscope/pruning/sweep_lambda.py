"""Gates learnt anew for each of several λ: one directory each, and one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from headscope.errors import ConfigError
from headscope.progress import Progress, no_progress
from headscope.pruning.choice import Choice, check_out, clear
from headscope.pruning.l0 import L0Options
from headscope.pruning.learn import (
    LearnConfig,
    run_learning,
)
from headscope.results import written


@dataclass(frozen=True)
class LambdaSweep:
    """What every λ gave: `table` has lambda, kept, kept per site, and the nll of masked and tuned models."""

    config: LearnConfig
    choices: tuple[Choice, ...]
    table: pd.DataFrame


def run_lambdas(
    config: LearnConfig,
    strengths: Sequence[float],
    *,
    progress: Progress = no_progress,
    done: Callable[[Choice], None] = lambda choice: None,
) -> LambdaSweep:
    """Learn gates for every λ of `strengths`, each from the checkpoint, into OUT/lambda-λ; and OUT/sweep.csv.

    ConfigError for a λ that is negative or there twice, before anything is learnt.
    """
    if not isinstance(config.method, L0Options):
        raise ConfigError("a list of --lambda is for l0")
    if len(set(strengths)) < len(strengths):
        raise ConfigError("--lambda holds the same number twice")
    if config.resume:
        raise ConfigError("--resume is for one --lambda at a time: give OUT/lambda-… as --out, and that number")
    methods = [replace(config.method, strength=strength, keep=None) for strength in strengths]
    check_out(config)
    clear(config.out)
    choices = []
    for method in methods:
        out = config.out / f"lambda-{method.strength:g}"
        choices.append(run_learning(replace(config, method=method, out=out), progress=progress))
        done(choices[-1])
    table = pd.DataFrame([_row(choice, strength) for choice, strength in zip(choices, strengths, strict=True)])
    written(config.out / "sweep.csv", lambda path: table.to_csv(path, index=False))
    return LambdaSweep(config, tuple(choices), table)


def _row(choice: Choice, strength: float) -> dict[str, float | int | str]:
    per_site = {f"kept_{site}": kept for site, (kept, _) in choice.per_site().items()}
    return {"lambda": strength, "kept": len(choice.kept), **per_site, **{f"nll_{k}": v for k, v in choice.nll.items()}}
