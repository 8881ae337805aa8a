"""Rankings of heads for removal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headscope.api.options import public_api
from headscope.config.option import converted
from headscope.engine.faithfulness.orders import Scores, heads_of_rows
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.progress import Progress
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.options.rank import RankConfig
from headscope.pruning.ranking.allocation import check_keep
from headscope.pruning.ranking.rank_run import context_of, scores_between, scoring_of, shape_of
from headscope.pruning.ranking.ranking import rank_heads
from headscope.pruning.selection import open_selection, selection_signature
from headscope.results.study import Study

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False, eq=False)
class Ranking:
    """Scores of heads, and the lowest or highest of them; heads with higher scores are kept longer.

    `by` is the criterion, `direction` says which end of it is removed first and why; `signature` is everything that the
    scores depend on. Heads that can only be removed together (those that share keys and values, or layers that share
    a module) have the mean of their scores. With `steps` the model is scored again when heads are asked for.
    """

    by: str
    direction: str
    signature: str
    _score: Callable[[list[HeadId]], Scores]
    _gating: GateLayout
    _steps: int
    _allocation: str

    @property
    def scores(self) -> pd.DataFrame:
        """A row per head that may be removed, the best first: site, layer, head, score, rank."""
        ranked = rank_heads(self._gating, self._gating.heads, self._score)
        return ranked.table(self._gating)[["site", "layer", "head", "score", "rank"]]

    @public_api
    def lowest(self, count: int, *, per_layer: bool = False, uniform: bool = False) -> list[HeadId]:
        """The `count` heads to remove first, by site, layer and head.

        `per_layer` takes the same share of every layer; `uniform` leaves the same number in every layer of the encoder,
        and of the decoder, which classes of transformers and most engines need. Default: as `allocate` said.

        ConfigError where there are fewer, where groups of heads do not add up to `count`, or where a head has no score.
        """
        count, removable = converted("count", int, count), self._gating.heads - len(self._gating.protected)
        if not 0 <= count <= removable:
            raise ConfigError(f"{count} heads cannot go; there are {removable} that may")
        if per_layer and uniform:
            raise ConfigError("per_layer and uniform both say how many heads each layer keeps; give one of them")
        if self._gating.groups and (per_layer or uniform):
            raise ConfigError("this ranking is by allocate='per-group', which says how many heads each layer keeps")
        allocation = "uniform" if uniform else "per-layer" if per_layer else self._allocation
        keep = self._gating.heads - count
        try:
            check_keep(self._gating, keep, allocation)
            ranked = rank_heads(self._gating, keep, self._score, steps=self._steps, allocation=allocation)
        except ConfigError as error:
            raise ConfigError(f"{count} heads cannot go: {str(error).replace('--', '')}") from None
        return self._gating.closed(ranked.kept)

    @public_api
    def highest(self, count: int, *, per_layer: bool = False, uniform: bool = False) -> list[HeadId]:
        """The `count` heads to keep, including all protected ones; options and ConfigError as of `lowest`."""
        return self._gating.without(self.lowest(self._gating.heads - count, per_layer=per_layer, uniform=uniform))

    def __len__(self) -> int:
        return self._gating.heads

    def __repr__(self) -> str:
        return f"<Ranking of {len(self)} heads by {self.by}, {self.direction}>"

    def _repr_html_(self) -> str:
        table: str = self.scores.to_html(index=False, border=0, max_rows=12)
        return table


def ranking_of(
    checkpoint: Checkpoint, config: RankConfig, *, study: Study | None, gates: Callable[[], str], progress: Progress
) -> Ranking:
    """A ranking of the heads of an open checkpoint: what `prune rank` computes, from the same options.

    `gates` says which are active, for the signature.
    """
    if study is not None and not isinstance(study, Study):
        raise ConfigError(f"study is of type {type(study).__name__}; give what analyze returns")
    rows = None if study is None else partial(_rows_of, study, checkpoint)
    opened = open_selection(config, trains=False, checkpoint=checkpoint)
    context, gating, noted = context_of(config, opened), opened.gating, gates()
    scoring = scoring_of(config, context, heads=rows)

    def score(removed: list[HeadId]) -> Scores:
        if gates() != noted:
            raise ConfigError("steps score anew, and the gates are others than when this ranking was made")
        with eval_mode(checkpoint.model):
            return scoring.score(removed)

    with progress("ranking", 1) as step, eval_mode(checkpoint.model):
        first = score([])
        if config.allocate == "measured":
            first = scores_between(context, gating, rank_heads(gating, gating.heads, lambda removed: first))
        step(1)
    about = {"study": study.signature} if study is not None else {}
    about |= {"gates": noted} if noted else {}
    return Ranking(
        config.by,
        str(scoring.direction),
        str(selection_signature("rank", opened, config, **shape_of(config, scoring), **about)),
        lambda removed: score(removed) if removed else first,
        gating,
        config.steps,
        config.allocate,
    )


def _rows_of(study: Study, checkpoint: Checkpoint) -> pd.DataFrame:
    """The rows of the heads of a study; ConfigError where the checkpoint lacks one of them."""
    for head in heads_of_rows(study.heads):
        if head.head >= checkpoint.layout.get((head.site, head.layer), 0):
            raise ConfigError(f"the study is of another model: this one has no head {head}")
    return study.heads
