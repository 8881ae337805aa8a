"""Refit the output projections W_O of a model in closed form, so that they make up for removed heads.

The refitted model has the intact one's size: in W_O the columns of removed heads are zero, the others and the bias are
refitted. A smaller model must compute the same. W_O is refitted on one text; of several refits the one that harms
least is chosen, on the worse of two other texts.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from headscope.data.corpus import Corpus, line_digests
from headscope.errors import ConfigError, DataError, flag
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, SiteLayer
from headscope.model.native.transformer import Transformer, fold_mixings
from headscope.model.projections import add_bias, has_added_bias
from headscope.model.stored_weights import why_not_changed
from headscope.pruning.closed_form.damage import Performance
from headscope.pruning.closed_form.moments import ContextMoments, Moments
from headscope.pruning.closed_form.output_projections import OutputProjection, output_projections
from headscope.pruning.closed_form.refit import SolvedRefit, compensation, interpolate, reconstruction_error
from headscope.pruning.options.shared import Refit, anchor_name


@dataclass(frozen=True)
class ModuleRefit:
    """The refit of one module, and E‖y − ŷ‖² with it (`error`) and with removal alone, as shares of E‖W x‖².

    `affine`: the bias was refitted too. `residual`: the refit also makes up for the loss in the residual stream. A
    feed-forward block loses no heads; its errors are due to earlier modules.
    """

    projection: OutputProjection
    refit: SolvedRefit
    error: float
    error_without: float
    affine: bool
    residual: bool = False


def compensate(
    checkpoint: Checkpoint, moments: Moments, heads: Collection[HeadId], options: Refit | None = None
) -> list[ModuleRefit]:
    """The refits of every module that loses some of `heads`, all from moments of the intact model."""
    options, refits = options or Refit(), list[ModuleRefit]()
    for projection, module_heads in heads_by_module(checkpoint, heads):
        if module_heads:
            weight, sums = projection.weight, reached_moments(moments, projection)
            refit = solve_refit(projection, sums, module_heads, options)
            removal = solve_refit(projection, sums, module_heads, Refit(method="none", add_bias=options.add_bias))
            energy = float(((weight @ sums.second) * weight).sum()) or 1.0  # E‖W x‖²
            error, without = (reconstruction_error(weight, candidate, sums) / energy for candidate in (refit, removal))
            refits.append(ModuleRefit(projection, refit, error, without, projection.has_bias or options.add_bias))
    return refits


def heads_by_module(
    checkpoint: Checkpoint, heads: Collection[HeadId]
) -> list[tuple[OutputProjection, frozenset[HeadId]]]:
    """Every output projection with its heads among `heads`."""
    remaining, modules = set(heads), []
    for projection in output_projections(checkpoint):
        module_heads = frozenset(
            head
            for head in remaining
            if (head.site, head.layer) in projection.site_layers and head.head < projection.heads
        )
        remaining -= module_heads
        modules.append((projection, module_heads))
    if remaining:
        raise ConfigError(f"{min(remaining)} cannot be compensated: its columns of the output projection are unknown")
    return modules


def reached_moments(moments: Moments, projection: OutputProjection) -> ContextMoments:
    """The moments of a module; ConfigError where the text did not reach it."""
    module_moments = moments.of(projection)
    if module_moments is None:
        raise unreached_error(projection.site_layers[0])
    return module_moments


def unreached_error(site_layer: SiteLayer) -> ConfigError:
    """The error of a module that the calibration text does not reach."""
    site, layer = site_layer
    return ConfigError(f"the calibration text does not reach {site}.{layer}; give a {flag.target} where a decoder is")


def solve_refit(
    projection: OutputProjection, moments: ContextMoments, heads: Collection[HeadId], options: Refit
) -> SolvedRefit:
    """The weight of one module, and the shift of its bias, that make up for the removal of `heads`."""
    weight, columns, affine = projection.weight, projection.columns(heads), projection.has_bias or options.add_bias
    refit = compensation(options.method, weight, columns, moments, affine=affine, share=options.share)
    removal = SolvedRefit(weight.index_fill(1, columns, 0.0), torch.zeros_like(refit.shift))
    return interpolate(removal, refit, options.strength)


class RefittedCopy:
    """A copy of a model, of the same size and type, with some output projections of its own; mixings are folded.

    It shares all other weights with the intact model, so only `put` may write into it.
    """

    def __init__(self, checkpoint: Checkpoint, projections: Collection[OutputProjection]) -> None:
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
        """A copy with these refits; without any it computes the same bit for bit."""
        copy = cls(checkpoint, [module.projection for module in refits])
        for module in refits:
            copy.put(module.projection, module.refit)
        return copy

    @torch.no_grad()
    def put(self, projection: OutputProjection, refit: SolvedRefit) -> None:
        """Set one projection to its refit; a bias is added where it has none and the refit shifts."""
        owner = self.model.get_submodule(projection.owner)
        weight, matrix = owner.get_parameter("weight"), refit.weight / projection.slices.gate
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


FEWEST = 8
"""The fewest sentences to refit on."""
HELD_OUT = 200
"""The most sentences that are held out of a text; a fifth of it, where that is less."""


@dataclass(frozen=True)
class CalibrationText:
    """A calibration text, and a held-out one to measure on."""

    calibration: Corpus
    held_out: Corpus


def split_text(corpus: Corpus, valid: Corpus | None, *, sentences: int) -> CalibrationText:
    """The first `sentences` of a corpus to calibrate on; `valid` is held out, else the last fifth, at most 200."""
    held_out = min(HELD_OUT, corpus.count // 5) if valid is None else 0
    calibration = corpus.first(min(sentences, corpus.count - held_out))
    if calibration.count < FEWEST:
        raise DataError(
            f"too few to refit on: {calibration.count} of {corpus.name}, {held_out} held out; give {FEWEST} sentences"
        )
    return CalibrationText(calibration, corpus.after(corpus.count - held_out) if valid is None else valid)


@dataclass(frozen=True)
class Compensated:
    """A checkpoint of the same size whose output projections make up for `heads` that are masked.

    `refits` has every module that changed, `performance` the objective of the "intact", the "removed" and the
    "refitted" model on held-out text. `choice` compares candidates on a second text too (None: nothing was refitted).
    """

    checkpoint: Checkpoint
    options: Refit
    text: CalibrationText
    refits: Sequence[ModuleRefit]
    performance: dict[str, Performance]
    seconds: float
    choice: Choice | None = None
    anchor_digest: str = ""

    def record(self) -> dict[str, Any]:
        """The entry of `pruning.json`; errors are shares of the energy of a module's output."""
        has_choice = self.choice is not None and len(self.choice.candidates) > 2  # more than masking and one refit
        return {
            "method": self.options.method,
            "damping": self.options.share,
            "anchor": anchor_name(self.options.anchor) or "none",
            "sequential": self.options.sequential,
            "feed_forward": self.options.feed_forward,
            "strength": self.options.strength,
            "calibration": {"text": self.text.calibration.name, "sentences": self.text.calibration.count},
            "held_out": {"text": self.text.held_out.name, "sentences": self.text.held_out.count},
            "lines": line_digests(self.text.calibration, *([self.text.held_out] if has_choice else [])),
            "performance": {name: asdict(performance) for name, performance in self.performance.items()},
            "choice": None if self.choice is None else self.choice.record(),
            "modules": [
                {
                    "module": refit.projection.owner,
                    "layers": [f"{site}.{layer}" for site, layer in refit.projection.site_layers],
                    **{name: getattr(refit, name) for name in ("affine", "residual", "error", "error_without")},
                    "lambda": refit.refit.damping,
                    "raised": refit.refit.times_raised,
                }
                for refit in self.refits
            ],
            "seconds": round(self.seconds, 3),
        }

    def signature(self) -> dict[str, str]:
        """The entries that shape the weights, for the signature of a removal."""
        if self.options.method == "none":
            return {}
        text = self.text.calibration
        anchor = anchor_name(self.options.anchor)
        parts = self.options.parts(f"anchor={anchor}{self.anchor_digest[:8]}" if anchor else "")
        return {
            "compensate": "-".join(parts),
            "damping": f"{self.options.share:g}",
            "calibration": f"{text.digest[:8]}x{text.count}",
        }

    def remarks(self) -> list[str]:
        """Remarks on refits that are not what the options suggest."""
        linear = [refit for refit in self.refits if not refit.affine]
        damped_more = [refit for refit in self.refits if refit.refit.times_raised]
        without_residual = [refit for refit in self.refits if self.options.sequential and not refit.residual]
        remarks = [self.choice.warning] if self.choice is not None and self.choice.warning else []
        if without_residual:
            which = f"{len(without_residual)} of {len(self.refits)} attention modules"
            remarks.append(f"{which} are refitted to their own outputs only: something else reads these first")
        if linear and self.options.method == "least-squares":
            which = f"{len(linear)} of {len(self.refits)} output projections"
            remarks.append(f"{which} have no bias, and this export adds none: their refit is linear")
        if damped_more:
            powers = max(refit.refit.times_raised for refit in damped_more)
            remarks.append(
                f"moments of {len(damped_more)} modules are singular: damping was raised up to 10^{powers} times"
            )
        return remarks


SMALLEST = 1e-12
"""A damage below this counts as none."""


@dataclass(frozen=True)
class Candidate:
    """Options of a refit, and the performance of the model with it on held-out text and on a second text (`check`)."""

    options: Refit
    held_out: Performance
    check: Performance

    @property
    def name(self) -> str:
        """`least-squares, sequential, anchor mixed, damping 0.1, strength 0.5`."""
        anchor = anchor_name(self.options.anchor)
        damping = f"damping {self.options.share:g}" if self.options.method == "least-squares" else ""
        return ", ".join(self.options.parts(f"anchor {anchor}" if anchor else "", damping, mark=" "))

    def harms(self, masked: Candidate) -> tuple[float, float]:
        """Its damage on both texts divided by masking's; 0 where neither is worse than the intact model."""
        return (share(self.held_out.damage, masked.held_out.damage), share(self.check.damage, masked.check.damage))

    def record(self, masked: Candidate) -> dict[str, Any]:
        record: dict[str, Any] = {"name": self.name}
        for text, harm in zip(("held_out", "check"), self.harms(masked), strict=True):
            performance: Performance = getattr(self, text)
            record[text] = {"value": performance.value, "damage": performance.damage, "harm": harm}
        return record


@dataclass(frozen=True)
class Choice:
    """The compared candidates, "none" first, and the chosen one."""

    candidates: Sequence[Candidate]
    best: Candidate
    text: str
    baseline: str = "masking"

    @property
    def masked(self) -> Candidate:
        return self.candidates[0]

    @property
    def warning(self) -> str:
        """A warning if the chosen refit is worse on the second text than masking and than the intact model; else ""."""
        refitted, masked = self.best.check, self.masked.check
        if self.best.harms(self.masked)[1] <= 1:
            return ""
        return (
            f"{self.best.name} is worse than {self.baseline} on other text: {refitted.objective} "
            f"{refitted.value:.4f} against {masked.value:.4f} on {masked.sentences} sentences ({self.text}); "
            f"{flag.compensate} auto takes what harms least"
        )

    def record(self) -> dict[str, Any]:
        """The entry of `pruning.json`; the harm of masking is 1, or 0 where it costs nothing."""
        return {
            "text": self.text,
            "sentences": self.masked.check.sentences,
            "objective": self.masked.check.objective,
            "taken": self.best.name,
            "candidates": [candidate.record(self.masked) for candidate in self.candidates],
        }


def share(damage: float, masked: float) -> float:
    """A damage divided by that of masking (`masked`): 0 if neither damages, more than 1 if only masking does not."""
    if masked > SMALLEST:
        return damage / masked
    if damage <= SMALLEST:
        return 0.0
    return 1 + (damage - masked) / max(abs(masked), SMALLEST)


def best_candidate(candidates: Iterable[Candidate], masked: Candidate) -> Candidate:
    """The candidate with the least harm on the worse of both texts; ties go to the smallest summed damage.

    The harm of masking is at most 1, so a gain by masking on one text does not outweigh its loss on the other.
    """
    return min(candidates, key=lambda one: (max(one.harms(masked)), one.held_out.damage + one.check.damage))
