"""A mixture of attentive experts, each with a subset of the heads (Peng, Schwartz, Li and Smith 2020, MAE)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from headscope.config import NoOptions, option
from headscope.config.option import flag_of
from headscope.errors import ConfigError, flag
from headscope.heads import SiteLayer
from headscope.training.variant import Gradients, Variant, variant

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from headscope.data.encoded import Batch
    from headscope.heads import Site
    from headscope.model.native.transformer import Transformer
    from headscope.model.native.transformer_config import StackConfig, TransformerConfig
    from headscope.training.config import TrainConfig
    from headscope.training.losses import Sums
    from headscope.training.run_state import TrainingRun

MIXING = "experts.v1"
GATE = ".mixing.gate."


@dataclass(frozen=True)
class MaeOptions(NoOptions):
    """Options of `mae`."""

    expert_heads: int = option(0, "Heads of an expert; 0: all but one (MAE-7 of 8 heads).", minimum=0, common=True)
    gate_hidden: int = option(
        0, "Hidden units of a gate; 0: half the model's width, at most 256.", minimum=0, maximum=2**18
    )
    gate_norm: Literal["auto", "batch", "layer", "none"] = option(
        "auto", "Norm of a gate's input: batch, layer or none; auto: batch in encoders, layer in decoders."
    )
    gate_dropout: float = option(0.1, "Dropout in a gate.", minimum=0, below=1)
    gate_scale: float = option(
        1.0, "How far apart new gates start, times Glorot's; 0: alike, and plain SGD may leave them so.", minimum=0
    )
    gate_window: int = option(
        0, "Decoders: a gate reads the mean of the last N positions; 0: of all so far.", minimum=0
    )
    gate_lr: float = option(1.0, "Learning rate of the gates' own SGD, without momentum and decay.", above=0)
    gate_every: int = option(5, "Gates are trained in every N-th epoch (G steps), counted from 1.", minimum=1)
    bcd: bool = option(
        True, "Block coordinate descent; --no-bcd (NoBCD): gates and rest jointly, soft mixture.", common=True
    )
    uniform: bool = option(False, "Uni-MAE: no gates; a training sentence takes any expert.", common=True)
    tune: Literal["none", "gates", "gates+output"] = option(
        "none", "Train only the gates of --init (FTG), or gates and output projections (FTG+).", common=True
    )

    def __post_init__(self) -> None:
        if sum((not self.bcd, self.uniform, self.tune != "none")) > 1:
            raise ConfigError(f"{flag('bcd', False)}, {flag.uniform} and {flag.tune} are three ways to train; give one")
        gate_options = (entry for entry in fields(self) if entry.name.startswith("gate_"))
        options_given = [flag_of(entry) for entry in gate_options if getattr(self, entry.name) != entry.default]
        if self.uniform and options_given:
            raise ConfigError(f"{options_given[0]} is about gates, and {flag.uniform} has none; leave one of them out")


NOTE_EVERY = 10
"""Updates between records of the gates' outputs, but no more than between lines of metrics."""


@variant
class Mae(Variant):
    """Block coordinate descent (Peng et al. 2020, Algorithm 1): G steps train gates, F steps the rest.

    In every `gate_every`-th epoch an update first makes a G step on its batches: soft mixture, plain SGD on the gates
    alone. Every update makes an F step: one expert for each sentence and module, drawn by responsibility, and the run's
    optimizer on everything but the gates. In F steps gates have no dropout and fixed batch norms; in G steps only gates
    have dropout (the paper does not say). Validation uses the soft mixture. The paper's warm-up is twice the baseline's
    (--warmup). With `tune`, SGD trains the gates and the run's optimizer the output projections, on the soft mixture.
    """

    name = "mae"
    summary = "A mixture of attentive experts: gates decide how much each expert counts (MAE)."
    Options = MaeOptions
    decides = ("how heads are mixed",)
    state = ("gate_steps", "notes")

    gates: list[nn.Parameter]
    sgd: torch.optim.SGD
    experts: dict[SiteLayer, int]
    """The number of experts of every module that has gates."""
    notes: dict[str, list[list[float]]]
    """By module, rows since the last line of metrics: mean entropy, and mean responsibility of each expert [1 + e]."""
    takes_notes, gate_steps = False, 0
    start: list[Tensor]
    """The gates' weights before the first update; a resumed run builds the same model again."""

    @property
    def alternates(self) -> bool:
        """Whether gates have steps of their own."""
        return self.options.bcd and not self.options.uniform

    def check(self, config: TrainConfig) -> None:
        if self.options.tune != "none" and config.init is None:
            raise ConfigError(f"{flag.tune} {self.options.tune} is for a trained model; name it with {flag.init}")

    def shape(self, config: TransformerConfig) -> TransformerConfig:
        """The architecture with experts, its own if it has them; ConfigError where the options do not fit its heads."""
        if all(stack.self_mixing == MIXING for stack in config.stacks):
            return config
        counts = [count for stack in config.stacks for count in (*stack.self_heads, *stack.cross_heads) if count > 1]
        if not counts:
            raise ConfigError(f"experts need layers with at least 2 heads; raise {flag.heads}, or choose {flag.init}")
        if self.options.expert_heads >= min(counts):
            limit = flag("expert_heads", min(counts) - 1)
            raise ConfigError(
                f"an expert has fewer heads than its layer, which has {min(counts)}; take at most {limit}"
            )
        encoder = None if config.encoder is None else mixture_modules(config.encoder, self.options, causal=False)
        return replace(config, encoder=encoder, decoder=mixture_modules(config.decoder, self.options, causal=True))

    def adapt(self, model: Transformer, *, fresh: bool) -> None:
        from torch import nn

        from headscope.model.mixing.experts import experts_of

        gates = any(GATE in name for name, _ in model.named_parameters())
        if gates is self.options.uniform:
            gateless = f"experts without gates; train it with {flag.uniform}"
            kind = f"gated experts; {flag.uniform} has no gates" if gates else gateless
            raise ConfigError(f"{flag.init} is a model of {kind}")
        for mixture in experts_of(model) if self.options.gate_scale else ():
            if mixture.gate is not None and not mixture.gate.outer.weight.any():
                nn.init.xavier_uniform_(mixture.gate.outer.weight, gain=self.options.gate_scale)

    def groups(self, model: Transformer) -> list[dict[str, Any]]:
        parameters = dict(model.named_parameters())
        gates = {name: parameter for name, parameter in parameters.items() if GATE in name}
        self.gates = list(gates.values())
        other_parameters = [parameter for name, parameter in parameters.items() if name not in gates]
        if self.options.tune != "none":
            outputs = [module.output for _, _, _, module in model.attention_modules()]
            weights = [weight for output in outputs for weight in output.parameters()]
            return [{"params": weights if self.options.tune == "gates+output" else []}]
        return [{"params": other_parameters if self.alternates else list(parameters.values())}]

    def prepare(self, run: TrainingRun) -> None:
        import torch

        from headscope.model.mixing.base import mixings_of
        from headscope.model.mixing.experts import Experts

        if self.gates:
            self.sgd = torch.optim.SGD(self.gates, lr=self.options.gate_lr)
        self.start, self.experts, self.notes = [gate.detach().clone() for gate in self.gates], {}, {}
        if self.options.tune != "none":
            trained_ids = {id(parameter) for parameter in (*self.gates, *run.trained_parameters)}
            for parameter in run.model.parameters():
                parameter.requires_grad_(id(parameter) in trained_ids)
        for site, layer, mixture in mixings_of(run.model):
            if isinstance(mixture, Experts) and mixture.gate is not None:
                self.experts[site, layer] = mixture.experts
                mixture.gate.register_forward_hook(partial(self._record, f"{site}.{layer}"))

    def step(self, run: TrainingRun, batches: Sequence[Batch], gradients: Gradients) -> Sums:
        from headscope.model.discovery import eval_mode
        from headscope.model.mixing.experts import expert_mode, experts_of
        from headscope.model.taps import frozen_parameters

        self.takes_notes = (run.position.update + 1) % min(NOTE_EVERY, run.config.log_every) == 0
        if not self.options.bcd:
            return gradients(batches)
        if self.options.tune != "none":
            sums = gradients(batches)
            self._descend(run, batches)
            return sums
        if not self.options.uniform and run.position.epoch % self.options.gate_every == 0:
            with frozen_parameters(run.model), eval_mode(run.model):
                for gate in self.gates:
                    gate.requires_grad_()
                for mixture in experts_of(run.model):
                    mixture.train()  # the other modules stay in evaluation mode
                gradients(batches)
            self._descend(run, batches)
            run.model.zero_grad()
        with expert_mode(experts_of(run.model), "sampled"):
            return gradients(batches)

    def _descend(self, run: TrainingRun, batches: Sequence[Batch]) -> None:
        """A step of plain SGD on the gates, skipped if its gradients overflowed in half precision."""
        if math.isfinite(run.descend(self.sgd, batches)):
            self.gate_steps += 1
        for gate in self.gates:
            gate.grad = None

    def _record(self, module: str, gate: nn.Module, inputs: tuple[Tensor, ...], log_gates: Tensor) -> None:
        """A forward hook on the gate of a `module`: note the mean entropy, and the mean responsibility of experts."""
        if self.takes_notes and gate.training:
            log_p = log_gates.detach().float()  # [b p e]
            real = inputs[1].to(log_p.dtype)[..., None]  # [b p 1]
            p, count = log_p.exp(), real.sum().clamp_min(1)
            entropy, shares = -(p * log_p * real).sum() / count, (p * real).sum(dim=(0, 1)) / count
            self.notes.setdefault(module, []).append([float(entropy), *shares.tolist()])

    def remarks(self, run: TrainingRun, *, has_ended: bool) -> list[str]:
        """A remark where no G step happens, because the run is too short or all gradients overflowed."""
        interval, last = self.options.gate_every, run.position.last_epoch if has_ended else run.config.epochs
        if not self.alternates or self.options.tune != "none" or self.gate_steps or last is None:
            return []
        if last < interval:
            timing = f"their first step is in epoch {interval} ({flag.gate_every}), and the run ends after epoch {last}"
            return [f"the gates are not trained: {timing}; lower it, or train more epochs ({flag.resume})"]
        return ["the gates were not trained: the gradients of all their steps overflowed"] if has_ended else []

    def history(self, run: TrainingRun) -> dict[str, float]:
        """Means over the gates since the previous line: entropy in nats, of all and by site, and responsibility.

        Also the number of G steps so far, and the distance of gate weights from their start, ‖w − w₀‖ / ‖w₀‖.
        """
        if self.options.uniform:
            return {}
        notes = {site_layer: self.notes.get(f"{site_layer[0]}.{site_layer[1]}", []) for site_layer in self.experts}
        entropies: dict[Site, list[float]] = {}
        for (site, _), rows in notes.items():
            entropies.setdefault(site, []).extend(row[0] for row in rows)
        values = {"gate_entropy": _mean([value for site_entropies in entropies.values() for value in site_entropies])}
        values |= {f"gate_entropy.{site}": _mean(site_entropies) for site, site_entropies in entropies.items()}
        values["gate_steps"] = float(self.gate_steps)
        values["gate_change"] = distance(self.gates, self.start)
        for (site, layer), experts in self.experts.items():
            for expert in range(experts):
                shares = [row[1 + expert] for row in notes[site, layer]]
                values[f"expert_share.{site}.{layer}.{expert}"] = _mean(shares)
        self.notes.clear()
        return values


def distance(weights: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """‖w − w₀‖ / ‖w₀‖ with all weights in one vector."""
    from torch.nn.utils import parameters_to_vector

    current, initial = (parameters_to_vector(parts).detach().double() for parts in (weights, start))
    return float((current - initial).norm() / initial.norm())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def mixture_modules(stack: StackConfig, options: MaeOptions, *, causal: bool) -> StackConfig:
    """The stack with attention modules that mix experts."""
    norm = ("layer" if causal else "batch") if options.gate_norm == "auto" else options.gate_norm
    settings: dict[str, str | int | float | bool] = {"size": options.expert_heads}
    if options.uniform:
        settings["uniform"] = True
    else:
        settings |= {"hidden": options.gate_hidden, "norm": norm, "dropout": options.gate_dropout}
        settings |= {"window": options.gate_window} if causal else {}
    cross = MIXING if stack.cross_heads else None
    return replace(stack, self_mixing=MIXING, cross_mixing=cross, mixing_options=settings)
