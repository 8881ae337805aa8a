"""Remove heads from a whole model in closed form: W_O of every module refitted, and a masked model that has it.

The masked model has the intact one's size: the columns of removed heads are zero, the others and the bias are
refitted. What a smaller model must give is what this one gives.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from headscope.errors import ConfigError, flag
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.native.transformer import Transformer, fold_mixings
from headscope.model.projections import add_bias, has_added_bias
from headscope.model.stored_weights import why_not_changed
from headscope.pruning.closed_form.moments import ContextMoments, ModuleMoments, Place
from headscope.pruning.closed_form.output_projections import FeedForwardOutput, OutputProjection, output_projections
from headscope.pruning.closed_form.refit import SolvedRefit, compensation, interpolate, reconstruction_error
from headscope.pruning.options.shared import Refit


@dataclass(frozen=True)
class ModuleRefit:
    """One module that loses heads: its refit, and E‖y − ŷ‖² of it and of removal alone, as shares of E‖W x‖².

    `affine`: the bias was refitted too. `residual`: what the residual stream has lost was counted in. A feed-forward
    block loses none; its errors are those of what follows from earlier modules.
    """

    projection: OutputProjection | FeedForwardOutput
    refit: SolvedRefit
    error: float
    error_without: float
    affine: bool
    residual: bool = False


def compensate(
    checkpoint: Checkpoint, moments: ModuleMoments, heads: Collection[HeadId], options: Refit | None = None
) -> list[ModuleRefit]:
    """What makes up for `heads` in every module that loses some, all from moments of the intact model."""
    options = options or Refit()
    modules = [(projection, of_module) for projection, of_module in heads_by_module(checkpoint, heads) if of_module]
    return [
        refit_module(projection, reached_moments(moments, projection), of_module, options)
        for projection, of_module in modules
    ]


def heads_by_module(
    checkpoint: Checkpoint, heads: Collection[HeadId]
) -> list[tuple[OutputProjection, frozenset[HeadId]]]:
    """Every output projection with those of `heads` whose columns it has."""
    remaining, modules = set(heads), []
    for projection in output_projections(checkpoint):
        of_module = frozenset(
            head for head in remaining if (head.site, head.layer) in projection.places and head.head < projection.heads
        )
        remaining -= of_module
        modules.append((projection, of_module))
    if remaining:
        raise ConfigError(f"{min(remaining)} cannot be compensated: its columns of the output projection are not told")
    return modules


def reached_moments(moments: ModuleMoments, projection: OutputProjection) -> ContextMoments:
    """The moments of a module; ConfigError where the text did not reach it."""
    of_module = moments.of(projection)
    if of_module is None:
        raise unreached_error(projection.places[0])
    return of_module


def unreached_error(place: Place) -> ConfigError:
    """The error of a module that the calibration text does not reach."""
    site, layer = place
    return ConfigError(f"the calibration text does not reach {site}.{layer}; give a {flag.target} where a decoder is")


def refit_module(
    projection: OutputProjection, moments: ContextMoments, heads: Collection[HeadId], options: Refit
) -> ModuleRefit:
    """What makes up for some heads of one module."""
    weight = projection.weight
    nothing = solve_refit(projection, moments, heads, Refit(method="none", add_bias=options.add_bias))
    refit = solve_refit(projection, moments, heads, options)
    energy = float(((weight @ moments.second) * weight).sum()) or 1.0  # E‖W x‖²
    error, error_without = (reconstruction_error(weight, weights, moments) / energy for weights in (refit, nothing))
    return ModuleRefit(projection, refit, error, error_without, projection.has_bias or options.add_bias)


def solve_refit(
    projection: OutputProjection, moments: ContextMoments, heads: Collection[HeadId], options: Refit
) -> SolvedRefit:
    """The weight and the shift of one module that make up for some heads."""
    weight, columns, affine = projection.weight, projection.columns(heads), projection.has_bias or options.add_bias
    refit = compensation(options.method, weight, columns, moments, affine=affine, share=options.share)
    nothing = SolvedRefit(weight.index_fill(1, columns, 0.0), torch.zeros_like(refit.shift))
    return interpolate(nothing, refit, options.strength)


class RefittedCopy:
    """A copy of a model, of the same size and type, whose output projections are replaced; mixings are folded.

    It shares all other weights with the intact model, so nothing else may write into it.
    """

    def __init__(self, checkpoint: Checkpoint, projections: Collection[OutputProjection | FeedForwardOutput]) -> None:
        model = checkpoint.model
        if why := why_not_changed(model):
            raise ConfigError(
                f"{checkpoint.path}: {why}, so no projection is refitted; take plain weights, one {flag.device}"
            )
        folds = any(projection.mixing is not None for projection in projections)
        self._intact = model
        owners = (model.get_submodule(projection.owner) for projection in projections)
        ids_replaced = {id(weights) for owner in owners for weights in owner.parameters()}
        weights = {id(weights): weights for weights in (*model.parameters(), *model.buffers())}
        self._shared = {key: value for key, value in weights.items() if key not in ids_replaced}
        self.model: nn.Module = (
            fold_mixings(model)
            if folds and isinstance(model, Transformer)
            else copy.deepcopy(model, memo=dict(self._shared))
        )

    @classmethod
    def of(cls, checkpoint: Checkpoint, refits: Collection[ModuleRefit]) -> RefittedCopy:
        """A copy with these refits; without any it is the same model bit for bit."""
        copy = cls(checkpoint, [module.projection for module in refits])
        copy.load_weights(refits)
        return copy

    def load_weights(self, refits: Collection[ModuleRefit]) -> None:
        """Set the projections of several modules to their refits."""
        for module in refits:
            self.put(module.projection, module.refit)

    @torch.no_grad()
    def put(self, projection: OutputProjection | FeedForwardOutput, refit: SolvedRefit) -> None:
        """Set one projection to a refit of the intact model's; a bias that it lacks is added where needed."""
        owner = self.model.get_submodule(projection.owner)
        weight, matrix = owner.get_parameter("weight"), refit.weight / projection.gate
        assert id(weight) not in self._shared, "only the projections that a copy was made for change"
        weight.copy_(matrix if isinstance(owner, nn.Linear) else matrix.T)
        if projection.has_bias:
            bias = self._intact.get_submodule(projection.owner).get_parameter("bias")
            owner.get_parameter("bias").copy_(bias + refit.shift.to(bias))
        elif has_added_bias(owner) or bool(refit.shift.any()):
            add_bias(owner, refit.shift.to(weight))

    @contextmanager
    def with_refit(self, projection: OutputProjection, refit: SolvedRefit) -> Iterator[None]:
        """Within the block the projection has this refit, afterwards the weights that it had."""
        owner = self.model.get_submodule(projection.owner)
        before = {name: values.detach().clone() for name, values in owner.named_parameters()}
        self.put(projection, refit)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, values in owner.named_parameters():
                    values.copy_(before.get(name, torch.zeros_like(values)))
