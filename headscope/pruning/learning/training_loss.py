"""What gates and models learn by: the cross-entropy of labels, or the distance to the intact model."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from headscope.attribution.objectives.base import OBJECTIVES, Objective, choose_objective, precise
from headscope.data.corpus import Corpus
from headscope.data.encoded import IGNORED, Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.model.attention import untapped
from headscope.model.native.transformer import Transformer
from headscope.model.stored_weights import why_not_changed
from headscope.pruning.learning.training_examples import check_sides
from headscope.training.losses import smoothed_cross_entropy

QUANTITIES = ("nll", "damage")


class PruningLoss(ABC):
    """The loss of a batch. `quantity` is what records call the number that is measured, `title` what a user reads."""

    quantity: ClassVar[str]
    supervised: ClassVar[bool]

    @property
    @abstractmethod
    def title(self) -> str:
        """What the measured number is."""

    @abstractmethod
    def of(self, checkpoint: Checkpoint, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """What is learnt by, what is measured (without gradient), each summed over `count` predictions."""


@dataclass(frozen=True)
class LabelLoss(PruningLoss):
    """Label-smoothed cross-entropy of tokens, of hidden tokens, or of the labels of a classifier."""

    smoothing: float = 0.0
    what: str = "token"
    quantity = "nll"
    supervised = True

    @property
    def title(self) -> str:
        return f"-log p of a {self.what}"

    def of(self, checkpoint: Checkpoint, batch: Batch) -> tuple[Tensor, Tensor, int]:
        return batch_loss(checkpoint, batch, smoothing=self.smoothing)


@dataclass(frozen=True)
class Distillation(PruningLoss):
    """The damage by an objective that compares states with those of a teacher, the intact model; needs no labels."""

    objective: Objective
    teacher: Checkpoint
    quantity = "damage"
    supervised = False

    @property
    def title(self) -> str:
        return f"damage to the {self.objective.name}"

    def of(self, checkpoint: Checkpoint, batch: Batch) -> tuple[Tensor, Tensor, int]:
        with torch.no_grad(), untapped():
            intact = self.objective.outcome(self.teacher, batch)
        altered = self.objective.outcome(checkpoint, batch, intact.aim)
        damage = self.objective.damage(intact, altered).sum()
        return damage, damage.detach(), int(intact.counts.sum())


def training_loss(
    checkpoint: Checkpoint, corpus: Corpus, *, objective: str, smoothing: float | None, learns: bool, seed: int
) -> PruningLoss:
    """The loss by an objective ("" for what fits the model); where something `learns`, the teacher is a copy.

    `smoothing` None is 0.1 for translation, else 0. ConfigError as of `training_objective`, and for label smoothing
    where there are no labels.
    """
    name = training_objective(objective, checkpoint, corpus)
    if name == "loss":
        what = {"classes": "class", "tags": "tag"}.get(checkpoint.predicts, "token")
        return LabelLoss(default_smoothing(checkpoint) if smoothing is None else smoothing, what)
    if smoothing:
        raise ConfigError(f"--label-smoothing {smoothing:g}: {name} is learnt without labels; leave it out")
    copied = learns and why_not_changed(checkpoint.model) is None  # what cannot learn is its own teacher
    teacher = checkpoint.with_model(copy.deepcopy(checkpoint.model).eval()) if copied else checkpoint
    return Distillation(OBJECTIVES.get(name)(seed=seed), teacher)


def training_objective(name: str, checkpoint: Checkpoint, corpus: Corpus) -> str:
    """The objective that gates learn by: `name`, or where it is empty the loss, without a head `representation`.

    ConfigError where it does not apply, or nothing can be learnt by it, and as of `check_sides`.
    """
    check_sides(checkpoint, corpus)
    if name:
        choose_objective(name, checkpoint, **corpus.comes_with)
        if not OBJECTIVES.get(name).trains:
            fitting = [
                known
                for known, cls in OBJECTIVES
                if cls.trains and cls.applies(checkpoint, **corpus.comes_with) is None
            ]
            raise ConfigError(f"--objective {name}: nothing is learnt by it; choose {' or '.join(fitting)}")
        return name
    if checkpoint.predicts == "nothing":
        return "representation"
    if why := OBJECTIVES.get("loss").applies(checkpoint, **corpus.comes_with):
        raise ConfigError(
            f"a model of type {checkpoint.model_type!r} {why}; without it gates learn by --objective representation"
        )
    return "loss"


def default_smoothing(checkpoint: Checkpoint) -> float:
    """The label smoothing that suits a checkpoint: 0.1 for translation, else 0."""
    return 0.1 if checkpoint.needs_target else 0.0


def batch_loss(checkpoint: Checkpoint, batch: Batch, *, smoothing: float) -> tuple[Tensor, Tensor, int]:
    """Label-smoothed cross-entropy, -log p (without gradient), each summed over tokens, and how many there are.

    The vocabulary's logits are made for tokens that are asked for alone in native models.
    """
    assert batch.labels is not None
    labelled = batch.labels != IGNORED
    labels = batch.labels[labelled]
    if isinstance(checkpoint.model, Transformer):
        model, states = checkpoint.model, checkpoint.states(batch)[labelled]
        states = states if model.before_output is None else model.before_output(states)
        weight, bias = model.output.weight, model.output.bias
        loss, nll = smoothed_cross_entropy(states, weight, bias, labels, smoothing=smoothing)
        return loss, nll, len(labels)
    logits = checkpoint.logits(batch)[labelled]
    logits = precise(logits)
    loss = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    with torch.no_grad():
        nll = loss if smoothing == 0 else nn.functional.cross_entropy(logits, labels, reduction="sum")
    return loss, nll.detach(), len(labels)
