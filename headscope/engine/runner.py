"""What a run of analyses adds up, batch by batch, and the study that comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.bootstrap import (
    BUDGET,
    FOLDS,
    GROUPS,
    Array,
    Bootstrap,
    GroupSums,
    Ratio,
    stack_ratios,
    unstack_statistics,
)
from headscope.data.batching import Omissions
from headscope.data.encoded import Batch, Side
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, RunOptions, refuse_non_finite
from headscope.engine.heads_table import heads_table, stacked
from headscope.engine.study import AnalysisResult, LeftOut
from headscope.errors import CheckpointError
from headscope.formats.base import Checkpoint
from headscope.formats.finite import refuse_overflow
from headscope.heads import HeadId, Site, all_heads
from headscope.model.attention import AttentionCall
from headscope.model.capture import observing
from headscope.model.discovery import AttentionSite
from headscope.model.gradients import differentiable_contexts, frozen_parameters, gradients_of
from headscope.model.nonfinite import is_finite, sums_are_finite
from headscope.model.process_settings import keep_freed_memory
from headscope.model.threads import parallel_map, threads_for_pass


@dataclass(frozen=True)
class PartialResult:
    """What one of several processes has found: its sums, values of single sentences, what it left out, the rest."""

    sums: dict[str, dict[tuple[str, Site, int], GroupSums]]
    detailed: dict[str, dict[str, dict[int, Tensor]]]
    refused: list[LeftOut]
    own: dict[str, Any]


class StopForward(BaseException):
    """Ends a forward pass whose last attention has been seen. No Exception: none that a model catches."""


@dataclass
class AnalysisRunner:
    """Sums of every running analysis, batch by batch.

    A pass that only shows attention ends with the last attention there is: what the model would make of it, the
    largest part of a layer, is not calculated.
    """

    checkpoint: Checkpoint
    running: Sequence[Analysis]
    options: RunOptions
    detail: bool = False
    sums: dict[str, dict[tuple[str, Site, int], GroupSums]] = field(default_factory=dict)
    detailed: dict[str, dict[str, dict[int, Tensor]]] = field(default_factory=dict)
    here: Batch = field(init=False)
    observers: Sequence[Analysis] = ()
    cache: dict[str, Any] = field(default_factory=dict)
    kept: list[tuple[HeadBatch, Tensor]] = field(default_factory=list)
    found: list[tuple[Analysis, tuple[str, Site, int], Ratio]] = field(default_factory=list)
    refused: list[LeftOut] = field(default_factory=list)
    stacks: dict[tuple[tuple[str, tuple[str, Site, int]], ...], GroupSums] = field(default_factory=dict)
    contexts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    attention_sites: frozenset[tuple[Site, int]] = frozenset()
    unseen: set[tuple[Site, int]] = field(default_factory=set)

    @property
    def differentiated(self) -> bool:
        """Whether any analysis needs gradients."""
        return any("gradient" in one.needs for one in self.running)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Entered around the whole corpus: within it `run` takes batches."""
        keep_freed_memory()
        self.attention_sites = frozenset(
            attention_site for attention_site, heads in self.checkpoint.layout.items() if heads
        )
        with ExitStack() as stack:
            for one in self.running:
                stack.enter_context(one.hooks(self.checkpoint))
            if self.differentiated or any(map(explains, self.running)):
                stack.enter_context(frozen_parameters(self.checkpoint.model))
            stack.enter_context(observing(self.checkpoint.model, self.see))
            stack.callback(self._take_apart)
            yield

    def run(self, batch: Batch) -> None:
        """The common pass over a batch, then the passes of analyses' own; the batch counts when all are through."""
        with threads_for_pass(self.checkpoint.model, batch.positions):
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        here, self.found = batch.to(self.checkpoint.device), []
        if batch.kind == "text" and self.differentiated:
            self._differentiate(here)
        else:
            self._look(here, self.running)
        if batch.kind == "text":
            for one in [each for each in self.running if explains(each)]:
                self._explain(one, here)
        with torch.inference_mode():  # thousands of small sums: without autograd's bookkeeping
            self._add_up(batch)

    def _explain(self, one: Analysis, batch: Batch) -> None:
        """An analysis' own passes; where the model is none that it can explain, it is left out from then on."""
        try:
            with torch.no_grad():
                self.found += [(one, key, ratio) for key, ratio in one.explain(self.checkpoint, batch).items()]
        except CheckpointError as error:
            counted = {*self.sums, *(name for keys in self.stacks for name, _ in keys)}
            if one.name in counted or len(self.running) == 1:
                raise
            self.running = [each for each in self.running if each is not one]
            self.refused.append(LeftOut(one.name, str(error)))

    def _look(self, batch: Batch, observers: Sequence[Analysis]) -> None:
        """One forward pass without gradients, to its end only where an analysis watches it by other means."""
        with torch.inference_mode(), self._seen(batch, observers):
            self.unseen = set() if any(map(watches, self.running)) else set(self.attention_sites)
            with suppress(StopForward):
                self.checkpoint.forward(batch)
            for heads, _ in self.kept:
                self._observe(heads, afterwards=True)

    def _differentiate(self, batch: Batch) -> None:
        """One forward pass and one backward pass of the objective.

        An objective that hides tokens has a pass to itself: the other analyses see the text as it is.
        """
        objective = OBJECTIVES.get(self.options.objective)(seed=self.options.seed)
        observers: Sequence[Analysis] = self.running
        if objective.alters(self.checkpoint):
            observers = [one for one in self.running if "gradient" in one.needs]
            if others := [one for one in self.running if "gradient" not in one.needs and "text" in one.passes]:
                self._look(batch, others)
        ready = objective.prepared(self.checkpoint, batch)
        with self._seen(ready, observers):
            with differentiable_contexts():
                outcome = objective.evaluate(self.checkpoint, objective.output(self.checkpoint, ready), ready)
            gradients = gradients_of(outcome.values, [context for _, context in self.kept])
            with torch.no_grad():
                for (heads, _), gradient in zip(self.kept, gradients, strict=True):
                    heads.gradient, heads.counts = _precise(gradient), outcome.counts
                    self._observe(heads, afterwards=True)

    @contextmanager
    def _seen(self, batch: Batch, observers: Sequence[Analysis]) -> Iterator[None]:
        """Within the block `see` shows every call to these analyses; NumericalError where a context is not finite."""
        self.here, self.observers, self.cache, self.kept, self.contexts = batch, observers, {}, [], []
        try:
            yield
            finite = sums_are_finite(self.contexts)
        finally:
            self.observers, self.cache, self.kept, self.contexts, self.unseen = (), {}, [], [], set()
        if not finite:
            refuse_overflow(self.checkpoint, lambda: self.checkpoint.forward(batch), batch)

    def see(self, attention_site: AttentionSite, call: AttentionCall) -> None:
        """Every analysis sees every call of the batch that is on its way."""
        if not self.observers:
            return
        with torch.no_grad():
            heads = self._heads(attention_site, call, self.here)
            self.contexts.append((heads.context.sum(dim=(1, 3)), heads.query_side.real))
            self._observe(heads, afterwards=False)
            if any(later(one) and self._concerns(one, heads) for one in self.observers):
                self.kept.append((heads, call.context))
        if self.unseen:
            self.unseen.discard((attention_site.site, attention_site.layer))
            if not self.unseen:
                raise StopForward

    def _concerns(self, one: Analysis, heads: HeadBatch) -> bool:
        return self.here.kind in one.passes and heads.site in one.sites

    def _observe(self, heads: HeadBatch, *, afterwards: bool) -> None:
        for one in self.observers:
            if later(one) is afterwards and self._concerns(one, heads):
                for name, ratio in one.observe(heads).items():
                    self.found.append((one, (name, heads.site, heads.layer), ratio))

    def _heads(self, attention_site: AttentionSite, call: AttentionCall, batch: Batch) -> HeadBatch:
        text = batch.source if batch.target is None else batch.target
        query_side = batch.source if attention_site.site is Site.ENCODER_SELF else text
        key_side = text if attention_site.site is Site.DECODER_SELF else batch.source
        expected = (query_side.ids.shape[1], key_side.ids.shape[1])
        if tuple(call.weights.shape[-2:]) != expected:
            raise CheckpointError(
                f"{attention_site.site}.{attention_site.layer} attends from {call.weights.shape[-2]} to "
                f"{call.weights.shape[-1]} positions where the text has {expected[0]} and {expected[1]}; "
                "it cannot be analysed token by token"
            )
        queries, keys = self._counted(query_side, key_side)
        return HeadBatch(
            site=attention_site.site,
            layer=attention_site.layer,
            weights=_precise(call.weights.detach()),
            context=_precise(call.context.detach()),
            value=call.value.detach(),
            queries=queries,
            keys=keys,
            visible=_visible(call, key_side, self.cache),
            query_side=query_side,
            key_side=key_side,
            batch=batch,
            cache=self.cache,
        )

    def _counted(self, query_side: Side, key_side: Side) -> tuple[Tensor, Tensor]:
        """Which queries [b t] and keys [b s] count; the same tensors for every layer of a site."""
        name = f"counted/{id(query_side)}/{id(key_side)}"
        if name not in self.cache:
            sides = (query_side, key_side)
            queries, keys = (its.real if self.options.keep_special else its.real & ~its.special for its in sides)
            self.cache[name] = (queries & keys.any(dim=-1, keepdim=True), keys)
        found: tuple[Tensor, Tensor] = self.cache[name]
        return found

    def _add_up(self, batch: Batch) -> None:
        """Add what the analyses found in a batch: statistics of one number a head together, the others one by one."""
        alike: dict[Any, list[tuple[Analysis, tuple[str, Site, int], Ratio]]] = {}
        for number, (one, key, ratio) in enumerate(self.found):
            plain = ratio.total.ndim == 2 and not (ratio.whole or ratio.centred or ratio.coarse)
            form = (ratio.total.shape, ratio.count.shape, ratio.total.dtype, ratio.count.dtype) if plain else number
            alike.setdefault(form, []).append((one, key, ratio))
            if self.detail and batch.kind == "text" and ratio.total.ndim == 2 and not ratio.whole:
                self._keep(key, batch, ratio)
        for found in alike.values():
            if len(found) > 1:
                together = stack_ratios([ratio for _, _, ratio in found])
                if not is_finite(together.total):
                    for one, key, ratio in found:
                        refuse_non_finite(one, key, ratio)
                keys = tuple((one.name, key) for one, key, _ in found)
                stack = self.stacks.setdefault(keys, GroupSums(budget=len(keys) * self._budget))
                stack.add(batch.indices, together)
            else:
                self._add(*found[0], batch)

    def _add(self, one: Analysis, key: tuple[str, Site, int], ratio: Ratio, batch: Batch) -> None:
        mine = self.sums.setdefault(one.name, {})
        refuse_non_finite(one, key, ratio)
        if key not in mine:
            mine[key] = GroupSums(groups=FOLDS if ratio.whole else GROUPS, budget=self._budget)
        mine[key].add(torch.tensor([batch.fold]) if ratio.whole else batch.indices, ratio)

    @property
    def _budget(self) -> int:
        """Bytes that the sums of one statistic may take at one (site, layer)."""
        return BUDGET // len(self.checkpoint.attention_sites.order)

    def _take_apart(self) -> None:
        """Give every statistic sums of its own, when the corpus has been read."""
        for keys, stack in self.stacks.items():
            for (name, key), sums in zip(keys, unstack_statistics(stack), strict=True):
                self._include(name, key, sums)
        self.stacks.clear()

    def _include(self, name: str, key: tuple[str, Site, int], sums: GroupSums) -> None:
        mine = self.sums.setdefault(name, {})
        if key in mine:
            mine[key].merge(sums)
        else:
            mine[key] = sums

    def _keep(self, key: tuple[str, Site, int], batch: Batch, ratio: Ratio) -> None:
        name, site, layer = key
        values = (ratio.total / ratio.count).float().cpu()  # [b h]
        for sentence, value in zip(batch.indices.tolist(), values, strict=True):
            self.detailed.setdefault(name, {}).setdefault(f"{sentence}/{site}", {})[layer] = value

    def part(self) -> PartialResult:
        """What this process found, for the one that concludes."""
        return PartialResult(self.sums, self.detailed, self.refused, {one.name: one.own() for one in self.running})

    def take(self, part: PartialResult) -> None:
        """Add what another process found in its share of the batches."""
        gone = {each.analysis for each in part.refused}
        self.running = [one for one in self.running if one.name not in gone]
        self.refused += [each for each in part.refused if each not in self.refused]
        for name, its in part.sums.items():
            for key, sums in its.items():
                self._include(name, key, sums)
        for name, sentences in part.detailed.items():
            self.detailed[name] = {**self.detailed.get(name, {}), **sentences}
        for one in self.running:
            if part.own.get(one.name) is not None:
                one.add(part.own[one.name])

    def conclude(self, bootstrap: Bootstrap) -> AnalysisResult:
        """Turn sums into columns, tables and labels."""
        empty = [one for one in self.running if one.passes and not self.sums.get(one.name)]
        reporting = [one for one in self.running if one not in empty]
        found = parallel_map(lambda one: one.report(Aggregates(self.sums.get(one.name, {}), bootstrap)), reporting)
        report = list(zip(reporting, found, strict=True))
        left_out = [*self.refused, *(LeftOut(one.name, "found nothing to measure") for one in empty)]
        remarks = [remark for each in found for remark in each.remarks]
        labels: dict[HeadId, list[str]] = {}
        for each in found:
            for head, texts in each.labels.items():
                labels.setdefault(head, []).extend(texts)
        return AnalysisResult(
            heads=heads_table(self._measured(), found, labels),
            tables={name: frame for each in found for name, frame in each.tables.items()},
            arrays={name: array for each in found for name, array in each.arrays.items()},
            labels=labels,
            left_out=left_out,
            remarks=remarks,
            signatures={one.name: self._signature(one) for one, _ in report},
            detail=self._detail(found),
            losses=Omissions(),
            sentences=0,
            complete=True,
            seconds=0.0,
        )

    def _signature(self, one: Analysis) -> dict[str, str]:
        its = {"m": f"{one.name}.v{one.version}"}
        if needs_objective(type(one)):
            its["objective"] = f"{one.objective.name}.v{one.objective.version}"
        return its | one.signature()

    def _detail(self, report: Sequence[AnalysisReport]) -> dict[str, dict[str, Array]]:
        found = {name: {key: stacked(layers) for key, layers in its.items()} for name, its in self.detailed.items()}
        for each in report:
            for name, arrays in each.detail.items():
                found.setdefault(name, {}).update(arrays)
        return found

    def _measured(self) -> list[HeadId]:
        """Heads of the sites that were seen; all of them where only parameters were looked at."""
        seen = {(site, layer) for mine in self.sums.values() for _, site, layer in mine}
        layout = self.checkpoint.layout
        return list(
            all_heads(
                {
                    attention_site: count
                    for attention_site, count in layout.items()
                    if attention_site in seen or not seen
                }
            )
        )


def explains(one: Analysis) -> bool:
    """Whether an analysis makes passes of its own."""
    return type(one).explain is not Analysis.explain


def watches(one: Analysis) -> bool:
    """Whether an analysis has hooks of its own on the common pass."""
    return type(one).hooks is not Analysis.hooks


def later(one: Analysis) -> bool:
    """Whether an analysis observes when the pass is through."""
    return one.afterwards or "gradient" in one.needs


def needs_objective(one: type[Analysis]) -> bool:
    """Whether an analysis needs an objective."""
    return not one.needs.isdisjoint({"objective", "gradient"})


def _precise(values: Tensor) -> Tensor:
    """At least float32: a sum of a few hundred weights in half precision has an error in the third digit."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _visible(call: AttentionCall, key_side: Side, cache: dict[str, Any]) -> Tensor:
    """Where each query may look [b t s]: what the model's mask leaves, without padding."""
    name = f"visible/{id(call.mask)}/{id(key_side)}/{call.weights.shape[-2]}"
    if name not in cache:
        real = key_side.real[:, None, :].expand(-1, call.weights.shape[-2], -1)
        if call.mask is None:
            visible = real
        elif call.mask.dtype == torch.bool:
            visible = call.mask[:, 0] & real
        else:
            visible = (call.mask[:, 0] > torch.finfo(call.mask.dtype).min / 2) & real
        cache[name] = (visible, call.mask)  # holding the mask keeps its id from being used again
    found: Tensor = cache[name][0]
    return found
