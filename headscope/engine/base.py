"""The contract of analyses: a file in `analyses/` each, which measures the heads of one (site, layer) at a time.

An analysis sees each attention call once, as a `HeadBatch`, and returns sums and counts per sentence. The driver
(`headscope.engine.plan`) adds them up over the corpus and hands the totals back for the report. An analysis keeps
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
from headscope.heads import Site, SiteLayer
from headscope.registry import Registry

if TYPE_CHECKING:
    from headscope.formats.base import Checkpoint


Attention = Literal["auto", "dense", "streamed"]
LONG = 1024
"""With attention "auto", a batch with longer sentences than this many positions is streamed."""


@dataclass(frozen=True)
class RunOptions:
    """Options that shape the numbers of a run, the same for all of its analyses.

    `token_filter` selects the tokens that count as queries and keys. `ranks` [V] has the frequency rank of every id;
    `parse` and `frequencies` name the sources of parses and frequencies, for the signature. `objective` is what
    importances explain (empty: the driver fills in the default). With `detail` values of single sentences are written.
    `attention`: matrices of weights are made ("dense") or not ("streamed"); "auto" is dense for batches of up to `LONG`
    positions a sentence. `batching` is for analyses that read the corpus themselves (the driver fills in its own).
    `analysis_options` are values of options that analyses declare, by name.
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
        """The denominator, in words, of a share of queries whose largest weight lies on some key."""
        left_out = "first and special tokens" if self.token_filter.exclude_sinks else "special tokens"
        return "of its largest weights" + ("" if self.token_filter.keep_special else f" ({left_out} left out)")


class Analysis(Declaration):
    """Measures heads. A file in `analyses/` defines one final subclass and registers it.

    - `name`: as the user types it. `version`: part of the signature, raised when numbers change.
    - `needs`: required data: "parse", "frequencies", "labels" (ids that decoders should predict), "objective" (one
      number per sentence, with labels), "gradient" (of the objective, at every context), "contrast" (sentences are
      prompts with corrupt versions and answers: `Batch.contrasts`). `decoder_needs`: options without which it leaves
      out decoder-only models. `sites`: the sites that it applies to.
    - `passes`: the data that it observes: the corpus ("text"), repeated random tokens ("random"), texts of a template
      with scrambled sources ("scrambled"). `afterwards`: it observes heads after the forward pass (and after the
      backward pass, if it needs gradients), which keeps the batch's attention in memory until then.
    - `default`: it runs unless skipped. `group`: a set of analyses that can be requested at once. `many_passes`: its
      number of passes grows with the heads or samples, so `--importance` leaves it out. `order`: the place of its
      columns and labels, lower first.
    - `sampled`: its values, not only their intervals, depend on the seed. `fits`: its report takes long and uses all
      threads, so it is made after the others. `merges`: attributes that hold results beside its sums, to be merged over
      processes.
    - `reads`: what `observe` and `explain` need of attention, which decides about text too long for a matrix of
      weights. "contexts": weights at most in blocks of rows, over which it loops itself (`in_blocks`). "rows":
      `observe` is called for one block of queries after the other, and its results are added up. "matrix": all rows at
      once, so such text is left out.
    - `Options`: a frozen dataclass of `headscope.config.option` fields; `self.options` is an instance, `self.run` has
      the options that all analyses share. `signature_entry` formats them for signatures: "steps:{ig_steps}". If they
      are `LabelOptions`, `rules` define its labels.
    - `measures`: how figures show its columns. `pairs`: its matrices of pairs of heads (in similarity.npz).
      `functions`: the kinds of its labels. `figures`: its own figures. See `headscope.config.declarations`; these
      attributes may use only constants of the file or of that module.
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
        self.exact: dict[SiteLayer, dict[str, Tensor]] = {}
        self.units: dict[tuple[str, Site, int], Ratio] = {}

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        """Why the analysis does not apply to a checkpoint. Returns None if it does."""
        return None

    @property
    def objective(self) -> Objective:
        """The objective of this run, for analyses that need one."""
        return OBJECTIVES.get(self.run.objective)(seed=self.run.seed)

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        """Sums and counts per sentence of every statistic, for one (site, layer) on one batch."""
        return {}

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        """Sums and counts per sentence of statistics at any (site, layer), from passes of this analysis' own.

        For methods that cannot share the common pass: they change gates, remove heads, or use other backward rules. The
        driver calls it for every batch of text after the common passes, if it is overridden. The model then computes
        attention with `attend`, its parameters require no gradients, nothing else observes, and gradients are off: use
        `with torch.enable_grad():` for a backward pass. `self.objective.outcome(checkpoint, batch)` evaluates the
        objective, which may hide tokens. Keys are (name of the statistic, site, layer). Sentences of a batch must not
        depend on each other. If a batch takes long, call `self.tick` with the finished share of it.
        """
        return {}

    def tick(self, share: float) -> None:
        """Report the finished share of a batch; the driver replaces this method with its progress bar."""

    @contextmanager
    def hooks(self, checkpoint: Checkpoint) -> Iterator[None]:
        """A context around the whole common pass, in which an analysis may have hooks of its own on the model.

        If no running analysis overrides it, the common pass stops at the model's last attention.
        """
        yield

    def inspect(self, checkpoint: Checkpoint) -> None:
        """Look at the checkpoint once, before the corpus, as analyses of parameters do; default: keep it."""
        self.checkpoint = checkpoint

    def read(self, corpus: Corpus) -> None:
        """Read the whole corpus once before the passes, for quantities that the first batch needs already."""

    def sample(self, corpus: Corpus) -> Corpus | str:
        """The sentences that `explain` is called with: all or a fixed part, or the reason for none. After `inspect`."""
        return corpus

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        """Turn sums into columns, tables and labels. Default: statistics with a measure are columns, labels by `rules`.

        Other columns come from `exact`, numbers [h] by (site, layer) and column that have no interval, and from
        `units`, statistics [n h] over other units than sentences: tokens, trials.
        """
        if self.units:
            aggregates = aggregates.over_units(self.units)
        own_measures = {measure.name for measure in self.measures}
        names = dict.fromkeys(name for name, _, _ in aggregates.sums if name in own_measures or not own_measures)
        report = AnalysisReport(columns={name: aggregates.column(name) for name in names})
        for site_layer, numbers in self.exact.items():
            for name, values in numbers.items():
                report.columns.setdefault(name, {})[site_layer] = Estimate.exact(values)
        if rules := [rule for rule in self.rules if rule.measure in names]:
            tests = LabelTests.of(self.options)
            for rule in rules:
                tests.add_rule(rule, report.columns[rule.measure], aggregates)
            tests.conclude(report)
        return report

    def state(self) -> dict[str, Any]:
        """The results of this instance beside its sums, to be merged over processes."""
        return {name: getattr(self, name) for name in self.merges}

    def signature(self) -> dict[str, str]:
        """Settings of this analysis that shape its numbers: its `signature_entry`, and how labels are given."""
        name, _, text = self.signature_entry.partition(":")
        entry = {name: text.format_map(vars(self.options))} if name else {}
        return entry | (evidence_signature(self.options) if isinstance(self.options, LabelOptions) else {})


ANALYSES: Registry[type[Analysis]] = REGISTRY
analysis = ANALYSES.add


def merge_states(values: Any, other_values: Any) -> Any:
    """The merged states of two processes: numbers added, sets and flags united, mappings merged key by key."""
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
