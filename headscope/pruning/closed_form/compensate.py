"""Remove heads from a whole model in closed form: W_O of every module refitted, and a masked model that has it.

The masked model has the intact one's size: the columns of removed heads are zero, the others and the bias are
refitted. What a smaller model must give is what this one gives.

How many heads each module loses is chosen by the objective that is measured after refitting. Inside a module the order
is given (greedy block OBS is nearly the best there); what an error of a module's output costs at the end of the model
is not known from the module alone.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, refuse_absent
from headscope.model.native.shrink import fold_mixings
from headscope.model.native.transformer import Transformer
from headscope.model.prefix_cache import resumable_layers
from headscope.model.projections import add_bias, has_added_bias
from headscope.model.stored_weights import why_not_changed
from headscope.pruning.closed_form.damage import DamageMeter, SharedLayers
from headscope.pruning.closed_form.moments import ContextMoments, ModuleMoments, Place
from headscope.pruning.closed_form.output_projections import FeedForwardOutput, OutputProjection, output_projections
from headscope.pruning.closed_form.refit import SolvedRefit, compensation, interpolate, reconstruction_error
from headscope.pruning.options.refit import RefitOptions


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
    checkpoint: Checkpoint, moments: ModuleMoments, heads: Collection[HeadId], options: RefitOptions | None = None
) -> list[ModuleRefit]:
    """What makes up for `heads` in every module that loses some, all from moments of the intact model."""
    options = options or RefitOptions()
    modules = [(projection, of_module) for projection, of_module in heads_by_module(checkpoint, heads) if of_module]
    return [
        refit_module(projection, reached(moments, projection), of_module, options) for projection, of_module in modules
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
        head = min(remaining)
        refuse_absent([head], checkpoint.layout)
        raise ConfigError(f"{head} cannot be compensated: its columns of the output projection cannot be told")
    return modules


def reached(moments: ModuleMoments, projection: OutputProjection) -> ContextMoments:
    """The moments of a module; ConfigError where the text did not reach it."""
    of_module = moments.of(projection)
    if of_module is None:
        raise unreached(projection.places[0])
    return of_module


def unreached(place: Place) -> ConfigError:
    """The error of a module that the calibration text does not reach."""
    site, layer = place
    return ConfigError(f"the calibration text does not reach {site}.{layer}; give a --target where a decoder is")


def refit_module(
    projection: OutputProjection, moments: ContextMoments, heads: Collection[HeadId], options: RefitOptions
) -> ModuleRefit:
    """What makes up for some heads of one module."""
    columns, affine = projection.columns(heads), projection.has_bias or options.add_bias

    weight, mean, second = projection.weight, moments.mean, moments.second
    nothing, refit = (
        compensation(method, weight, columns, mean=mean, second=second, affine=affine, share=options.damping)
        for method in ("none", options.method)
    )
    refit = interpolate(nothing, refit, options.strength)
    energy = float(((weight @ second) * weight).sum()) or 1.0  # E‖W x‖²
    error, error_without = (
        reconstruction_error(weight, weights, mean=mean, second=second) / energy for weights in (refit, nothing)
    )
    return ModuleRefit(projection, refit, error, error_without, affine)


class RefittedCopy:
    """A copy of a model, of the same size and type, whose output projections are replaced; mixings are folded."""

    def __init__(self, checkpoint: Checkpoint, projections: Iterable[OutputProjection | FeedForwardOutput]) -> None:
        model = checkpoint.model
        if why := why_not_changed(model):
            raise ConfigError(
                f"{checkpoint.path}: {why}, so no projection is refitted; take plain weights, one --device"
            )
        folds = any(projection.mixing_folded for projection in projections)
        self.model: nn.Module = (
            fold_mixings(model) if folds and isinstance(model, Transformer) else copy.deepcopy(model)
        )
        self._intact = model

    @classmethod
    def of(cls, checkpoint: Checkpoint, refits: Collection[ModuleRefit]) -> RefittedCopy:
        """A copy with these refits; without any it is the same model bit for bit."""
        refitted = cls(checkpoint, [module.projection for module in refits])
        refitted.load_weights(refits)
        return refitted

    def load_weights(self, refits: Collection[ModuleRefit]) -> None:
        """Set the projections of several modules to their refits."""
        for module in refits:
            self.put(module.projection, module.refit)

    @torch.no_grad()
    def put(self, projection: OutputProjection | FeedForwardOutput, refit: SolvedRefit) -> None:
        """Set one projection to a refit of the intact model's; a bias that it lacks is added where needed."""
        owner = self.model.get_submodule(projection.owner)
        weight, matrix = owner.get_parameter("weight"), refit.weight / projection.gate
        weight.copy_(matrix if isinstance(owner, nn.Linear) else matrix.T)
        if projection.has_bias:
            bias = self._intact.get_submodule(projection.owner).get_parameter("bias")
            owner.get_parameter("bias").copy_(bias + refit.shift.to(bias))
        elif has_added_bias(owner) or bool(refit.shift.any()):
            add_bias(owner, refit.shift.to(weight))


ModuleOrder = tuple[OutputProjection, Sequence[int]]
"""A module, and its units in the order in which they go."""
MEASURED = 128
"""Sentences that an allocation is measured on at most."""
TIE = 1e-9
"""By how much a score is above the one before it where the damage did not grow."""


def measured_allocation(
    meters: Sequence[DamageMeter],
    moments: ModuleMoments,
    orders: Sequence[ModuleOrder],
    options: RefitOptions | None = None,
    *,
    most: int | None = None,
    step: Callable[[int], None] = lambda count: None,
    known: MutableMapping[str, float] | None = None,
) -> dict[HeadId, float]:
    """The damage once a head and all before it are gone and the rest is refitted; next goes what does least damage.

    Greedy over modules by the objective on the texts of `meters` (their mean); a module is measured again only when it
    is the cheapest by what was measured before (lazy evaluation, Minoux 1978). Scores are made to rise, for the damage
    itself can fall. Where `most` heads are to go, it ends with the unit that exceeds them; the others are ordered by
    what one more of their module would do. `step` is called after every unit, and with 0 after every measurement;
    `known` keeps these by how many units of every module are gone. Passes begin at the layer whose module loses the
    unit.
    """
    refit = _cached_refits(moments, orders, options or RefitOptions())
    known = {} if known is None else known
    trial = RefittedCopy(meters[0].checkpoint, [projection for projection, _ in orders])
    gone, damage, scores = [0] * len(orders), 0.0, dict[HeadId, float]()
    layer_index = resumable_layers(trial.model)
    shared = [None if layer_index is None else SharedLayers(layer_index) for _ in meters]

    def measured(number: int) -> float:
        """The damage with one more unit of a module gone."""
        state = " ".join(str(count + (other == number)) for other, count in enumerate(gone))
        if state not in known:
            for other, count in enumerate(gone):
                trial.put(orders[other][0], refit(other, count + (other == number)))
            places = orders[number][0].places
            known[state] = fmean(
                meter.measure(trial.model, layers=layers, places=places).damage
                for meter, layers in zip(meters, shared, strict=True)
            )
            step(0)
        return known[state]

    waiting = [(measured(number), number, 0) for number, (_, units) in enumerate(orders) if units]
    heapq.heapify(waiting)
    worst, taken = 0.0, 0
    while waiting and (most is None or len(scores) <= most):
        after, number, at = heapq.heappop(waiting)
        if at < taken:
            heapq.heappush(waiting, (measured(number), number, taken))
            continue
        projection, units = orders[number]
        growth, damage = after - damage, after
        waiting = [(cost + growth, other, when) for cost, other, when in waiting]
        unit = projection.units[units[gone[number]]]
        gone[number] += 1
        taken += 1
        for layers in filter(None, shared):
            layers.forget(projection.places)
        worst = max(damage, worst + TIE)
        scores.update(dict.fromkeys(unit, worst))
        step(1)
        if gone[number] < len(units):
            heapq.heappush(waiting, (measured(number), number, taken))
    for _, number, _ in sorted(waiting):
        projection, units = orders[number]
        for left in units[gone[number] :]:
            worst += TIE
            scores.update(dict.fromkeys(projection.units[left], worst))
    return scores


def _cached_refits(
    moments: ModuleMoments, orders: Sequence[ModuleOrder], options: RefitOptions
) -> Callable[[int, int], SolvedRefit]:
    """From the number of a module and how many of its units are gone to its refit; two of a module are kept."""
    refits: dict[tuple[int, int], SolvedRefit] = {}

    def refit(number: int, count: int) -> SolvedRefit:
        if (number, count) not in refits:
            projection, units = orders[number]
            heads = [head for unit in units[:count] for head in projection.units[unit]]
            refits.pop((number, count - 2), None)
            refits[number, count] = refit_module(projection, reached(moments, projection), heads, options).refit
        return refits[number, count]

    return refit
