"""Rankings of heads for removal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from headscope.api.options import PathName
from headscope.api.progress import Report, progress_of
from headscope.api.selection import Heads, head_ids_of
from headscope.api.study import Study
from headscope.api.texts import TextPair
from headscope.data.batching import BatchingOptions
from headscope.engine.base import RunOptions
from headscope.engine.faithfulness.orders import Scores
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.pruning.gate_layout import GateLayout, gate_layout
from headscope.pruning.options.rank import End
from headscope.pruning.ranking.criterion import Direction, ScoringContext, column_named, criterion_named
from headscope.pruning.ranking.rank_run import ranking_table
from headscope.pruning.ranking.ranking import rank_heads
from headscope.pruning.scores_file import scores_in
from headscope.results import Signature, signature_of

if TYPE_CHECKING:
    import pandas as pd


class Ranking:
    """Scores of heads, and the lowest or highest of them; heads with higher scores are kept longer.

    `by` is the criterion, `direction` says which end of it is removed first and why; `signature` is everything that the
    scores depend on. Heads that can only be removed together (those that share keys and values, or layers that share
    a module) have the mean of their scores.
    """

    def __init__(
        self, scores: Scores, gating: GateLayout, *, by: str, direction: Direction, signature: Signature
    ) -> None:
        self._scores, self._gating = direction.apply(scores), gating
        self.by, self.direction = by, str(direction)
        self.signature = str(signature)

    @property
    def scores(self) -> pd.DataFrame:
        """A row per head that may be removed, the best first: site, layer, head, score, rank."""
        ranked = rank_heads(self._gating, self._gating.heads, lambda removed: self._scores)
        return ranking_table(self._gating, ranked)[["site", "layer", "head", "score", "rank"]]

    def lowest(self, count: int, *, per_layer: bool = False, uniform: bool = False) -> list[HeadId]:
        """The `count` heads to remove first, by site, layer and head; `per_layer` takes the same share of every layer.

        `uniform` leaves the same number in every layer of the encoder, and of the decoder, which classes of
        transformers and most engines need.

        ConfigError where there are fewer, where groups of heads do not add up to `count`, or where a head has no score.
        """
        removable = self._gating.heads - len(self._gating.protected)
        if not 0 <= count <= removable:
            raise ConfigError(f"{count} heads cannot go; there are {removable} that may")
        try:
            selection = rank_heads(
                self._gating,
                self._gating.heads - count,
                lambda removed: self._scores,
                allocation="uniform" if uniform else "per-layer" if per_layer else "global",
            )
        except ConfigError as error:
            raise ConfigError(f"{count} heads cannot go: {str(error).replace('--', '')}") from None
        return self._gating.closed(selection.kept)

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


def gating_of(checkpoint: Checkpoint, *, sites: str | Iterable[str], protect: Heads | None) -> GateLayout:
    """The heads that may be removed, in groups that can only be removed together."""
    names = [site.strip() for site in sites.split(",")] if isinstance(sites, str) else list(sites)
    safe = [] if protect is None else head_ids_of(protect, checkpoint.layout)
    return gate_layout(checkpoint.attention_sites, sites=names, protect=safe)


def ranking_of_study(checkpoint: Checkpoint, layout: GateLayout, study: Study, by: str, *, keep: End | None) -> Ranking:
    """A ranking by a column of a study; ConfigError where the study does not have it, or is of another model."""
    column = column_named(by)
    scores, direction = scores_in(study.heads, by), column.direction(keep)
    if strange := [head for head in scores if head.head >= checkpoint.layout.get((head.site, head.layer), 0)]:
        raise ConfigError(f"the study is of another model: this one has no head {strange[0]}")
    signature = Signature({"by": f"{by}{direction.suffix}", "study": study.signature})
    return Ranking(scores, layout, by=by, direction=direction, signature=signature)


def measured_ranking(
    checkpoint: Checkpoint,
    layout: GateLayout,
    by: str,
    text: TextPair | None,
    *,
    parse: PathName | None,
    keep: End | None,
    max_sentences: int,
    batching: BatchingOptions,
    seed: int,
    gates: str,
    progress: Report,
) -> Ranking:
    """A ranking by a criterion, measured on the first `max_sentences` of a text; `gates` is for the signature."""
    parse = None if parse is None else str(parse)
    criterion = criterion_named(by, parsed=parse is not None)
    direction = criterion.direction(keep)
    if parse == "stanza":
        raise ConfigError("parse='stanza' is for analyze; rank by the study that it gives, study=")
    corpus = None if text is None else text.corpus(checkpoint, parse=parse, max_sentences=max_sentences)
    if criterion.reads_text and corpus is None:
        raise ConfigError(f"by={by!r} is measured on text: give text=, or a study= that has it")
    with eval_mode(checkpoint.model), progress_of(progress)("ranking", 1) as step:
        options = RunOptions(seed=seed)
        context = ScoringContext(checkpoint, corpus, batching, options, candidates=layout.gated_heads)
        scores = criterion.scores(context)
        step(1)
    shaped = {"seed": str(seed), **({"gates": gates} if gates else {})}
    signature = signature_of(
        {"m": "rank", "by": f"{by}{direction.suffix}", **shaped},
        data=None if corpus is None else (corpus.digest, corpus.count),
        checkpoint=checkpoint,
    )
    return Ranking(scores, layout, by=by, direction=direction, signature=signature)
