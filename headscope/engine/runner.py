"""The passes that analyses share: one forward pass a batch, with a backward pass where gradients are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.bootstrap import BUDGET, Bootstrap, Ratio
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch
from headscope.engine.aggregate import Aggregator, Key, Statistic, make_reports, stack_layers, study_tables
from headscope.engine.base import LONG, Analysis, HeadBatch, RunOptions, merge_states, needs_objective
from headscope.engine.evidence.report import AnalysisReport
from headscope.engine.heads.head_batch import ObservedBatch
from headscope.errors import CheckpointError, ConfigError, flag
from headscope.files.writing import hold_signals
from headscope.formats.base import Checkpoint
from headscope.heads import SITES, SiteLayer, counts_of
from headscope.model.attention import AttentionCall, holding, makes_weights, precise
from headscope.model.discovery import AttentionSite
from headscope.model.forward import refuse_overflow
from headscope.model.nonfinite import DEFERRED_CHECKS, DeferredChecks
from headscope.model.streaming import streaming
from headscope.model.taps import differentiable_contexts, frozen_parameters, gradients_of, observing
from headscope.progress import Progress, no_progress
from headscope.results.study import INTERRUPTED, LeftOut, Study
from headscope.signature import count_of

NOTHING = "found nothing to measure"


class StopForward(BaseException):
    """Ends a forward pass after its last attention. A BaseException, so that no model's code catches it."""


@dataclass
class AnalysisRunner:
    """The passes over a corpus that all analyses share; their observations go to `aggregator`, batch by batch.

    A pass that needs only attention stops at the last attention call: the rest of that layer is not computed.
    """

    checkpoint: Checkpoint
    running: Sequence[Analysis]
    options: RunOptions = field(init=False)
    aggregator: Aggregator = field(init=False)
    batch: Batch = field(init=False)
    observers: Sequence[Analysis] = ()
    view: ObservedBatch | None = None
    head_contexts: list[tuple[HeadBatch, Tensor]] = field(default_factory=list)
    observations: dict[Statistic, Ratio] = field(default_factory=dict)
    refusals: list[LeftOut] = field(default_factory=list)
    checks: DeferredChecks = field(init=False)
    contexts: list[Tensor] = field(default_factory=list)
    layers: frozenset[SiteLayer] = frozenset()
    unseen: set[SiteLayer] = field(default_factory=set)
    """The (site, layer)s that must still be observed before a pass may stop; empty: it runs to its end."""
    n_streamed: Counter[str] = field(default_factory=Counter)
    """Streamed sentences, by the name of each analysis that needs the matrix of weights; under "" all of them."""
    counts: Counter[str] = field(default_factory=Counter)
    """Measured sentences, by the name of each analysis with passes of its own; under "" those of the common pass."""
    texts: dict[str, Corpus] = field(default_factory=dict)
    """The text that each analysis reads in passes of its own, by its name."""

    def __post_init__(self) -> None:
        self.options = self.running[0].run
        budget = BUDGET // len(self.checkpoint.attention_sites.order)
        self.aggregator = Aggregator(budget, self.options.detail)
        self.checks = DeferredChecks(self.checkpoint.device)

    @property
    def needs_gradients(self) -> bool:
        """Whether any analysis needs gradients."""
        return any("gradient" in analysis.needs for analysis in self.running)

    def read(self, corpus: Corpus) -> None:
        """Show the model and the text to every analysis; one that finds nothing to explain there is left out."""
        for analysis in self.running:
            analysis.inspect(self.checkpoint)
            analysis.read(corpus)
            if isinstance(text := analysis.sample(corpus), Corpus):
                self.texts[analysis.name] = text
            else:
                self.leave_out(analysis, text)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Entered around the whole corpus: within it `run` takes batches."""
        self.layers = frozenset(layer for layer, heads in self.checkpoint.layout.items() if heads)
        with ExitStack() as stack:
            for analysis in self.running:
                stack.enter_context(analysis.hooks(self.checkpoint))
            if self.needs_gradients or any(map(has_own_passes, self.running)):
                stack.enter_context(frozen_parameters(self.checkpoint.model))
            stack.enter_context(observing(self.checkpoint.model, self.on_attention))
            stack.callback(self.aggregator.unstack)
            try:
                yield
            except KeyboardInterrupt:  # the batches before it count
                self.checks.read()
                raise
            self.checks.read()

    def run(self, batch: Batch) -> None:
        """Run the common pass over a batch; its observations count once it is complete."""
        with self._counted_pass(batch, "") as on_device:
            if batch.kind == "text" and self.needs_gradients:
                self._differentiate(on_device)
            else:
                self._observe_forward(on_device, self.running)
        if batch.kind == "text" and self.streams(batch):
            for name in ("", *(analysis.name for analysis in self.running if _needs_matrix(analysis))):
                self.n_streamed[name] += len(batch.indices)

    def explain(self, analysis: Analysis, batch: Batch, step: Callable[[int], None]) -> None:
        """Run an analysis' own passes over a batch of text; leave the analysis out if it cannot explain the model.

        `step` is called with numbers of sentences, which add up to those of the batch.
        """
        reported_count, size = 0, len(batch.indices)

        def tick(share: float) -> None:
            nonlocal reported_count
            now = max(reported_count, int(size * share))
            step(now - reported_count)
            reported_count = now

        analysis.tick = tick  # type: ignore[method-assign]
        with self._counted_pass(batch, analysis.name) as on_device:
            if makes_weights() or not _needs_matrix(analysis):
                try:
                    with torch.no_grad():
                        ratios = analysis.explain(self.checkpoint, on_device)
                    for key, ratio in ratios.items():
                        self._add(analysis, key, ratio)
                except CheckpointError as error:
                    if analysis.name in self.aggregator.names or len(self.running) == 1:
                        raise
                    self.leave_out(analysis, str(error))
        tick(1)

    @contextmanager
    def _counted_pass(self, batch: Batch, name: str) -> Iterator[Batch]:
        """Within the block the batch on the device, to run the model on; at its end the observations are counted."""
        self.observations, checks = {}, None if self.checks.immediate else self.checks
        with holding(DEFERRED_CHECKS, checks), streaming() if self.streams(batch) else nullcontext():
            yield batch.to(self.checkpoint.device)
        with hold_signals(), torch.inference_mode():  # small sums by the thousand: no autograd bookkeeping
            for values in self.aggregator.add(batch, self.observations):
                self.checks.add(values, self.aggregator.refuse_non_finite)
            if batch.kind == "text":
                self.counts[name] += len(batch.indices)
        self.checks.batch_done()

    def streams(self, batch: Batch) -> bool:
        """Whether attention of a batch is streamed, without matrices of weights."""
        if self.options.attention == "auto":
            return batch.longest > LONG
        return self.options.attention == "streamed"

    def leave_out(self, analysis: Analysis, why: str) -> None:
        """Run without an analysis from now on; ConfigError where it is the last one."""
        if len(self.running) == 1:
            raise ConfigError(f"no analysis can run: {analysis.name}: {why}")
        self.running = [active for active in self.running if active is not analysis]
        self.refusals.append(LeftOut(analysis.name, why))

    def _observe_forward(self, batch: Batch, observers: Sequence[Analysis]) -> None:
        """Run a forward pass without gradients; it runs to its end only if an analysis has hooks of its own."""
        with torch.inference_mode(), self._observing(batch, observers):
            sites = {site for analysis in observers if batch.kind in analysis.passes for site in analysis.sites}
            # if no site is observed, all layers: their contexts are still checked for overflow
            layers = {site_layer for site_layer in self.layers if site_layer[0] in sites} or self.layers
            has_hooks = any(type(analysis).hooks is not Analysis.hooks for analysis in self.running)
            self.unseen = set() if has_hooks else {*layers}
            with suppress(StopForward):
                self.checkpoint.forward(batch)
            for heads, _ in self.head_contexts:
                self._observe(heads, self.observers, afterwards=True)

    def _differentiate(self, batch: Batch) -> None:
        """Run one forward and one backward pass of the objective.

        An objective that hides tokens has a pass of its own, so that other analyses read the unchanged text.
        """
        objective = OBJECTIVES.get(self.options.objective)(seed=self.options.seed)
        observers: Sequence[Analysis] = self.running
        if objective.alters(self.checkpoint):
            observers = [analysis for analysis in self.running if "gradient" in analysis.needs]
            readers = [analysis for analysis in self.running if analysis not in observers and "text" in analysis.passes]
            if readers:
                self._observe_forward(batch, readers)
        ready = objective.prepare(self.checkpoint, batch)
        with self._observing(ready, observers):
            with differentiable_contexts():
                outcome = objective.evaluate(self.checkpoint, objective.output(self.checkpoint, ready), ready)
            gradients = gradients_of(outcome.values, [context for _, context in self.head_contexts])
            with torch.no_grad():
                for (heads, _), gradient in zip(self.head_contexts, gradients, strict=True):
                    heads.gradient, heads.counts = precise(gradient), outcome.counts
                    self._observe(heads, self.observers, afterwards=True)

    @contextmanager
    def _observing(self, batch: Batch, observers: Sequence[Analysis]) -> Iterator[None]:
        """Within the block these analyses see every call; NumericalError where a context is not finite."""
        self.batch, self.observers, self.head_contexts, self.contexts = batch, observers, [], []
        self.view = ObservedBatch(batch, self.options.token_filter)
        try:
            yield
            contexts = self.contexts
        finally:
            self.observers, self.view, self.head_contexts, self.contexts, self.unseen = (), None, [], [], set()

        def refuse() -> None:
            with torch.no_grad():
                refuse_overflow(self.checkpoint, lambda: self.checkpoint.forward(batch), batch)

        for sums in contexts:
            self.checks.add(sums, refuse)

    def on_attention(self, attention_site: AttentionSite, call: AttentionCall) -> None:
        """Show an attention call of the current batch to every analysis."""
        if not self.observers or self.view is None:
            return
        with torch.no_grad():
            heads = self.view.heads(attention_site, call)
            padding = heads.cached_per_batch("padding", lambda: ~heads.query_side.real)  # [b t]
            # a sum is finite only if the contexts of all tokens are
            self.contexts.append(heads.context.sum(dim=(1, 3)).masked_fill_(padding, 0))
            self._observe(heads, self.observers)
            if any(observes_later(analysis) and self._concerns(analysis, heads) for analysis in self.observers):
                self.head_contexts.append((heads, call.context))
        if self.unseen:
            self.unseen.discard(attention_site.site_layer)
            if not self.unseen:
                raise StopForward

    def _concerns(self, analysis: Analysis, heads: HeadBatch) -> bool:
        return self.batch.kind in analysis.passes and heads.site in analysis.sites

    def _observe(self, heads: HeadBatch, observers: Sequence[Analysis], *, afterwards: bool = False) -> None:
        now = [analysis for analysis in observers if observes_later(analysis) is afterwards]
        due = [analysis for analysis in now if self._concerns(analysis, heads)]
        by_rows = [analysis for analysis in due if analysis.reads == "rows"]
        for analysis in due:
            if analysis not in by_rows and (heads.rows or not _needs_matrix(analysis)):
                self._show(analysis, heads)
        for block in heads.in_blocks() if by_rows else ():
            for analysis in by_rows:
                self._show(analysis, block)

    def _show(self, analysis: Analysis, heads: HeadBatch) -> None:
        for name, ratio in analysis.observe(heads).items():
            self._add(analysis, (name, heads.site, heads.layer), ratio)

    def _add(self, analysis: Analysis, key: Key, ratio: Ratio) -> None:
        """Add sums of a statistic to those of the batch: an analysis may observe it in blocks of queries."""
        earlier = self.observations.get((analysis.name, key))
        if earlier is not None:
            ratio = replace(ratio, total=earlier.total + ratio.total, count=earlier.count + ratio.count)
        self.observations[analysis.name, key] = ratio

    def part(self) -> dict[str, Any]:
        """This process's observations, for the process that concludes."""
        states = {analysis.name: analysis.state() for analysis in self.running}
        states |= {"runner": {"n_streamed": self.n_streamed, "counts": self.counts}}
        states |= {"aggregator": {"sums": self.aggregator.sums, "details": self.aggregator.details}}
        return {"refusals": self.refusals, "states": states}

    def merge(self, part: Mapping[str, Any]) -> None:
        """Add what another process observed in its share of the batches."""
        refused_names = {left_out.analysis for left_out in part["refusals"]}
        self.running = [analysis for analysis in self.running if analysis.name not in refused_names]
        self.refusals += [left_out for left_out in part["refusals"] if left_out not in self.refusals]
        owners = {"runner": self, "aggregator": self.aggregator, **{own.name: own for own in self.running}}
        for owner in owners.keys() & part["states"].keys():
            for name, values in part["states"][owner].items():
                setattr(owners[owner], name, merge_states(getattr(owners[owner], name), values))

    def conclude(
        self, bootstrap: Bootstrap, *, sentences: int, complete: bool, progress: Progress = no_progress
    ) -> Study:
        """The study of all sums: columns, tables and labels; it names analyses with few of all `sentences`, or none."""
        sums, running = self.aggregator.sums, self.running
        parts = {name: text.count for name, text in self.texts.items() if text.count < sentences}
        for statistic in (statistic for name in parts for statistic in sums.get(name, {}).values()):
            statistic.leave_out_empty()
        missing = {
            name: f"needs the matrix of weights, and has none of {count} sentences, which are streamed; "
            f"{flag.attention} dense makes it"
            for name, count in self.n_streamed.items()
            if name
        }
        for analysis in running if not complete else ():
            n_measured = self.counts[analysis.name]
            count = self.texts[analysis.name].count if has_own_passes(analysis) else 0
            if n_measured < count:
                missing[analysis.name] = f"{INTERRUPTED} after {n_measured} of {count} sentences"
        samples = {name: f"{count} of {sentences}" for name, count in parts.items() if name not in missing}
        empty = [analysis for analysis in running if analysis.passes and not sums.get(analysis.name)]
        reporting = [analysis for analysis in running if analysis not in empty]
        reports = make_reports(reporting, sums, bootstrap, progress)
        interrupted_analyses = [analysis for analysis in reporting if analysis not in reports]
        absent = [
            *self.refusals,
            *(LeftOut(analysis.name, missing.get(analysis.name, NOTHING)) for analysis in empty),
            *(LeftOut(analysis.name, INTERRUPTED) for analysis in interrupted_analyses),
        ]
        record = self._record(reports, missing, samples)
        record |= {"complete": complete and not interrupted_analyses, "left_out": list(map(asdict, absent))}
        by_name = self.aggregator.details.items()
        detail = {name: {key: stack_layers(layers) for key, layers in of.items()} for name, of in by_name}
        for report in reports.values():
            detail |= {name: arrays for name, arrays in report.detail.items() if arrays}
        return Study(
            study_tables(reports, sums, bootstrap, self.checkpoint),
            record,
            arrays={name: array for report in reports.values() for name, array in report.arrays.items()},
            detail=detail,
            files={path: text for report in reports.values() for path, text in report.files.items()},
        )

    def _record(
        self, reports: Mapping[Analysis, AnalysisReport], missing: Mapping[str, str], samples: Mapping[str, str]
    ) -> dict[str, Any]:
        """The record of a study; `samples` and `missing` say by analysis which part of the text was read, or not."""
        layout, n_streamed = self.checkpoint.layout, self.n_streamed[""]
        objectives = (analysis.objective for analysis in reports if needs_objective(type(analysis)))
        return {
            "layout": {site.value: counts for site in SITES if (counts := counts_of(layout, site))},
            "signatures": {analysis.name: _signature(analysis, samples.get(analysis.name)) for analysis in reports},
            "sampled": dict(samples),
            "remarks": [
                *([f"attention: streamed for {count_of(n_streamed, 'sentence')}"] if n_streamed else []),
                *(f"{analysis.name} {missing[analysis.name]}" for analysis in reports if analysis.name in missing),
                *(f"{name} on {part} sentences" for name, part in samples.items()),
                *dict.fromkeys(remark for report in reports.values() for remark in report.remarks),
            ],
            "objective": next(({"name": its.name, "damage": its.damage_words} for its in objectives), {}),
        }


def _signature(analysis: Analysis, part: str | None) -> dict[str, str]:
    entries = {"m": f"{analysis.name}.v{analysis.version}", **({f"{analysis.name}-n": part} if part else {})}
    if needs_objective(type(analysis)):
        entries["objective"] = f"{analysis.objective.name}.v{analysis.objective.version}"
    return entries | analysis.signature()


def has_own_passes(analysis: Analysis) -> bool:
    """Whether an analysis makes passes of its own."""
    return type(analysis).explain is not Analysis.explain


def _needs_matrix(analysis: Analysis) -> bool:
    return analysis.reads == "matrix" and bool(analysis.passes)


def observes_later(analysis: Analysis) -> bool:
    """Whether an analysis observes after the pass instead of during it."""
    return analysis.afterwards or "gradient" in analysis.needs
