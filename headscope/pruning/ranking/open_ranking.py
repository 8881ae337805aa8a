"""A ranking of the heads of an open model, of which any number may go: what `Model.rank` does."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headscope.engine.faithfulness.orders import Scores, heads_of_rows
from headscope.errors import ConfigError, restate
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.progress import Progress
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.ranking.allocation import check_keep
from headscope.pruning.ranking.rank_run import allocation_of, context_of, scoring_of, shape_of
from headscope.pruning.ranking.ranking import rank_heads
from headscope.pruning.selection import open_selection, ranking_of, selection_signature
from headscope.results.ranking import Ranking
from headscope.results.study import Study

if TYPE_CHECKING:
    import pandas as pd


def rank_open_model(
    checkpoint: Checkpoint, config: RankConfig, *, study: Study | None, gates: Callable[[], str], progress: Progress
) -> Ranking:
    """A ranking of the heads of an open checkpoint, of which no head goes yet: what `prune rank` computes.

    `gates` says which are active, for the signature.
    """
    if study is not None and not isinstance(study, Study):
        raise ConfigError(f"study is of type {type(study).__name__}; give what analyze returns")
    began, gates_at_start = time.monotonic(), gates()
    setup = open_selection(config, trains=False, checkpoint=checkpoint)
    context, gating = context_of(config, setup), setup.gating
    scoring = scoring_of(config, context, heads=None if study is None else partial(_rows_of, study, checkpoint))

    def score(heads_off: list[HeadId]) -> Scores:
        if gates() != gates_at_start:
            raise ConfigError("steps score anew, and the gates are others than when this ranking was made")
        with eval_mode(checkpoint.model):
            return scoring.score(heads_off)

    with progress("ranking", 1) as step, eval_mode(checkpoint.model):
        first = score([])
        ranking = rank_heads(gating, gating.heads, lambda removed: first)
        if config.allocate == "measured":
            first = allocation_of(context, gating, ranking).take(gating.heads - len(gating.protected_heads))
            ranking = rank_heads(gating, gating.heads, lambda removed: first)
        step(1)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def lowest(count: int, allocation: str) -> list[HeadId]:
        removable, keep = gating.heads - len(gating.protected_heads), gating.heads - count
        if not 0 <= count <= removable:
            raise ConfigError(f"{count} heads cannot go; there are {removable} that may")
        if gating.groups and allocation:
            raise ConfigError("this ranking is by allocate='per-group', which says how many heads each layer keeps")
        with restate(ConfigError, f"{count} heads cannot go: {{why}}"):
            check_keep(gating, keep, allocation or config.allocate)
            going = partial(rank_heads, steps=config.steps, allocation=allocation or config.allocate)
            choice = going(gating, keep, lambda removed: score(removed) if removed else first)
        return gating.closed_heads(choice.stays_open)

    about = {"study": study.signature} if study is not None else {}
    about |= {"gates": gates_at_start} if gates_at_start else {}
    return ranking_of(
        setup,
        [],
        ranking.table(gating),
        folder=Path(checkpoint.path),
        method="rank",
        signature=selection_signature("rank", setup, config, **shape_of(config, scoring), **about),
        facts={"ranking": scoring.entries()},
        began=began,
        lowest=lowest,
    )


def _rows_of(study: Study, checkpoint: Checkpoint) -> pd.DataFrame:
    """The rows of the heads of a study; ConfigError where the checkpoint lacks one of them."""
    for head in heads_of_rows(study.heads):
        if head.head >= checkpoint.layout.get((head.site, head.layer), 0):
            raise ConfigError(f"the study is of another model: this one has no head {head}")
    return study.heads
