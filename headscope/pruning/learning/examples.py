"""A text as a checkpoint of any format learns from it, and by what: labels, or the distance to the intact model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from headscope.attribution.objectives.base import OBJECTIVES, Objective, choose_objective
from headscope.data.batching import Omissions, add_labels, collate, encode_window
from headscope.data.corpus import Corpus
from headscope.data.encoded import IGNORED, Batch, Encoded
from headscope.errors import CheckpointError, ConfigError, DataError, flag, restate
from headscope.evaluation.likelihood import choose_hidden
from headscope.evaluation.opened import check_sides
from headscope.formats.base import Checkpoint
from headscope.model.attention import precise, without_taps
from headscope.model.native.transformer import Transformer
from headscope.model.stored_weights import why_not_changed
from headscope.training.prepare import Numbers, plan_lengths
from headscope.training.run_state import TrainingLoss

MASK_SHARE, SWAP_SHARE = 0.8, 0.1  # of the hidden tokens


class TrainingExamples:
    """A corpus as a model reads it, sentences cut at `limit` pieces a side, and what it must say (`with_labels`).

    `hiding` are the mask's id and ids that a hidden token may be swapped for, of what learns from hidden tokens, whose
    labels are made in each epoch anew. `n_truncated` counts sentences that were cut.
    """

    def __init__(self, checkpoint: Checkpoint, corpus: Corpus, *, limit: int, with_labels: bool = True) -> None:
        check_sides(checkpoint, corpus, target="the translations")
        hides = with_labels and checkpoint.predicts == "words" and not checkpoint.decodes
        self.checkpoint, self.digest, self.hiding = checkpoint, corpus.digest, None
        with restate(ConfigError, "{why}; text alone teaches it nothing", CheckpointError):
            self.hiding = (checkpoint.mask_id(), tuple(checkpoint.plain_ids(side="source"))) if hides else None
        if not corpus.count:
            raise DataError(f"{corpus.name} holds no sentence")
        omissions = Omissions()
        rows = encode_window(
            list(corpus), checkpoint, limit=limit, long="truncate", name=corpus.name, omissions=omissions
        )
        self.rows = add_labels(rows, checkpoint, limit) if with_labels and not hides else rows
        self.n_truncated = omissions.n_truncated

    def __len__(self) -> int:
        return len(self.rows)

    def plan(self, *, tokens: int, order: tuple[int, int] | None = None) -> list[Numbers]:
        """Batches of sentences of like length, in the order of a seed and an epoch, or in the given order."""
        source = np.array([len(row.source.ids) for row in self.rows])
        target = np.array([len((row.target or row.source).ids) for row in self.rows])
        chance = None if order is None else np.random.default_rng(order)
        return plan_lengths(source, target, tokens=tokens, chance=chance)

    def batch(self, numbers: Numbers, *, seed: int, epoch: int = 0) -> Batch:
        """A batch with labels; hidden tokens follow from seed, epoch and number of the sentence."""
        rows = [self.rows[int(number)] for number in numbers]
        batch = replace(collate(rows, 0, self.checkpoint, Omissions()), indices=torch.as_tensor(numbers))
        if self.hiding is None:
            return batch
        return _hidden(batch, [row.source for row in rows], *self.hiding, seed=seed, epoch=epoch)


def _hidden(
    batch: Batch, sources: list[Encoded], mask: int, plain_ids: Sequence[int], *, seed: int, epoch: int
) -> Batch:
    """15 % of the tokens are to be told; of these 80 % are masked, 10 % swapped (Devlin et al. 2019, appendix A.1)."""
    ids, labels = batch.source.ids.clone(), torch.full_like(batch.source.ids, IGNORED)
    for row, (number, source) in enumerate(zip(batch.indices.tolist(), sources, strict=True)):
        plain = [position for position, special in enumerate(source.special) if not special]
        positions = choose_hidden(plain, number, seed=seed + 7919 * epoch) if plain else []
        chance = np.random.default_rng([seed, epoch, number])
        for position, lot in zip(positions, chance.random(len(positions)), strict=True):
            labels[row, position] = ids[row, position]
            if lot < MASK_SHARE:
                ids[row, position] = mask
            elif lot < MASK_SHARE + SWAP_SHARE:
                ids[row, position] = plain_ids[int(chance.integers(len(plain_ids)))]
    return replace(batch, source=replace(batch.source, ids=ids), labels=labels)


@dataclass(frozen=True)
class LabelLoss:
    """Label-smoothed cross-entropy of tokens, of hidden tokens, or of the labels of a classifier."""

    smoothing: float = 0.0
    what: str = "token"
    quantity: ClassVar[str] = "nll"
    """What records call the number that is measured."""
    needs_labels: ClassVar[bool] = True

    @property
    def title(self) -> str:
        """The title of the measured number."""
        return f"-log p of a {self.what}"

    def of(self, checkpoint: Checkpoint, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """The training loss and the measured one (without gradient), each summed over `count` predictions.

        Native models make the vocabulary's logits for tokens that are asked for alone.
        """
        assert batch.labels is not None
        has_label, smoothing = batch.labels != IGNORED, self.smoothing
        labels = batch.labels[has_label]
        if isinstance(checkpoint.model, Transformer):
            states = checkpoint.states(batch)[has_label]
            return *TrainingLoss(checkpoint.model, smoothing=smoothing).sums(states, labels), len(labels)
        logits = precise(checkpoint.logits(batch)[has_label])
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
        with torch.no_grad():
            nll = loss if smoothing == 0 else nn.functional.cross_entropy(logits, labels, reduction="sum")
        return loss, nll.detach(), len(labels)


@dataclass(frozen=True)
class Distillation:
    """The damage by an objective that compares states with a teacher's, the intact model; needs no labels."""

    objective: Objective
    teacher: Checkpoint
    quantity: ClassVar[str] = "damage"
    needs_labels: ClassVar[bool] = False

    @property
    def title(self) -> str:
        return f"{self.objective.damage_words} to the intact model"

    def of(self, checkpoint: Checkpoint, batch: Batch) -> tuple[Tensor, Tensor, int]:
        with torch.no_grad(), without_taps():
            intact = self.objective.outcome(self.teacher, batch)
        damage = self.objective.damage(intact, self.objective.outcome(checkpoint, batch, intact.aim)).sum()
        return damage, damage.detach(), int(intact.counts.sum())


PruningLoss = LabelLoss | Distillation


def training_loss(
    checkpoint: Checkpoint, corpus: Corpus, *, objective: str, smoothing: float | None, learns: bool, seed: int
) -> PruningLoss:
    """The loss by an objective ("" for what fits the model); where something `learns`, the teacher is a copy."""
    name = training_objective(objective, checkpoint, corpus)
    if name == "loss":
        what = {"classes": "class", "tags": "tag"}.get(checkpoint.predicts, "token")
        usual = 0.1 if checkpoint.needs_target else 0.0
        return LabelLoss(usual if smoothing is None else smoothing, what)
    if smoothing:
        raise ConfigError(f"{flag('label_smoothing', f'{smoothing:g}')}: {name} is learnt without labels; leave it out")
    has_own_teacher = learns and why_not_changed(checkpoint.model) is None  # what cannot learn is its own teacher
    teacher = checkpoint.with_model(copy.deepcopy(checkpoint.model).eval()) if has_own_teacher else checkpoint
    return Distillation(OBJECTIVES.get(name)(seed=seed), teacher)


def training_objective(name: str, checkpoint: Checkpoint, corpus: Corpus) -> str:
    """The objective that gates learn by: `name`, or where it is empty the loss, without a head `representation`."""
    check_sides(checkpoint, corpus, target="the translations")
    if name:
        choose_objective(name, checkpoint, **corpus.comes_with)
        if not OBJECTIVES.get(name).trains:
            fitting = [candidate for candidate, cls in OBJECTIVES if cls.trains]
            raise ConfigError(f"{flag.objective} {name}: nothing is learnt by it; choose {' or '.join(fitting)}")
        return name
    if checkpoint.predicts == "nothing":
        return "representation"
    if why := OBJECTIVES.get("loss").applies(checkpoint, **corpus.comes_with):
        raise ConfigError(
            f"a model of type {checkpoint.model_type!r} {why}; without, gates learn by {flag.objective} representation"
        )
    return "loss"
