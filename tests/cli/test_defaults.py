"""What a command does unasked is what its config does: the command line has no defaults of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import pytest

from headscope.cli import analyze, evaluate, prune_learn, prune_rank, prune_remove, prune_sweep
from headscope.config import AnalyzeConfig, EvaluateConfig
from headscope.engine.base import ANALYSES
from headscope.pruning.learning.l0 import L0Options
from headscope.pruning.learning.learn import LearnConfig
from headscope.pruning.learning.subset import SubsetOptions
from headscope.pruning.ranking.config import RankConfig
from headscope.pruning.removal.remove import RemoveConfig
from headscope.pruning.sweep.config import SweepConfig

RENAMED = {"temperature": "first", "end_temperature": "last"}


@pytest.mark.parametrize(
    ("command", "configs"),
    [
        (analyze.analyze, [AnalyzeConfig, *(cls.Options for _, cls in ANALYSES)]),
        (evaluate.evaluate, [EvaluateConfig]),
        (prune_remove.remove, [RemoveConfig]),
        (prune_learn.l0, [LearnConfig, L0Options]),
        (prune_learn.subset, [LearnConfig, SubsetOptions]),
        (prune_rank.rank, [RankConfig]),
        (prune_sweep.sweep, [SweepConfig]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_defaults_are_those_of_the_config(command: Callable[..., None], configs: list[type[Any]]) -> None:
    known = {field.name: field.default for config in configs for field in fields(config)}
    options = inspect.signature(command).parameters
    assert len(options) > 10
    for name, option in options.items():
        if name in ("config", "json"):
            continue
        theirs = known.get(name, known.get(RENAMED.get(name, ""), "no such field"))
        mine = option.default
        if theirs is MISSING:
            assert mine is inspect.Parameter.empty, name
        elif isinstance(theirs, tuple):  # lists are text on the command line
            assert tuple((mine or "").split(",")) == (tuple(map(str, theirs)) or ("",)), name
        else:
            assert mine == theirs, name
