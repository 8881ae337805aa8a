"""A matrix per attention module that mixes its heads (Azov & Landau, MHR: "alphas" and their growth loss)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from headscope.config import NoOptions, option
from headscope.errors import ConfigError, flag, raise_first
from headscope.heads import Site
from headscope.training.config import TrainingPosition
from headscope.training.variant import Gradients, Variant, per_site, variant

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.data.encoded import Batch
    from headscope.model.native.transformer import Transformer
    from headscope.model.native.transformer_config import TransformerConfig
    from headscope.training.losses import Sums
    from headscope.training.run_state import TrainingRun

MIXING = "alpha.v1"
GAMMA = 0.01  # the published 40 is for a loss summed over the tokens of a batch: about 4000


@dataclass(frozen=True)
class MixingOptions(NoOptions):
    """Options of `mixing`."""

    gamma: float | None = option(
        None, f"Weight of the growth loss, per token; default {GAMMA}; compat fork: per batch.", minimum=0, common=True
    )
    start_after: float = option(
        0.31,
        "Share of the run before matrices train; compat fork: of its 40 epochs.",
        minimum=0,
        maximum=1,
        common=True,
    )
    radius: float = option(
        1e-4, "Growth radius; without gradient, it changes the reported loss only.", needs="compat=fork"
    )
    ratios: tuple[float, ...] = option(
        (1.0,), "Factors of the growth loss: one, or three for encoder-self, decoder-self, cross; 0 freezes a site."
    )
    norm_cap: float | None = option(
        None, "Push a matrix no further than N times its nuclear norm at the identity; default: no end.", above=0
    )
    compat: Literal["none", "fork"] = option(
        "none", "fork: the constants and quirks of the published program.", common=True
    )

    def __post_init__(self) -> None:
        like_fork, lowest = self.compat == "fork", min(per_site(flag.ratios, self.ratios).values())
        problems = {
            f"{flag.ratios} must not be negative": lowest < 0,
            f"{flag.compat} fork trains no matrix without {flag.gamma} (published: 40); give it": (
                like_fork and self.gamma is None
            ),
            f"{flag.norm_cap} is not in the fork; leave it out, or take {flag.compat} none": (
                like_fork and self.norm_cap is not None
            ),
        }
        raise_first(ConfigError, problems)


@variant
class LinearMixing(Variant):
    """Matrices are the identity until the window opens; from then on loss and growth loss train them.

    By default the window opens after a share of the run's planned length, which `--resume` does not change. The growth
    loss is gamma times the sum over matrices, added to the mean loss of a token; matrices have no weight decay.

    With `compat` "fork" the growth loss is added to the summed loss of each micro-batch, and matrices have weight
    decay. The window opens after a share of 40 epochs of 160,239 sentences (50 epochs for the first batch of an epoch),
    counted in the last micro-batch of each update in one process. Unlike the fork's, this count survives a restart.

    Matrices outside the window, and those of a site with ratio 0, have no gradient, so their moments in Adam begin when
    the window opens.
    """

    name = "mixing"
    summary = "A matrix that mixes the heads of each attention module, made to grow (MHR)."
    Options = MixingOptions
    decides = ("how heads are mixed",)
    state = ("sentences", "n_trained")

    sentences = n_trained = 0
    is_open = False
    matrices: dict[Site, list[Tensor]]

    @property
    def ratios(self) -> dict[Site, float]:
        """Factors of the growth loss by site."""
        return per_site(flag.ratios, self.options.ratios)

    def shape(self, config: TransformerConfig) -> TransformerConfig:
        return config.with_stacks(
            lambda stack: replace(
                stack, self_mixing=MIXING, cross_mixing=MIXING if stack.cross_heads else None, mixing_options={}
            )
        )

    def groups(self, model: Transformer) -> list[dict[str, Any]]:
        alphas = [alpha for matrices in matrices_of(model).values() for alpha in matrices]
        if self.options.compat == "fork":
            return [{"params": list(model.parameters())}]
        alpha_ids = set(map(id, alphas))
        other_parameters = [parameter for parameter in model.parameters() if id(parameter) not in alpha_ids]
        return [{"params": other_parameters}, {"params": alphas, "weight_decay": 0.0}]

    def prepare(self, run: TrainingRun) -> None:
        self.matrices = matrices_of(run.model)

    def before_update(self, run: TrainingRun, position: TrainingPosition) -> None:
        from headscope.training.losses import fork_open

        if self.options.compat == "fork":
            first = position.update_in_epoch == 0
            self.is_open = fork_open(self.sentences, self.options.start_after, first_of_epoch=first)
        else:
            self.is_open = position.fraction >= self.options.start_after

    def step(self, run: TrainingRun, batches: Sequence[Batch], gradients: Gradients) -> Sums:
        sums = gradients(batches)
        self.sentences += len(batches[-1].indices)
        for site, matrices in self.matrices.items():
            if not (self.is_open and self.ratios[site]):
                for alpha in matrices:
                    alpha.grad = None
        return sums

    def after_update(self, run: TrainingRun, position: TrainingPosition) -> None:
        self.n_trained += self.is_open and any(self.ratios[site] for site in self.matrices)

    def extra_loss(self, run: TrainingRun, batch: Batch) -> Tensor | None:
        from headscope.training.losses import growth_loss

        options, ratios, like_fork = self.options, self.ratios, self.options.compat == "fork"
        if not self.is_open or not any(ratios[site] for site in self.matrices):
            return None
        gamma, radius = GAMMA if options.gamma is None else options.gamma, options.radius if like_fork else 0.0
        loss = growth_loss(self.matrices, gamma=gamma, ratios=ratios, radius=radius, cap=options.norm_cap)
        return loss if like_fork else loss * batch.predictions

    def remarks(self, run: TrainingRun, *, has_ended: bool) -> list[str]:
        """A remark where no matrix is trained, because all ratios are 0 or the window does not open."""
        from headscope.training.losses import FORK_EPOCHS, FORK_SENTENCES

        after, position, epochs = self.options.start_after, run.position, run.config.epochs
        never = not any(self.ratios[site] for site in self.matrices)
        if self.options.compat == "fork":
            opening = round(after * FORK_SENTENCES * FORK_EPOCHS)
            stays_closed = epochs is not None and len(run.data.train) * epochs <= opening
        else:
            planned_length = (position.epochs_planned, position.updates_planned)
            stays_closed = after == 1 and planned_length == (epochs, run.config.updates)
        if self.n_trained or not (never or has_ended or stays_closed):
            return []
        why = f"{flag.ratios} are 0 here" if never else f"the run ends before {flag.start_after} opens them"
        return [f"the matrices are not trained: {why}"]

    def history(self, run: TrainingRun) -> dict[str, float]:
        """Whether the window is open; per site the mean nuclear norm over h and the mean off-diagonal share."""
        from headscope.training.losses import nuclear_norms, off_diagonal

        values = {"window": float(self.is_open)}
        for site, matrices in self.matrices.items():
            norms = [
                float(norm.detach()) / len(alpha) for norm, alpha in zip(nuclear_norms(matrices), matrices, strict=True)
            ]
            values[f"nuclear_norm.{site}"] = sum(norms) / len(norms)
            values[f"off_diagonal.{site}"] = sum(map(off_diagonal, matrices)) / len(matrices)
        return values


def matrices_of(model: Transformer) -> dict[Site, list[Tensor]]:
    """The mixing matrices [h h] of every site, in the order of layers, without layers that have no heads."""
    from headscope.model.mixing.base import head_matrices

    matrices: dict[Site, list[Tensor]] = {}
    for (site, _), matrix in head_matrices(model).items():
        matrices.setdefault(site, []).append(matrix)
    return matrices
