"""A training run, as variants see it: model, optimizer, data and position, and the gradients of one update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.data.encoded import IGNORED, Batch
from headscope.distributed import Processes
from headscope.errors import TrainingError, flag
from headscope.formats.transformer_checkpoint import final_states
from headscope.model.native.transformer import Transformer
from headscope.training.config import TrainConfig, TrainingPosition, rate
from headscope.training.losses import Sums, smoothed_cross_entropy
from headscope.training.prepare import Prepared, collate, plan_lengths

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
MIN_SCALE = 1e-4  # of the loss in fp16: gradients that overflow at a smaller scale are NaN or infinite themselves


class TrainingLoss(nn.Module):
    """The label-smoothed cross-entropy of a batch, and its -log p, both sums over target tokens."""

    def __init__(self, model: Transformer, *, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing
        self.extra: Any = None

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The criterion (in training with the extra loss), and Σ -log p in nats."""
        assert batch.labels is not None
        states, has_label = final_states(self.model, batch), batch.labels != IGNORED
        loss, nll = self.sums(states[has_label], batch.labels[has_label])
        extra = self.extra(batch) if self.training and self.extra is not None else None
        return loss if extra is None else loss + extra.to(loss.dtype), nll

    def sums(self, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The label-smoothed cross-entropy and -log p of labels [n] after states [n d], summed."""
        output, smoothing = self.model.output, self.smoothing if self.training else 0.0
        states = states if self.model.before_output is None else self.model.before_output(states)
        return smoothed_cross_entropy(states, output.weight, output.bias, labels, smoothing=smoothing)


@dataclass
class TrainingRun:
    """The parts of a training run.

    `model` is never wrapped; `criterion` is, for several processes. `variant` is a `headscope.training.variant.Variant`
    (not imported here, because its file imports this one). `generator` is for the variant's random numbers: on the CPU,
    the same in every process, and part of the saved state. `has_stepped`: an optimizer has made a step in this update.
    """

    config: TrainConfig
    variant: Any
    model: Transformer
    criterion: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    processes: Processes
    data: Prepared
    generator: torch.Generator
    position: TrainingPosition
    has_stepped: bool = False

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters of the main optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def gradients(self, batches: Sequence[Batch]) -> Sums:
        """Run forward and backward for each micro-batch; gradients are summed over processes, per target token.

        They are added to existing gradients. TrainingError where the criterion is NaN or infinite.
        """
        tokens = self.processes.sum([float(sum(batch.predictions for batch in batches))])[0]
        total = Sums()
        for number, batch in enumerate(batches):
            last = number + 1 == len(batches)  # processes exchange gradients once, after the last micro-batch
            is_parallel = isinstance(self.criterion, nn.parallel.DistributedDataParallel)
            with self.criterion.no_sync() if is_parallel and not last else nullcontext():  # type: ignore[operator]
                with self.autocast():
                    loss, nll = self.criterion(batch)
                self.scaler.scale(loss * (self.processes.world / max(tokens, 1.0))).backward()
            total = total.plus(Sums(float(loss.detach()), float(nll), batch.predictions, len(batch.indices)))
        loss_sum, nll_sum, *counts = self.processes.sum([float(value) for value in total])
        total = Sums(loss_sum, nll_sum, *map(round, counts))
        if not math.isfinite(total.loss):
            raise TrainingError(self._failure_message("the loss", total.loss, batches))
        return total

    def autocast(self) -> AbstractContextManager[Any]:
        """A context of half precision if `--precision` is bf16 or fp16."""
        dtype = AUTOCAST.get(self.config.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def update(self, batches: Sequence[Batch]) -> tuple[Sums, float]:
        """Make one update: the variant's step, the scheduled learning rate, clipping; returns sums and the norm."""
        self.model.zero_grad()  # all parameters, also those that the main optimizer does not train
        self.criterion.train()
        self.has_stepped = False
        sums: Sums = self.variant.step(self, batches, self.gradients)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.config, self.position) * group.get("scale", 1.0)
        norm = self.descend(self.optimizer, batches, clip=self.config.clip)
        if self.has_stepped and self.scaler.is_enabled():
            self.scaler.update()
            if (scale := self.scaler.get_scale()) < MIN_SCALE:
                raise TrainingError(
                    self._failure_message("the scale of the loss, lowered at every overflow,", scale, batches)
                )
        return sums, norm

    def descend(self, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], *, clip: float = 0.0) -> float:
        """Make a step of an optimizer by the existing gradients; returns their norm, 0 if there are none.

        A scaled gradient that overflowed makes no step (the norm is then NaN or infinite), and `update` lowers the
        scale. TrainingError for such a norm where the loss is not scaled.
        """
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        if not parameters:
            return 0.0  # GradScaler cannot step without gradients
        self.scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if not math.isfinite(float(norm)) and not self.scaler.is_enabled():
            raise TrainingError(self._failure_message("the gradient's norm", float(norm), batches))
        if clip:
            nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        self.scaler.step(optimizer)
        self.has_stepped = True
        return float(norm)

    def validation(self) -> Iterator[Batch]:
        """Batches of the validation sentences in a fixed order, on the run's device."""
        pairs = self.data.valid
        if pairs is not None:
            for numbers in plan_lengths(*pairs.lengths(), tokens=self.config.max_tokens, chance=None):
                yield collate(pairs, numbers).to(self.device)

    @torch.no_grad()
    def measure(self, batch: Batch) -> Sums:
        """The criterion of a batch without dropout, smoothing and extra loss; a single process may call this."""
        self.criterion.eval()
        with self.autocast():
            loss, nll = getattr(self.criterion, "module", self.criterion)(batch)
        return Sums(float(loss), float(nll), batch.predictions, len(batch.indices))

    def _failure_message(self, quantity: str, value: float, batches: Sequence[Batch]) -> str:
        """The message of a number that is not finite: where it was, what is saved, and what may help."""
        lines = [number + 1 for batch in batches for number in batch.indices.tolist()]
        line_list = ", ".join(map(str, lines[:5])) + (f" and {len(lines) - 5} more" if len(lines) > 5 else "")
        position, last = self.position, self.config.out / "last"
        location = f"update {position.update + 1} (epoch {position.epoch}, batch {position.update_in_epoch + 1}"
        checkpoint = f"{last} is from before it" if last.is_dir() else "no checkpoint was written before it"
        advice = f"take a lower {flag.lr}, a longer {flag.warmup}, {flag('clip', 1)}, or {flag.precision} bf16"
        return f"{quantity} is {value:g} in {location}, training lines {line_list}); {checkpoint}; {advice}"
