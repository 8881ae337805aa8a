"""The contract of analyses: one file in `analyses/` measures heads of one site and layer at a time.

An analysis sees each attention call once, as `HeadBatch`, and returns sums and counts per sentence; the
driver (`headscope.engine.plan`) adds them up over the corpus and hands them back for the report. It keeps
nothing per sentence and never loops over heads, tokens or sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from headscope.attribution.objectives.base import OBJECTIVES, Objective
from headscope.bootstrap import Estimate, Ratio
from headscope.config import LabelOptions
from headscope.config.declarations import REGISTRY, Declaration
from headscope.config.option import take_config
from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch, CountedTokens
from headscope.engine.evidence.report import Aggregates as Aggregates
from headscope.engine.evidence.report import AnalysisReport as AnalysisReport
from headscope.engine.evidence.report import LabelRule as LabelRule
from headscope.engine.evidence.report import LabelTests as LabelTests
from headscope.engine.evidence.report import Rate as Rate
from headscope.engine.evidence.report import evidence_signature as evidence_signature
from headscope.engine.evidence.report import head_ids as head_ids
from headscope.engine.evidence.report import head_table as head_table
from headscope.engine.heads.head_batch import HeadBatch as HeadBatch
from headscope.heads import Site
from headscope.registry import Registry

if TYPE_CHECKING:
    from headscope.formats.base import Checkpoint


Attention = Literal["auto", "dense", "streamed"]
LONG = 1024
"""Positions of a sentence from which on attention is streamed, unless one says otherwise."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that shape its numbers, the same for all of its analyses.

    `token_filter` says which tokens count as queries and keys. `ranks` [V] has the
    frequency rank of every id; `parse` and `frequencies` say where those came from, for the signature. `objective` is
    what importances explain (the driver puts the default for an empty name). `detail` says that values of single
    sentences will be written. `attention` says whether the matrices of weights are made
    ("dense"), or not ("streamed"); "auto" is dense for batches of up to `LONG` positions a sentence. `batching` is how
    analyses that read the corpus themselves cut it into batches (the driver puts its own). `analysis_options` are
    values of options that analyses declare, by name.
    """

    token_filter: CountedTokens = field(default_factory=CountedTokens)
    parse: str = ""
    ranks: Tensor | None = None
    frequencies: str = ""
    seed: int = 1
    objective: str = ""
    detail: bool = False
    attention: Attention = "auto"
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    analysis_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def of_largest_weights(self) -> str:
        """The denominator of shares of queries by the place of their largest weight on counted keys."""
        left_out = "first and special tokens" if self.token_filter.exclude_sinks else "special tokens"
        return "of its largest weights" + ("" if self.token_filter.keep_special else f" ({left_out} left out)")


class Analysis(Declaration):
    """Measures heads. A file in `analyses/` defines one final subclass and registers it.

    `name` is what the user types; `version` is part of the signature and changes when numbers do. `needs` lists what
    must be there: "parse", "frequencies", "labels" (what decoders should predict), "objective" (one number per
    sentence, with labels), "gradient" (the objective's, at every context), "contrast" (sentences are prompts with
    corrupt versions and answers: `Batch.contrasts`). `sites` is where it applies; `default` whether it runs unasked;
    `decoder_needs` the options without which it leaves out models that are a decoder alone;
    `many_passes` whether it takes more passes the more heads or samples there are, which `--importance` leaves out;
    `group` a set of analyses that can be asked for at once; `passes` which data it sees: the corpus ("text"), repeated
    random tokens ("random"), texts of a template with scrambled sources ("scrambled"); `order` where its columns
    and labels come (lower first). With `afterwards` it observes heads when the forward pass is through (and the
    backward pass, where it needs gradients), which keeps the batch's attention in memory until then. With `sampled`
    its values, and not only their intervals, follow from the seed. With `fits` its report takes long and shares its
    work among threads itself, so it is made after those of the others. `merges` names the attributes that hold what it
    found in the corpus beside its sums: those of several processes are put together.

    `reads` is what `observe` and `explain` need of attention, which decides what becomes of text too long for a matrix
    of weights: "contexts", with weights at most in blocks of rows that it walks over itself (`in_blocks`); "rows", for
    which `observe` is called with one block of queries after the other, and what it returns is added up; or the
    "matrix" of all rows at once: such text is left out.

    `Options` is a frozen dataclass of `headscope.config.option` fields: options of `headscope analyze` and of the API
    that this analysis has; `self.options` is an instance. `self.run` has the options that all analyses share.
    `signature_entry` says in signatures what they are: "steps:{ig_steps}". Where they are `LabelOptions`, `rules` say
    which heads have labels.
    `measures` say how figures show its columns, `pairs` its matrices of pairs of heads (in similarity.npz); `functions`
    are the kinds of its labels, `figures` its own figures (see `headscope.config.declarations`; what these attributes
    use must be constants of the file or of that module).
    """

    version: ClassVar[int] = 1
    merges: ClassVar[tuple[str, ...]] = ()
    sites: ClassVar[frozenset[Site]] = frozenset(Site)
    default: ClassVar[bool] = True
    many_passes: ClassVar[bool] = False
    decoder_needs: ClassVar[tuple[str, ...]] = ()
    afterwards: ClassVar[bool] = False
    sampled: ClassVar[bool] = False
    fits: ClassVar[bool] = False
    reads: ClassVar[Literal["contexts", "rows", "matrix"]] = "matrix"
    passes: ClassVar[frozenset[str]] = frozenset({"text"})
    signature_entry: ClassVar[str] = ""
    rules: Sequence[LabelRule] = ()
    checkpoint: Checkpoint

    def __init__(self, run: RunOptions) -> None:
        self.run = run
        self.options = take_config(type(self).Options, run.analysis_options)
        self.exact: dict[tuple[Site, int], dict[str, Tensor]] = {}
        self.units: dict[tuple[str, Site, int], Ratio] = {}

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        """Why a checkpoint is none that this analysis is for. Returns None if it is one."""
        return None

    @property
    def objective(self) -> Objective:
        """The objective of this run, for analyses that need one."""
        return OBJECTIVES.get(self.run.objective)(seed=self.run.seed)

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        """Sums and counts per sentence of every statistic, for one site and layer of one batch."""
        return {}

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        """Sums and counts per sentence of statistics at any (site, layer), from passes of this analysis' own.

        For what cannot share the common pass: gates moved, heads taken out, backward passes with other rules. The
        driver calls it once for every batch of text, after the common passes, for analyses that override it. The
        model goes through `attend` meanwhile, its parameters take no part in gradients, nobody else observes, and
        gradients are off: say `with torch.enable_grad():` for a backward pass. `batch` is the corpus's; ask
        `self.objective.outcome(checkpoint, batch)` for the objective, which may hide tokens. Keys are (name of
        the statistic, site, layer); sentences of a batch must not depend on each other. Where a batch takes long, call
        `self.tick` with the share of it that is done.
        """
        return {}

    def tick(self, share: float) -> None:
        """Show that this share of the batch is explained; the driver puts its progress in this place."""

    @contextmanager
    def hooks(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Entered around the whole corpus: hooks of this analysis' own on the common pass, removed after it.

        Where none of the analyses that run has any, the common pass ends with the model's last attention.
        """
        yield

    def inspect(self, checkpoint: Checkpoint) -> None:
        """Look at the checkpoint itself, once, before the corpus (analyses of parameters); here: keep it."""
        self.checkpoint = checkpoint

    def read(self, corpus: Corpus) -> None:
        """Look through the whole corpus, once, before the passes (what must be known before the first batch)."""

    def sample(self, corpus: Corpus) -> Corpus | str:
        """The sentences that `explain` is shown: all, or a fixed part; or why there should be none. After `inspect`."""
        return corpus

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        """Turn sums into columns, tables and labels. Default: statistics with a measure are columns, labels by `rules`.

        So are the numbers of `exact` [h], which `inspect` leaves there: at every (site, layer), by column. Statistics
        of `units` are over what are no sentences: tokens, trials [n h].
        """
        if self.units:
            aggregates = aggregates.over_units(self.units)
        own_measures = {measure.name for measure in self.measures}
        names = dict.fromkeys(name for name, _, _ in aggregates.sums if name in own_measures or not own_measures)
        report = AnalysisReport(columns={name: aggregates.column(name) for name in names})
        for place, numbers in self.exact.items():
            for name, values in numbers.items():
                report.columns.setdefault(name, {})[place] = Estimate.exact(values)
        if rules := [rule for rule in self.rules if rule.measure in names]:
            tests = LabelTests.of(self.options)
            for rule in rules:
                tests.add_rule(rule, report.columns[rule.measure], aggregates)
            tests.conclude(report)
        return report

    def state(self) -> dict[str, Any]:
        """State of this instance beside its sums, to be merged with other processes'."""
        return {name: getattr(self, name) for name in self.merges}

    def signature(self) -> dict[str, str]:
        """Settings of this analysis that shape its numbers: its `signature_entry`, and how labels are given."""
        name, _, text = self.signature_entry.partition(":")
        entry = {name: text.format_map(vars(self.options))} if name else {}
        return entry | (evidence_signature(self.options) if isinstance(self.options, LabelOptions) else {})


ANALYSES: Registry[type[Analysis]] = REGISTRY
analysis = ANALYSES.add


def merge_states(values: Any, other_values: Any) -> Any:
    """The states of two processes merged: numbers added, sets and flags united, mappings key by key."""
    if isinstance(values, dict):
        own = {key: merge_states(values[key], value) if key in values else value for key, value in other_values.items()}
        return type(values)({**values, **own})
    if isinstance(values, set | bool):
        return values | other_values
    if hasattr(values, "merge"):
        values.merge(other_values)
        return values
    return values + other_values


def needs_objective(analysis: type[Analysis]) -> bool:
    """Whether an analysis needs an objective."""
    return not analysis.needs.isdisjoint({"objective", "gradient"})
