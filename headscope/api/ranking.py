"""Rankings of heads for removal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.api.options import PathName, Report, in_python, progress_of
from headscope.api.selection import heads_option
from headscope.api.texts import Texts
from headscope.config.option import configured
from headscope.data.corpus import Corpus
from headscope.engine.faithfulness.orders import Scores, heads_of_rows
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.options.rank import RankConfig
from headscope.pruning.ranking.allocation import check_keep
from headscope.pruning.ranking.criterion import Criterion, criterion_named
from headscope.pruning.ranking.rank_run import context_of, scores_between, scoring_of
from headscope.pruning.ranking.ranking import rank_heads
from headscope.pruning.selection import OpenedSelection, gates_for
from headscope.registry import unknown
from headscope.results.study import Study
from headscope.signature import Signature, signature_of

if TYPE_CHECKING:
    import pandas as pd


SCORING = (
    *("by", "column", "sites", "protect", "keep_lowest", "keep_highest", "steps", "allocate", "objective", "damping"),
    *("max_sentences", "max_length", "batch_tokens", "seed"),
)
"""The options of a ranking that writes nothing."""


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

    @in_python
    def lowest(self, count: int, *, per_layer: bool = False, uniform: bool = False) -> list[HeadId]:
        """The `count` heads to remove first, by site, layer and head.

        `per_layer` takes the same share of every layer; `uniform` leaves the same number in every layer of the encoder,
        and of the decoder, which classes of transformers and most engines need. Default: as `allocate` said.

        ConfigError where there are fewer, where groups of heads do not add up to `count`, or where a head has no score.
        """
        removable = self._gating.heads - len(self._gating.protected)
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

    @in_python
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
    checkpoint: Checkpoint,
    texts: Texts,
    options: Mapping[str, Any],
    *,
    parse: PathName | None,
    study: Study | None,
    gates: Callable[[], str],
    progress: Report,
) -> Ranking:
    """A ranking of the heads of an open checkpoint: what `prune rank` computes, from the same options.

    `gates` says which are active, for the signature.
    """
    if strange := sorted(set(options) - set(SCORING)):
        raise ConfigError(unknown("option of rank", strange[0], sorted(SCORING)))
    if study is not None and not isinstance(study, Study):
        raise ConfigError(f"study is of type {type(study).__name__}; give what analyze returns")
    protect = options["protect"]
    named = {
        "source": None if texts.empty and parse is None else Path("text"),  # checked for being there only
        "run": None if study is None else Path("study"),
        "protect": protect if isinstance(protect, str) else heads_option(protect, checkpoint.layout, name="protect"),
        "score_sentences": options.get("max_sentences", RankConfig.score_sentences),
        "max_sentences": None,
    }
    fixed = {"checkpoint": checkpoint.path, "out": Path("ranking"), "keep": 1}
    config = configured(RankConfig, {**options, **named, **fixed}, what="rank")
    fixed_scores = study is not None or config.is_file
    criterion = None if fixed_scores else criterion_named(config.by, parsed=parse is not None)
    if config.objective and config.allocate != "measured" and not (criterion and criterion.explains):
        raise ConfigError(f"objective {config.objective} means nothing for a ranking by {config.by}; leave it out")
    corpus = _corpus_of(checkpoint, texts, config, criterion, parse=None if parse is None else str(parse))
    gating = gates_for(checkpoint, config, whole_groups=config.allocate != "per-group")
    context = context_of(config, OpenedSelection(checkpoint, gating, corpus, None, 0))
    table = None if study is None else _rows_of(study, checkpoint)
    scoring = scoring_of(config, context, heads=None if table is None else lambda: table, parsed=parse is not None)
    noted = gates()

    def score(removed: list[HeadId]) -> Scores:
        if gates() != noted:
            raise ConfigError("steps score anew, and the gates are others than when this ranking was made")
        with eval_mode(checkpoint.model):
            return scoring.score(removed)

    with progress_of(progress)("ranking", 1) as step:
        first = score([])
        if config.allocate == "measured":
            with eval_mode(checkpoint.model):
                ranked = rank_heads(gating, gating.heads, lambda removed: first)
                first = scores_between(context, gating, ranked)
        step(1)
    shaping = {name: getattr(config, name) for name in ("steps", "allocate", "objective", "damping")}
    settings = {name: str(value) for name, value in shaping.items() if value != getattr(RankConfig, name)}
    entries = {"by": scoring.name, **settings, **({"gates": noted} if noted else {})}
    if study is not None:
        signature = Signature({**entries, "study": study.signature})
    else:
        data = None if corpus is None else (corpus.digest, corpus.count)
        entries = {"m": "rank", **entries, "seed": str(config.seed)}
        signature = signature_of(entries, data=data, checkpoint=checkpoint)
    return Ranking(
        config.by,
        str(scoring.direction),
        str(signature),
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


def _corpus_of(
    checkpoint: Checkpoint, texts: Texts, config: RankConfig, criterion: Criterion | None, *, parse: str | None
) -> Corpus | None:
    """The text to score on; ConfigError where a criterion needs one."""
    if parse == "stanza":
        raise ConfigError("parse='stanza' is for analyze; rank by the study that it gives, study=")
    if not texts.empty or parse is not None:
        return texts.corpus(checkpoint, parse=parse, max_sentences=config.score_sentences)
    if criterion is not None and criterion.reads_text:
        raise ConfigError(f"by={config.by!r} is measured on text: give text=, or a study= that has it")
    return None
