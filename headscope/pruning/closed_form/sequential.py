"""Refits module after module: each for the contexts of a model whose earlier modules are refitted already.

What a refitted module must give is what the intact one gives at the same token (ZipLM, Kurtić et al. 2023, and others
calibrate this way). Two passes over the text for every module, from the first that loses heads on; those after it that
lose none are refitted too. It does not always help: measure both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.model.threads import threads_for_pass
from headscope.pruning.closed_form.compensate import ModuleRefit, RefitOptions, RefittedCopy, heads_by_module, unreached
from headscope.pruning.closed_form.moments import ContextTap, Place, text_batches
from headscope.pruning.closed_form.output_projections import OutputProjection
from headscope.pruning.closed_form.refit import Refit, reconstruction_error, refit_to_targets, zeroed


@dataclass
class PairMoments:
    """Sums over `tokens` of contexts x of the intact model and x̃ of the pruned one, all [m] or [m m] in float64.

    `total` Σ x, `products` Σ x xᵀ, `pruned` Σ x̃, `pruned_products` Σ x̃ x̃ᵀ, `cross` Σ x̃ xᵀ.
    """

    tokens: int
    total: Tensor
    products: Tensor
    pruned: Tensor
    pruned_products: Tensor
    cross: Tensor

    @classmethod
    def zero(cls, width: int) -> PairMoments:
        """Sums over nothing."""
        vector, matrix = torch.zeros(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
        return cls(0, vector, matrix, vector.clone(), matrix.clone(), matrix.clone())

    def add(self, intact: Tensor, pruned: Tensor) -> None:
        """Contexts [n m] of the same tokens."""
        self.tokens += len(intact)
        self.total += intact.sum(dim=0).cpu()
        self.products += (intact.T @ intact).cpu()
        self.pruned += pruned.sum(dim=0).cpu()
        self.pruned_products += (pruned.T @ pruned).cpu()
        self.cross += (pruned.T @ intact).cpu()


def sequential_refits(
    checkpoint: Checkpoint,
    corpus: Corpus,
    heads: Collection[HeadId],
    options: RefitOptions | None = None,
    *,
    batching: BatchingOptions | None = None,
) -> list[ModuleRefit]:
    """Refits of every module from the first on that loses heads, in the order in which the model calls them.

    ConfigError where `options` are not for least squares, for heads that the model lacks or whose columns cannot be
    told, and for modules that the text does not reach.
    """
    options = options or RefitOptions()
    if options.method != "least-squares":
        raise ConfigError(f"--sequential is for --compensate least-squares, not {options.method}")
    called = [(site.site, site.layer) for site in checkpoint.attention_sites.order]
    modules = sorted(heads_by_module(checkpoint, heads), key=lambda module: called.index(module[0].places[0]))
    first = next((number for number, (_, of_module) in enumerate(modules) if of_module), len(modules))
    made = RefittedCopy(checkpoint, [projection for projection, _ in modules])
    refits = []
    for projection, of_module in modules[first:]:
        pair = _pair_moments(checkpoint, checkpoint.with_model(made.model), corpus, projection, batching)
        refits.append(_refit(projection, pair, of_module, options))
        made.put(projection, refits[-1].refit)
    return refits


def _refit(
    projection: OutputProjection, pair: PairMoments, heads: Collection[HeadId], options: RefitOptions
) -> ModuleRefit:
    if not pair.tokens:
        raise unreached(projection)
    weight, columns = projection.weight, projection.columns(heads)
    affine = projection.has_bias or options.add_bias
    mean, second, cross = pair.total / pair.tokens, pair.products / pair.tokens, pair.cross / pair.tokens
    refit = refit_to_targets(
        weight,
        columns,
        mean=pair.pruned / pair.tokens,
        second=pair.pruned_products / pair.tokens,
        target=weight @ mean,
        cross=cross @ weight.T,
        affine=affine,
        share=options.damping,
    )
    energy = float(((weight @ second) * weight).sum()) or 1.0
    removal = zeroed(weight, columns, mean=mean, second=second, affine=False)
    without = reconstruction_error(weight, removal, mean=mean, second=second)
    return ModuleRefit(projection, refit, _error(weight, refit, pair) / energy, without / energy, affine)


def _error(weight: Tensor, refit: Refit, pair: PairMoments) -> float:
    """E‖W x − V x̃ − s‖² for the refitted V and the shift s."""
    n, made, shift = pair.tokens, refit.weight, refit.shift
    lost = weight @ pair.total / n - made @ pair.pruned / n  # [d]
    squares = ((weight @ pair.products) * weight).sum() + ((made @ pair.pruned_products) * made).sum()
    both = ((made @ pair.cross) * weight).sum()
    return float((squares - 2 * both) / n - 2 * shift @ lost + shift @ shift)


class _Reader(ContextTap):
    """Keeps the contexts of one batch."""

    def __init__(self, checkpoint: Checkpoint, places: Collection[Place]) -> None:
        super().__init__(checkpoint, places)
        self.contexts: list[Tensor] = []

    def count(self, place: Place, contexts: Tensor, heads: int) -> None:
        """Keep the contexts of this place."""
        self.contexts.append(contexts)

    def of(self, batch: Batch) -> list[Tensor]:
        """The contexts [n m] of a batch, one tensor for each place."""
        self.contexts = []
        with (
            self.observing(),
            eval_mode(self.checkpoint.model),
            threads_for_pass(self.checkpoint.model, batch.positions),
        ):
            self.read(batch)
        return self.contexts


def _pair_moments(
    checkpoint: Checkpoint,
    pruned: Checkpoint,
    corpus: Corpus,
    projection: OutputProjection,
    batching: BatchingOptions | None,
) -> PairMoments:
    readers = [_Reader(model, projection.places) for model in (checkpoint, pruned)]
    pair = PairMoments.zero(projection.weight.shape[1])
    for batch in text_batches(checkpoint, corpus, batching):
        on_device = batch.to(checkpoint.device)
        for intact, altered in zip(*(reader.of(on_device) for reader in readers), strict=True):
            pair.add(intact, altered)
    return pair
