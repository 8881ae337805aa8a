"""Fine-tune checkpoints of every format, with or without gates on their heads.

One update is one batch: a forward pass with the gates of that pass, the mean loss of a prediction plus the gates'
penalty, a backward pass, and a step of Adam, with a learning rate for the model and one for the gates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headscope.data.corpus import check_predictions
from headscope.distributed import ALONE, Processes, random_state, set_random_state
from headscope.errors import ConfigError, NumericalError, TrainingError, flag, restate
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site, SiteLayer
from headscope.model.discovery import eval_mode
from headscope.model.mixing.base import mixings_of
from headscope.model.native.transformer import Transformer
from headscope.model.stored_weights import why_not_changed
from headscope.model.taps import close_gates, frozen_parameters, gated
from headscope.pruning.learning.examples import LabelLoss, PruningLoss, TrainingExamples
from headscope.pruning.learning.learner import GateLearner
from headscope.pruning.options.shared import Freeze
from headscope.training.prepare import Numbers

BETAS, ADAM_EPSILON = (0.9, 0.98), 1e-9
POSITION = ("update", "epoch", "position")
HELD_OUT = 0  # the epoch number from which hidden tokens of held-out text are drawn


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe for fine-tuning. Rates rise linearly within `warmup` updates; `gate_lr` is that of gates.

    The schedule "linear" falls to 0 at the last update. `clip` is the largest norm of the model's gradient (0: no
    limit), `tokens` the positions of a batch.
    """

    updates: int
    lr: float
    gate_lr: float = 0.1
    schedule: Literal["constant", "linear"] = "constant"
    warmup: int = 0
    clip: float = 1.0
    tokens: int = 2048
    seed: int = 1

    def factor(self, update: int) -> float:
        """The factor of the learning rate at update number `update`, from 0."""
        warmup_factor = min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0
        if self.schedule == "constant":
            return warmup_factor
        return warmup_factor * max(0.0, 1 - update / max(self.updates, 1))


@dataclass
class Tuner:
    """Fine-tunes a checkpoint in place, by `run`.

    The `learner` learns gates, or `closed_heads` stay closed. Several `processes` share the sentences of every batch,
    add up their gradients and draw the same gates.
    """

    checkpoint: Checkpoint
    data: TrainingExamples
    recipe: Recipe
    parameters: Sequence[nn.Parameter]
    learner: GateLearner | None = None
    closed_heads: Sequence[HeadId] = ()
    loss: PruningLoss = field(default_factory=LabelLoss)
    processes: Processes = ALONE

    def __post_init__(self) -> None:
        self.update = self.epoch = self.position = 0
        self.gates: dict[SiteLayer, Tensor] = {}
        self.weights = [] if self.learner is None else [self.learner.weights]
        fuses = self.checkpoint.device.type in ("cpu", "cuda")
        groups: list[dict[str, Any]] = [
            {"params": [*self.parameters], "rate": self.recipe.lr, "fused": fuses or None},
            {"params": self.weights, "rate": self.recipe.gate_lr},
        ]
        self.optimizer = torch.optim.Adam(groups, betas=BETAS, eps=ADAM_EPSILON)

    def run(self, after: Callable[[int, float], None] = lambda update, nll: None) -> None:
        """Make all remaining updates; TrainingError where the loss is NaN or infinite."""
        with self._training():
            while self.update < self.recipe.updates:
                groups = self.data.plan(tokens=self.recipe.tokens, order=(self.recipe.seed, self.epoch))
                for numbers in groups[self.position :]:
                    nll = self._step(numbers)
                    self.update, self.position = self.update + 1, self.position + 1
                    if self.learner is not None:
                        self.learner.after_update()
                    if self.position == len(groups):
                        self.epoch, self.position = self.epoch + 1, 0
                    after(self.update, nll)
                    if self.update >= self.recipe.updates:
                        return

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Within the block the model is in training mode, has the gates, and only trained parameters get gradients."""
        model = self.checkpoint.model
        fixed = close_gates(self.closed_heads, self.checkpoint.layout)
        self.gates = {} if self.learner is None else self.learner.gating.spread(self.learner.gates())
        with eval_mode(model), frozen_parameters(model), gated(model, fixed or self.gates):
            model.train()
            for parameter in self.parameters:
                parameter.requires_grad_()
            try:
                yield
            finally:
                model.zero_grad()

    def _step(self, numbers: Numbers) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * self.recipe.factor(self.update)
        penalty = None
        if self.learner is not None:
            dtype = torch.float64 if self.checkpoint.dtype == torch.float64 else torch.float32
            gates = self.learner.training_gates().to(self.checkpoint.device, dtype)
            self.gates.update(self.learner.gating.spread(gates))
            penalty = self.learner.penalty()
        problem, loss, total_measure, count = None, None, 0.0, 0
        own_numbers = numbers[self.processes.rank :: self.processes.world]
        try:
            if len(own_numbers):
                batch = self.data.batch(own_numbers, seed=self.recipe.seed, epoch=self.epoch + 1)
                with restate(TrainingError, f"update {self.update + 1}: {{why}}, or a lower {flag.lr}", NumericalError):
                    loss, measure, count = self.loss.of(self.checkpoint, batch.to(self.checkpoint.device))
                self._check("the loss", loss)
                total_measure = float(measure)
        except TrainingError as error:
            problem = error
        n_problems, total_measure, total = self.processes.sum([float(problem is not None), total_measure, float(count)])
        if n_problems:
            raise next(error for error in self.processes.all(problem) if error is not None)
        if loss is not None and count and loss.requires_grad:
            (loss / total).backward()
        self.processes.sum_gradients([*self.parameters, *self.weights])
        if penalty is not None:
            penalty.backward()
        norm = self._norm(self.parameters)
        if self.recipe.clip:
            nn.utils.clip_grads_with_norm_(self.parameters, self.recipe.clip, norm)
        self._norm(self.weights)
        self.optimizer.step()
        return total_measure / max(total, 1)

    def _norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        self._check("the gradient's norm", norm)
        return norm

    def _check(self, quantity: str, value: Tensor) -> None:
        """Raise TrainingError, which advises a lower rate, for a number that is not finite."""
        if not math.isfinite(number := float(value.detach())):
            rates = [flag.lr] * bool(self.parameters) + [flag.gate_lr] * (self.learner is not None)
            raise TrainingError(
                f"{quantity} is {number} in update {self.update + 1}; take a lower {' or '.join(rates)}"
            )

    def state(self) -> dict[str, Any]:
        """The state from which the run can resume exactly; every process calls this."""
        state: dict[str, Any] = {
            **{name: getattr(self, name) for name in POSITION},
            "parameters": [parameter.detach() for parameter in self.parameters],
            "optimizer": self.optimizer.state_dict(),
            "random": self.processes.all(random_state(self.checkpoint.device)),
        }
        if self.learner is not None:
            state["weights"] = self.learner.weights.detach()
            state["learner"] = self.learner.state()
            state["generator"] = self.learner.generator.get_state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state`, as if the run had never stopped."""
        if len(state["random"]) != self.processes.world:
            raise ConfigError(f"{flag.resume}: the run has {len(state['random'])} processes; start that many")
        self.update, self.epoch, self.position = (int(state[name]) for name in POSITION)
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        set_random_state(state["random"][self.processes.rank], self.checkpoint.device)
        if self.learner is not None:
            with torch.no_grad():
                self.learner.weights.copy_(state["weights"])
            self.learner.restore(state["learner"])
            self.learner.generator.set_state(state["generator"])


@torch.no_grad()
def mean_loss(
    checkpoint: Checkpoint,
    data: TrainingExamples,
    *,
    tokens: int,
    seed: int,
    gates: Mapping[SiteLayer, Tensor] | None,
    loss: PruningLoss = LabelLoss(),  # noqa: B008  (frozen)
    processes: Processes = ALONE,
) -> float:
    """The mean measure of a loss (-log p in nats, or the damage to states) under fixed gates."""
    total, count = 0.0, 0
    model = checkpoint.model
    with eval_mode(model), gated(model, gates or {}):
        for numbers in data.plan(tokens=tokens)[processes.rank :: processes.world]:
            batch = data.batch(numbers, seed=seed, epoch=HELD_OUT).to(checkpoint.device)
            _, measure, predictions = loss.of(checkpoint, batch)
            total, count = total + float(measure), count + predictions
    total, n_predictions = processes.sum([total, float(count)])
    check_predictions(n_predictions, "the held-out text")
    return total / n_predictions


def trained_parameters(checkpoint: Checkpoint, freeze: Freeze) -> list[nn.Parameter]:
    """The parameters to train; gates that the checkpoint itself has are never among them.

    "decoder" freezes the decoder, so the encoder and its embeddings learn (Voita et al. 2019, §5.2), "encoder" the
    encoder, "model" all. A parameter that both sides use, such as shared embeddings, is frozen with either.
    """
    model: Any = checkpoint.model
    if freeze == "model":
        return []
    if why := why_not_changed(model):
        raise ConfigError(f"{checkpoint.path}: {why}, so they do not learn; gates do ({flag('freeze', 'model')})")
    gates = [mixing for _, _, mixing in mixings_of(model) if mixing.gates() is not None]
    gate_ids = {id(parameter) for mixing in gates for parameter in mixing.parameters()}
    parameters = [parameter for parameter in model.parameters() if id(parameter) not in gate_ids]
    if freeze == "none":
        return parameters
    if not checkpoint.two_sided:
        raise ConfigError(f"{flag('freeze', freeze)}: this model has one side only; choose none or model")
    encoder: Any = model.encoder if isinstance(model, Transformer) else model.get_encoder()
    encoder_modules, encoder_ids = ({*map(id, parts)} for parts in (encoder.modules(), encoder.parameters()))
    if freeze == "encoder":
        return [parameter for parameter in parameters if id(parameter) not in encoder_ids]
    for part in model.modules():
        if id(part) not in encoder_modules:  # also used outside of the encoder
            encoder_ids -= {*map(id, part.parameters(recurse=False))}
    return [parameter for parameter in parameters if id(parameter) in encoder_ids]


def default_freeze(checkpoint: Checkpoint, sites: set[Site]) -> Freeze:
    """The part that is frozen by default, as in the paper: the decoder if only encoder heads are gated, else none."""
    return "decoder" if checkpoint.two_sided and sites == {Site.ENCODER_SELF} else "none"
