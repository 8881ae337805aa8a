"""A text as training batches for checkpoints of any format, and the loss: of labels, or the distance to a teacher."""

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
    """A corpus as a model reads it, sentences cut at `limit` subwords a side; with labels to predict (`with_labels`).

    For masked language models `hiding` has the mask's id and the ids that may replace a hidden token; tokens are hidden
    anew in each epoch. `n_truncated` counts sentences that were cut.
    """

    def __init__(self, checkpoint: Checkpoint, corpus: Corpus, *, limit: int, with_labels: bool = True) -> None:
        check_sides(checkpoint, corpus, target="the translations")
        hides = with_labels and checkpoint.predicts == "words" and not checkpoint.decodes
        self.checkpoint, self.digest, self.hiding = checkpoint, corpus.digest, None
        with restate(ConfigError, "{why}; it cannot learn from text alone", CheckpointError):
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
        """Batches of sentences of similar length, shuffled by `order` (seed and epoch), or not shuffled."""
        source = np.array([len(row.source.ids) for row in self.rows])
        target = np.array([len((row.target or row.source).ids) for row in self.rows])
        chance = None if order is None else np.random.default_rng(order)
        return plan_lengths(source, target, tokens=tokens, chance=chance)

    def batch(self, numbers: Numbers, *, seed: int, epoch: int = 0) -> Batch:
        """A batch with labels; hidden tokens are drawn by seed, epoch and sentence number."""
        rows = [self.rows[int(number)] for number in numbers]
        batch = replace(collate(rows, 0, self.checkpoint, Omissions()), indices=torch.as_tensor(numbers))
        if self.hiding is None:
            return batch
        return _hide_tokens(batch, [row.source for row in rows], *self.hiding, seed=seed, epoch=epoch)


def _hide_tokens(
    batch: Batch, sources: list[Encoded], mask: int, plain_ids: Sequence[int], *, seed: int, epoch: int
) -> Batch:
    """Hide 15 % of the tokens, which become labels: 80 % masked, 10 % swapped (Devlin et al. 2019, appendix A.1)."""
    ids, labels = batch.source.ids.clone(), torch.full_like(batch.source.ids, IGNORED)
    for row, (number, source) in enumerate(zip(batch.indices.tolist(), sources, strict=True)):
        plain = [position for position, special in enumerate(source.special) if not special]
        positions = choose_hidden(plain, number, seed=seed + 7919 * epoch) if plain else []
        chance = np.random.default_rng([seed, epoch, number])
        for position, draw in zip(positions, chance.random(len(positions)), strict=True):
            labels[row, position] = ids[row, position]
            if draw < MASK_SHARE:
                ids[row, position] = mask
            elif draw < MASK_SHARE + SWAP_SHARE:
                ids[row, position] = plain_ids[int(chance.integers(len(plain_ids)))]
    return replace(batch, source=replace(batch.source, ids=ids), labels=labels)


@dataclass(frozen=True)
class LabelLoss:
    """Label-smoothed cross-entropy of tokens, of hidden tokens, or of the labels of a classifier."""

    smoothing: float = 0.0
    what: str = "token"
    quantity: ClassVar[str] = "nll"
    """The name of the measured number in records."""
    needs_labels: ClassVar[bool] = True

    @property
    def title(self) -> str:
        """The title of the measured number."""
        return f"-log p of a {self.what}"

    def of(self, checkpoint: Checkpoint, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """The training loss, the measured loss (without gradient), both sums over predictions, and their number.

        Native models compute logits only for tokens with a label.
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
    """The damage of an objective that compares states with those of a teacher, the intact model; needs no labels."""

    objective: Objective
    teacher: Checkpoint
    quantity: ClassVar[str] = "damage"
    needs_labels: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """The title of the measured number."""
        return f"{self.objective.damage_words} to the intact model"

    def of(self, checkpoint: Checkpoint, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """The damage with gradient, and without, both sums over predictions, and their number."""
        with torch.no_grad(), without_taps():
            intact = self.objective.outcome(self.teacher, batch)
        damage = self.objective.damage(intact, self.objective.outcome(checkpoint, batch, intact.aim)).sum()
        return damage, damage.detach(), int(intact.counts.sum())


PruningLoss = LabelLoss | Distillation


def training_loss(
    checkpoint: Checkpoint, corpus: Corpus, *, objective: str, smoothing: float | None, learns: bool, seed: int
) -> PruningLoss:
    """The loss of an objective ("": the default); if the model `learns`, the teacher is a copy."""
    name = training_objective(objective, checkpoint, corpus)
    if name == "loss":
        what = {"classes": "class", "tags": "tag"}.get(checkpoint.predicts, "token")
        default = 0.1 if checkpoint.needs_target else 0.0
        return LabelLoss(default if smoothing is None else smoothing, what)
    if smoothing:
        raise ConfigError(f"{flag('label_smoothing', f'{smoothing:g}')}: {name} is learnt without labels; leave it out")
    needs_copy = learns and why_not_changed(checkpoint.model) is None  # weights that cannot learn need no copy
    teacher = checkpoint.with_model(copy.deepcopy(checkpoint.model).eval()) if needs_copy else checkpoint
    return Distillation(OBJECTIVES.get(name)(seed=seed), teacher)


def training_objective(name: str, checkpoint: Checkpoint, corpus: Corpus) -> str:
    """The objective to learn by: `name`, or by default `loss`, of models that predict nothing `representation`."""
    check_sides(checkpoint, corpus, target="the translations")
    if name:
        choose_objective(name, checkpoint, **corpus.comes_with)
        if not OBJECTIVES.get(name).trains:
            fitting = [candidate for candidate, cls in OBJECTIVES if cls.trains]
            raise ConfigError(f"{flag.objective} {name} cannot be trained on; choose {' or '.join(fitting)}")
        return name
    if checkpoint.predicts == "nothing":
        return "representation"
    if why := OBJECTIVES.get("loss").applies(checkpoint, **corpus.comes_with):
        raise ConfigError(
            f"a model of type {checkpoint.model_type!r} {why}; without, gates learn by {flag.objective} representation"
        )
    return "loss"
