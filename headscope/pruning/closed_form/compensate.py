"""Remove heads from a whole model in closed form: W_O of every module refitted, and a masked model that has it.

The masked model has the intact one's size: the columns of removed heads are zero, the others and the bias are
refitted. What a smaller model must give is what this one gives.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, describe_heads
from headscope.model.native.folding import fold_mixings
from headscope.model.native.transformer import Transformer
from headscope.pruning.closed_form.block_obs import DAMPING
from headscope.pruning.closed_form.moments import Moments
from headscope.pruning.closed_form.output_projections import OutputProjection, output_projections
from headscope.pruning.closed_form.refit import COMPENSATIONS, Refit, reconstruction_error
from headscope.registry import unknown


@dataclass(frozen=True)
class ModuleRefit:
    """One module that loses heads: its refit, and E‖y − ŷ‖² of it and of removal alone, as shares of E‖W x‖²."""

    projection: OutputProjection
    refit: Refit
    error: float
    error_without: float


def compensate(
    checkpoint: Checkpoint,
    moments: Moments,
    heads: Collection[HeadId],
    *,
    method: str = "least-squares",
    share: float = DAMPING,
) -> list[ModuleRefit]:
    """What makes up for `heads` in every module that loses some, all from moments of the intact model.

    `method` is one of `COMPENSATIONS`; λ is `share` of the mean second moment. A module whose output projection has no
    bias is refitted linearly. ConfigError for a method that there is not, for heads that the model lacks, and for
    modules that the text did not reach or whose columns cannot be told.
    """
    if method not in COMPENSATIONS:
        raise ConfigError(unknown("compensation", method, list(COMPENSATIONS)))
    remaining, refits = set(heads), []
    for projection in output_projections(checkpoint):
        of_module = {
            head for head in remaining if (head.site, head.layer) in projection.places and head.head < projection.heads
        }
        remaining -= of_module
        if of_module:
            refits.append(_refit_module(projection, moments, of_module, method, share))
    if remaining:
        head = min(remaining)
        if head.head >= checkpoint.layout.get((head.site, head.layer), 0):
            raise ConfigError(f"this model has no head {head}; it has {describe_heads(checkpoint.layout)}")
        raise ConfigError(f"{head} cannot be compensated: its columns of the output projection cannot be told")
    return refits


def _refit_module(
    projection: OutputProjection, moments: Moments, heads: Collection[HeadId], method: str, share: float
) -> ModuleRefit:
    measured = moments.of(projection)
    if measured is None:
        site, layer = projection.places[0]
        raise ConfigError(f"the calibration text does not reach {site}.{layer}; give a --target where a decoder is")
    mean, second, columns = measured.mean, measured.second, projection.columns(heads)
    energy = measured.output_energy(projection.weight) or 1.0

    def refitted(name: str) -> tuple[Refit, float]:
        refit = COMPENSATIONS[name](
            projection.weight, columns, mean=mean, second=second, affine=projection.has_bias, share=share
        )
        return refit, reconstruction_error(projection.weight, refit, mean=mean, second=second) / energy

    refit, error = refitted(method)
    return ModuleRefit(projection, refit, error, refitted("none")[1])


def refitted_model(checkpoint: Checkpoint, refits: Sequence[ModuleRefit]) -> nn.Module:
    """A copy of the model, of the same size and type, with the refitted output projections; mixings are folded.

    Without refits it is the same model bit for bit. ConfigError where a mixing cannot be folded.
    """
    model = checkpoint.model
    folds = any(module_refit.projection.mixing_folded for module_refit in refits)
    made = fold_mixings(model) if folds and isinstance(model, Transformer) else copy.deepcopy(model)
    with torch.no_grad():
        for module_refit in refits:
            owner = made.get_submodule(module_refit.projection.owner)
            weight = owner.get_parameter("weight")
            weight.copy_(module_refit.refit.weight if isinstance(owner, nn.Linear) else module_refit.refit.weight.T)
            if module_refit.projection.has_bias:
                owner.get_parameter("bias").add_(module_refit.refit.shift.to(weight))
    return made
