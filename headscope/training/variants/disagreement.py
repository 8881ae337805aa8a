"""Disagreement loss: the mean cosine between the outputs of a module's heads (Li et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headscope.config import NoOptions, option
from headscope.errors import ConfigError, flag
from headscope.heads import SITES, Site
from headscope.training.variant import Gradients, Variant, variant

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.data.encoded import Batch
    from headscope.model.attention import AttentionCall
    from headscope.training.losses import Sums
    from headscope.training.run_state import TrainingRun


@dataclass(frozen=True)
class DisagreementOptions(NoOptions):
    """Options of `disagreement`."""

    weight: float = option(
        1.0, "Weight of the mean cosine, per token; with --compat fork beside the summed loss.", minimum=0, common=True
    )
    sites: tuple[str, ...] = option(
        tuple(site.value for site in SITES), "Where heads disagree: encoder-self, decoder-self, cross.", common=True
    )
    compat: Literal["none", "fork"] = option(
        "none", "fork: the MHR program's --cosine-sim-loss, which divides by heads XOR 2.", common=True
    )

    def __post_init__(self) -> None:
        site_names = [site.value for site in SITES]
        if unknown := [name for name in self.sites if name not in site_names]:
            raise ConfigError(f"{flag.sites} {unknown[0]!r} is not known; choose from {', '.join(site_names)}")
        if not self.sites or (self.compat == "fork" and len(set(self.sites)) != len(SITES)):
            raise ConfigError(f"{flag.sites}: give at least one; with {flag.compat} fork all three take part")


@variant
class Disagreement(Variant):
    """Adds the mean cosine between the contexts of a module's heads to the loss.

    Per target token this is weight · mean over modules of the mean over positions (without padding) of
    (1/h²) Σ_ij cos(z_i, z_j). `compat` "fork" adds weight · Σ over sites of the mean over layers of
    Σ_b,ij (1 + cos) / (h XOR 2) to the summed loss of every micro-batch, with each sentence and its padding as one
    vector. Contexts are those before any mixing of heads.
    """

    name = "disagreement"
    summary = "A loss against similar outputs of a module's heads (Li et al. 2018)."
    Options = DisagreementOptions

    sites: dict[int, Site]
    contexts: list[tuple[Site, Tensor]]
    latest = float("nan")

    def prepare(self, run: TrainingRun) -> None:
        sites = {Site(name) for name in self.options.sites}
        modules = [(site, module) for site, _, _, module in run.model.attention_modules() if module.heads]
        self.sites = {id(module): site for site, module in modules if site in sites}
        if not self.sites:
            raise ConfigError(f"{flag.sites} {','.join(self.options.sites)}: the model has no heads there")
        if run.config.compile:
            raise ConfigError(f"disagreement looks at contexts, which {flag.compile} hides; leave one of them out")
        if self.options.compat == "fork":
            from headscope.training.losses import pad_like_the_fork

            pad_like_the_fork(run.model, run.data.source, run.data.target, fresh=run.config.init is None)

    def step(self, run: TrainingRun, batches: Sequence[Batch], gradients: Gradients) -> Sums:
        from headscope.model.attention import tap_contexts

        self.contexts = []
        with tap_contexts(self._record_call, before_mixing=True):
            return gradients(batches)

    def _record_call(self, call: AttentionCall, _: Tensor) -> None:
        site = self.sites.get(id(call.module))
        if site is not None:
            self.contexts.append((site, call.context))

    def extra_loss(self, run: TrainingRun, batch: Batch) -> Tensor | None:
        import torch

        from headscope.training.losses import fork_loss, mean_cosine

        contexts, self.contexts = self.contexts, []
        if self.options.compat == "fork":
            parts = [[context for context_site, context in contexts if context_site is site] for site in SITES]
            loss: Tensor = self.options.weight * fork_loss(*parts)
            self.latest = float(loss.detach())
            return loss
        cosines = [mean_cosine(context, batch.sides(site)[0].real) for site, context in contexts]
        mean = torch.stack(cosines).mean()
        self.latest = float(mean.detach())
        return mean * (self.options.weight * batch.predictions)

    def remarks(self, run: TrainingRun, *, has_ended: bool) -> list[str]:
        """A remark where the weight is 0, or where all modules have one head, so that there is no gradient."""
        if not self.options.weight:
            return [f"{flag.weight} 0 adds nothing to the loss"]
        modules = [module for _, _, _, module in run.model.attention_modules() if id(module) in self.sites]
        if all(module.heads == 1 for module in modules):
            return [f"the disagreement has no gradient: no attention module of {flag.sites} has two heads"]
        return []

    def history(self, run: TrainingRun) -> dict[str, float]:
        """`disagreement`: the mean cosine of the latest micro-batch (with --compat fork its loss)."""
        return {"disagreement": self.latest}
