"""The contract of a pruning criterion, and the registry that finds it by name.

A criterion gives every head a number and says which end of the numbers stays. It is one file in
`headscope/pruning/ranking/criteria/`, or a column of `heads.csv`, whose analysis declares it as a `Measure`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headscope.attribution.objectives.base import Objective
from headscope.config.declarations import Declared, Measure, measured_columns, rankable_columns
from headscope.data.batching import BatchingOptions, sentence_limit
from headscope.data.corpus import Corpus
from headscope.distributed import ALONE, Processes
from headscope.engine.base import ANALYSES, RunOptions, needs_objective
from headscope.engine.faithfulness.orders import Scores
from headscope.engine.frequencies import token_frequencies
from headscope.engine.plan import analyze, choose_analyses
from headscope.errors import ConfigError, flag
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.taps import masked
from headscope.pruning.closed_form.bench import RefitBench
from headscope.pruning.options.choice import End
from headscope.pruning.options.shared import OtherText
from headscope.pruning.scores_file import scores_in
from headscope.registry import Registry, unknown

REPLICATES = 2  # intervals are not looked at


@dataclass(frozen=True)
class Direction:
    """Which end of a criterion's numbers stays, why the other end is removed first, and whether the user said so."""

    keep: End
    why: str = ""
    is_requested: bool = False

    def apply(self, scores: Scores) -> Scores:
        """The scores with the sign by which the highest stay."""
        return dict(scores) if self.keep == "highest" else {head: -value for head, value in scores.items()}

    def __str__(self) -> str:
        first = "highest" if self.keep == "lowest" else "lowest"
        why = "as asked" if self.is_requested else self.why and f"as {self.why}"
        return ", ".join(filter(None, [f"removes the {first} first", why]))


@dataclass(frozen=True)
class ScoringContext:
    """What a criterion is asked about: a model on a text (None: there is none), with heads that are gone already.

    Only `candidates` may go (None: all heads). `damping` is for criteria that refit W_O (None: as usual), `anchor` for
    what is measured with W_O refitted, `bench` for what that is fitted to and measured on (None: parts of the corpus).
    Of several `processes` each reads its share of the text, and all get the scores. `cache` holds what several
    criteria, and a refit, measure alike of the intact model; `replace` hands it on.
    """

    checkpoint: Checkpoint
    corpus: Corpus | None = None
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    options: RunOptions = field(default_factory=RunOptions)
    removed: Sequence[HeadId] = ()
    candidates: frozenset[HeadId] | None = None
    whole_groups: bool = True
    damping: float | None = None
    anchor: OtherText = ()
    bench: RefitBench | None = None
    processes: Processes = ALONE
    cache: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def text(self) -> Corpus:
        """The corpus, of criteria that read one: for others it is never asked."""
        assert self.corpus is not None, "a criterion that reads text is refused without any"
        return self.corpus


class Criterion(Declared, ABC):
    """Scores every head of a model.

    `keep` says which end of the scores stays ("" where that is not agreed upon), and `why` completes "the others are
    removed first, as …". `reads_text` says whether it needs a text; `changes` whether scores depend on which heads are
    gone, so that scoring anew means something; `one_pass` whether a pass over the text gives them; `refits` whether
    other heads are refitted, so that damping means something; `explains` whether scores are about the objective,
    `probes` whether by random probes of the vectors that it compares (`explained_values`);
    `sampled` whether they follow from the seed whatever that is.
    """

    keep: Literal["", "highest", "lowest"] = "highest"
    why: str = ""
    reads_text: bool = True
    changes: bool = True
    one_pass: bool = True
    refits: bool = False
    explains: bool = False
    probes: bool = False
    sampled: bool = False

    def draws(self, checkpoint: Checkpoint, objective: Objective | None) -> bool:
        """Whether scores follow from the seed; those of an objective do where it hides tokens at random."""
        if objective is None or not self.explains:
            return self.sampled
        return self.sampled or objective.alters(checkpoint) or (self.probes and objective.compares)

    @abstractmethod
    def scores(self, context: ScoringContext) -> Scores:
        """A number for every head; NaN where there is none."""

    def direction(self, keep: End | None = None) -> Direction:
        """As the user says, or where that is None as the criterion declares; ConfigError where neither does."""
        if self.keep and keep in (None, self.keep):
            return Direction(self.keep, self.why)
        if keep is None:
            raise ConfigError(
                f"{flag.by} {self.name} has no agreed direction: give {flag.keep_lowest} or {flag.keep_highest}"
            )
        return Direction(keep, is_requested=True)


class MeasuredColumn(Criterion):
    """A column of `heads.csv`; its analysis measures it, and its `Measure` says which end stays.

    Heads of several layers are ranked, so that it is the `column` that orders them where the measure names one.
    """

    def __init__(self, measure: Measure, *, analysis: str = "") -> None:
        self.name, self.summary, self.analysis = measure.name, measure.words, analysis  # type: ignore[misc]
        self.column = measure.across or measure.name
        alone = measure.within_layer and not measure.across
        self.keep, self.why = measure.keep, measure.why + ", within their layer" * alone
        self.explains = bool(analysis) and needs_objective(ANALYSES.get(analysis))
        self.sampled = bool(analysis) and ANALYSES.get(analysis).sampled
        self.reads_text = self.changes = not analysis or bool(ANALYSES.get(analysis).passes)

    def scores(self, context: ScoringContext) -> Scores:
        """Runs the analysis on the text, with the heads that are gone masked."""
        corpus = context.corpus or Corpus("no text", 0, "", lambda: iter(()))
        options = context.options
        if "frequencies" in ANALYSES.get(self.analysis).needs and options.ranks is None:
            limit = sentence_limit(context.checkpoint, context.batching.limit)
            options = replace(options, **token_frequencies(context.checkpoint, corpus, limit=limit))
        with masked(context.checkpoint.model, context.removed):
            study = analyze(
                context.checkpoint,
                corpus,
                analyses=choose_analyses(only=[self.analysis]),
                options=options,
                batching=context.batching,
                replicates=REPLICATES,
                processes=context.processes,
            )
        return context.processes.broadcast(scores_in(study.heads, self.column) if context.processes.main else None)


CRITERIA: Registry[type[Criterion]] = Registry(
    "criterion", package="headscope.pruning.ranking.criteria", group="headscope.criteria"
)
criterion = CRITERIA.add


def rankable_names() -> list[str]:
    """What heads can be ranked by: criteria, and columns of analyses that a text alone gives."""
    return sorted({*CRITERIA.names(), *rankable_columns()})


def criterion_named(name: str) -> Criterion:
    """The criterion of that name, or that column of `heads.csv`; ConfigError for another, with the nearest one."""
    if name not in rankable_names():
        message = unknown("criterion", name, rankable_names())
        raise ConfigError(f"{message}; other columns of heads.csv: give {flag('from')} RUN")
    return CRITERIA.get(name)() if name in CRITERIA.names() else column_named(name)


def column_named(name: str) -> MeasuredColumn:
    """The column of that name, as its analysis declares it; one that no analysis declares has no direction."""
    measures = measured_columns()
    if name not in measures:
        return MeasuredColumn(Measure(name))
    analysis, measure = measures[name]
    return MeasuredColumn(measure, analysis=analysis.name)


def column_of_file(name: str) -> MeasuredColumn:
    """As its analysis declares it; any other column of a file holds scores: the highest stay."""
    own = MeasuredColumn(Measure(name, keep="highest", why="the higher a score, the longer its head stays"))
    return column_named(name) if name in measured_columns() else own


def scores_by_criteria(context: ScoringContext) -> dict[str, Scores]:
    """The scores of every criterion that takes one pass over a text, the highest stay; without those that refuse."""
    scores = {}
    for name, cls in CRITERIA:
        if cls.reads_text and cls.one_pass:
            try:
                scores[name] = cls().direction().apply(cls().scores(context))
            except ConfigError:  # it needs what model or text do not have
                continue
    return scores
