"""Moments of the concatenated contexts of every attention module over a text, in one pass and constant memory.

The contexts of all heads, concatenated, are the input x [m] of the output projection W_O: after gates, and after mixing
unless the mixing is folded into W_O (see `OutputProjection`). With an objective also the Fisher matrix of the
projection's outputs: Σ g gᵀ over tokens, g [d] the gradient of the objective by the output at a token. Every token
counts, special ones too, but no padding. Sums are in float64 whatever the model's type, on its device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attribution.objectives.base import OBJECTIVES, Objective, ObjectiveOutput, choose_objective
from headscope.data.batching import BatchingOptions, batches, sentence_limit
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch
from headscope.distributed import ALONE, Processes, upload
from headscope.engine.aggregate import gram
from headscope.engine.plan import gives_labels
from headscope.errors import CheckpointError, NumericalError, flag
from headscope.evaluation.likelihood import default_positions
from headscope.evaluation.opened import refuse_unread_target
from headscope.formats.base import Checkpoint
from headscope.heads import SiteLayer
from headscope.model.discovery import AttentionSite, eval_mode
from headscope.model.forward import refuse_overflow
from headscope.model.interface import watch_modules
from headscope.model.projections import WeightOwners
from headscope.model.streaming import streaming
from headscope.model.taps import frozen_parameters, gradients_of, tapped_sites
from headscope.pruning.closed_form.output_projections import OutputProjection, output_projections


@dataclass
class ContextMoments:
    """Sums over `tokens` contexts x [m]: `total` Σ x, `products` Σ x xᵀ [m m], `norms` [h] Σ ‖x_h‖ of each head.

    With an objective, `fisher` is Σ g gᵀ [d d], and `gates` Σ a aᵀ [h h] with a_h = x_h · ∂/∂x_h, the gradient by a
    gate on head h at one token.
    """

    tokens: int
    total: Tensor
    products: Tensor
    norms: Tensor
    fisher: Tensor | None = None
    gates: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """E x [m]."""
        return self.total / self.tokens

    @property
    def second(self) -> Tensor:
        """E x xᵀ [m m]."""
        return self.products / self.tokens

    @property
    def covariance(self) -> Tensor:
        """E x xᵀ − E x E xᵀ [m m]."""
        return self.second - torch.outer(self.mean, self.mean)

    def to(self, device: str | torch.device) -> ContextMoments:
        sums: dict[str, Any] = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **sums)

    def merge(self, other: ContextMoments) -> ContextMoments:
        mine, theirs = ({name: sums for name, sums in vars(part).items() if sums is not None} for part in (self, other))
        return ContextMoments(**{name: sums + theirs[name] for name, sums in mine.items() if name in theirs})


@dataclass
class Moments:
    """Moments of every (site, layer) that a text reached, and the number of the objective's predictions.

    `further_moments` are of other texts, of equal weight each.
    """

    sites: dict[SiteLayer, ContextMoments] = field(default_factory=dict)
    predictions: float = 0.0
    further_moments: Sequence[Moments] = ()

    def merge(self, other: Moments) -> Moments:
        """The moments of both texts together, or of the shares of two processes."""
        sites = dict(self.sites)
        for site_layer, moments in other.sites.items():
            sites[site_layer] = sites[site_layer].merge(moments) if site_layer in sites else moments
        return Moments(sites, self.predictions + other.predictions)

    def of(self, projection: OutputProjection) -> ContextMoments | None:
        """The moments of a module over all layers that share it; None where the text did not reach it.

        E x and E x xᵀ are means over all texts that reached it; norms, Fisher matrix and tokens are this text's.
        """
        sums = [self.sites[site_layer] for site_layer in projection.site_layers if site_layer in self.sites]
        text_moments = reduce(ContextMoments.merge, sums) if sums else None
        observed_moments = [part for part in (text.of(projection) for text in self.further_moments) if part is not None]
        if text_moments is None or not observed_moments:
            return text_moments
        total, products = text_moments.total.clone(), text_moments.products.clone()
        for part in observed_moments:
            total += text_moments.tokens / part.tokens * part.total
            products += text_moments.tokens / part.tokens * part.products
        n = 1 + len(observed_moments)
        return ContextMoments(text_moments.tokens, total / n, products / n, text_moments.norms, text_moments.fisher)


def text_batches(
    checkpoint: Checkpoint, corpus: Corpus, batching: BatchingOptions | None, *, labels: bool = False
) -> Iterator[Batch]:
    """The batches of a corpus; with `labels`, if the model predicts any."""
    refuse_unread_target(checkpoint, corpus)
    batching = batching or BatchingOptions(default_positions(checkpoint))
    return batches(
        corpus,
        checkpoint,
        tokens=batching.tokens,
        limit=sentence_limit(checkpoint, batching.limit),
        long=batching.long,
        labels=labels and gives_labels(checkpoint, corpus),
        folds=1,
    )


def collect_moments(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *,
    batching: BatchingOptions | None = None,
    objective: str | None = None,
    seed: int = 1,
    processes: Processes = ALONE,
) -> Moments:
    """The moments of a corpus; with `objective` ("" for the model's default one) also Fisher matrices.

    Each of several `processes` reads its share of the batches, and all return the moments of the whole corpus.
    """
    chosen_objective = None
    if objective is not None:
        chosen_objective = OBJECTIVES.get(choose_objective(objective, checkpoint, **corpus.comes_with))(seed=seed)
    batches_of_text = text_batches(checkpoint, corpus, batching, labels=chosen_objective is not None)
    collector = _Collector(checkpoint, chosen_objective)
    with eval_mode(checkpoint.model), streaming(), collector.observing():  # no weights are kept for the gradients
        for number, batch in enumerate(batches_of_text):
            if number % processes.world == processes.rank:
                collector.add(batch)
    return reduce(Moments.merge, processes.all(collector.finish()))


class ContextTap(ABC):
    """Reads the contexts of a model batch after batch: `count` gets those [n m] of every (site, layer) in float64.

    With `site_layers`, of these only. Contexts are on the model's device, or on the CPU where that has no float64.
    """

    def __init__(self, checkpoint: Checkpoint, site_layers: Collection[SiteLayer] | None = None) -> None:
        self.checkpoint = checkpoint
        self.device = torch.device("cpu") if checkpoint.device.type == "mps" else checkpoint.device
        self.projections = projections = [
            projection
            for projection in output_projections(checkpoint)
            if site_layers is None or not set(site_layers).isdisjoint(projection.site_layers)
        ]
        self.mixed = {
            site_layer for projection in projections if projection.mixing for site_layer in projection.site_layers
        }
        owners = WeightOwners(checkpoint.model).modules()
        self.owners = {
            site_layer: owners[projection.owner] for projection in projections for site_layer in projection.site_layers
        }
        self.counting = False

    @abstractmethod
    def count(self, site_layer: SiteLayer, contexts: Tensor, heads: int) -> None:
        """Called with the concatenated contexts [n h·k] of a layer at the tokens of a batch."""

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Within the block, batches are read: around the whole corpus, or around one batch."""

        @torch.no_grad()
        def tap(site: AttentionSite, context: Tensor, *, before_mixing: bool) -> None:
            site_layer = site.site_layer
            if self.counting and site_layer in self.owners and (site_layer in self.mixed) == before_mixing:
                self.count(site_layer, self.rows(site_layer, context.transpose(1, 2).flatten(2)), site.heads)

        model = self.checkpoint.model
        with (
            tapped_sites(model, lambda site, _, context: tap(site, context, before_mixing=True), before_mixing=True),
            tapped_sites(model, lambda site, _, context: tap(site, context, before_mixing=False)),
        ):
            yield

    def read(self, batch: Batch) -> None:
        """Run the model on a batch and count its contexts."""
        self.batch, self.counting = batch, True
        with torch.no_grad():
            self.checkpoint.forward(batch)
        self.counting = False

    def rows(self, site_layer: SiteLayer, values: Tensor) -> Tensor:
        """The values [b t c] at tokens that are no padding, in float64 [n c]."""
        site, layer = site_layer
        text, _ = self.batch.on_host.sides(site)  # the padding mask on the CPU, so that the device need not wait
        if values.shape[:-1].numel() != text.real.numel():
            raise CheckpointError(
                f"{site}.{layer} gives {values.shape[:-1].numel()} contexts for {text.real.numel()} positions; "
                "its moments cannot be counted token by token"
            )
        positions = upload(text.real.flatten().nonzero()[:, 0], values.device)
        return values.detach().reshape(-1, values.shape[-1]).index_select(0, positions).to(self.device).double()


class _Collector(ContextTap):
    """Sums the moments of a text; with an objective also Fisher matrices, by a backward pass for each batch.

    `waiting` has the contexts of modules whose output is not computed yet, `outputs` those whose output is.
    """

    def __init__(self, checkpoint: Checkpoint, objective: Objective | None) -> None:
        super().__init__(checkpoint)
        self.objective = objective
        self.moments = Moments()
        self.waiting: dict[nn.Module, tuple[SiteLayer, Tensor, int]] = {}
        self.outputs: list[tuple[SiteLayer, Tensor, Tensor, int]] = []
        self.differentiating, self.summing = False, True
        self.projection_of = {
            site_layer: projection for projection in self.projections for site_layer in projection.site_layers
        }

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Within the block, outputs of projections are watched too, if there is an objective."""
        with super().observing(), ExitStack() as stack:
            if self.objective is not None:
                stack.enter_context(frozen_parameters(self.checkpoint.model))
                stack.enter_context(watch_modules(set(self.owners.values()), self._output))
            yield

    def add(self, batch: Batch) -> None:
        """Add a batch in one pass; in two, for contexts and for gradients, where the objective alters the text."""
        batch = batch.to(self.checkpoint.device)
        if self.objective is None or self.objective.alters(self.checkpoint):
            self.read(batch)
            self._refuse_overflow(batch)
        if self.objective is not None:
            self._differentiate(batch, self.objective)

    def _differentiate(self, batch: Batch, objective: Objective) -> None:
        ready = objective.prepare(self.checkpoint, batch)
        self.batch, self.outputs = ready, []
        self.counting, self.differentiating, self.summing = True, True, not objective.alters(self.checkpoint)
        with torch.enable_grad():
            outcome = objective.evaluate(self.checkpoint, objective.output(self.checkpoint, ready), ready)
            values = explained_values(outcome, batch.indices.tolist(), seed=objective.seed)
        self.counting, self.differentiating, self.summing = False, False, True
        calls, self.outputs = self.outputs, []
        gradients = gradients_of(values, [output for _, output, _, _ in calls])  # [b t d] each
        for (site_layer, _, contexts, heads), gradient in zip(calls, gradients, strict=True):
            output_gradient, sums = self.rows(site_layer, gradient), self.moments.sites[site_layer]  # [n d]
            context_gradient = output_gradient @ self.projection_of[site_layer].weight.to(output_gradient)  # [n h·k]
            gate_gradient = (contexts * context_gradient).view(len(contexts), heads, -1).sum(dim=-1)  # [n h]
            fisher, gates = gram(output_gradient), gram(gate_gradient)
            sums.fisher = fisher if sums.fisher is None else sums.fisher.add_(fisher)
            sums.gates = gates if sums.gates is None else sums.gates.add_(gates)
        self.moments.predictions += float(outcome.counts.sum())
        self._refuse_overflow(batch)

    def _output(self, module: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        """A forward hook on W_O: the model continues with a copy, so that the differentiated tensor stays as it is."""
        if module not in self.waiting:
            return None
        site_layer, contexts, heads = self.waiting.pop(module)
        self.outputs.append((site_layer, output.requires_grad_(), contexts, heads))
        return output.clone()

    def count(self, site_layer: SiteLayer, contexts: Tensor, heads: int) -> None:
        """Add the contexts to the sums of their layer; keep them where a backward pass follows."""
        if self.differentiating:
            self.waiting[self.owners[site_layer]] = site_layer, contexts, heads
        if not self.summing:
            return
        norms = contexts.view(len(contexts), heads, -1).norm(dim=-1).sum(dim=0)
        sums = ContextMoments(len(contexts), contexts.sum(dim=0), gram(contexts), norms)
        if site_layer not in self.moments.sites:
            self.moments.sites[site_layer] = sums
            return
        total = self.moments.sites[site_layer]
        total.tokens += sums.tokens
        total.total += sums.total
        total.products += sums.products
        total.norms += sums.norms

    def _refuse_overflow(self, batch: Batch) -> None:
        finite = [sums.total.isfinite().all() for sums in self.moments.sites.values()]
        if finite and not bool(torch.stack(finite).all()):  # one wait for the GPU, not one a layer
            refuse_overflow(self.checkpoint, lambda: self.checkpoint.forward(batch), batch)

    def finish(self) -> Moments:
        """The moments, on the CPU; NumericalError where gradients are not finite."""
        for (site, layer), sums in self.moments.sites.items():
            if sums.fisher is not None and not bool(sums.fisher.isfinite().all()):
                raise NumericalError(
                    f"gradients at the output of {site}.{layer} are NaN or infinite; take a wider {flag.dtype}"
                )
        sites = {site_layer: sums.to("cpu") for site_layer, sums in self.moments.sites.items()}
        return Moments(sites, self.moments.predictions)


def explained_values(outcome: ObjectiveOutput, numbers: Sequence[int], *, seed: int) -> Tensor:
    """The values [b] to differentiate for the Fisher matrix: the objective's, or a probe of its vectors.

    An objective that compares vectors v [b d] loses 1 − cos(v, v') ≈ ½ ‖(I − u uᵀ) (v' − v)‖² / ‖v‖², u = v / ‖v‖:
    its gradient is zero, its curvature is not. The gradient of z · v with z from N(0, (I − u uᵀ) / ‖v‖²) has that
    curvature as its second moment. z follows from the seed and the sentence's number.
    """
    if outcome.vector is None:
        return outcome.values
    vector = outcome.vector.detach()
    seeds = ((seed * 1_000_003 + number) % 2**63 for number in numbers)
    generators = (torch.Generator().manual_seed(own_seed) for own_seed in seeds)
    probes = [torch.randn(vector.shape[1], generator=generator, dtype=torch.float64) for generator in generators]
    noise = torch.stack(probes).to(vector)
    length = vector.norm(dim=-1, keepdim=True)
    direction = vector / length
    probe = (noise - (noise * direction).sum(dim=-1, keepdim=True) * direction) / length
    return (outcome.vector * probe).sum(dim=-1)
