"""The contract of an objective, and the registry that finds it by name.

An objective maps a model's output to one number per sentence. Gradient methods differentiate it, perturbation methods
measure how it changes, and both divide by the same counts. It is split into the pass through the model (`output`) and
its evaluation (`evaluate`), so that an output from running the upper layers only is evaluated in the same way."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from headscope.data.encoded import IGNORED, Batch, Side
from headscope.errors import ConfigError, NumericalError, QuestionWarning, flag, flags
from headscope.evaluation.likelihood import CELLS
from headscope.formats.base import Checkpoint
from headscope.model.attention import precise
from headscope.model.nonfinite import DEFERRED_CHECKS
from headscope.registry import Registry


def no_words(checkpoint: Checkpoint, *, has_target: bool) -> str | None:
    """Why a checkpoint predicts no words on a corpus, None if it does."""
    if checkpoint.predicts != "words":
        return "needs a model that predicts words (one with a language-model head)"
    if checkpoint.two_sided and not has_target:
        return f"needs a {flag.target}, which the decoder predicts"
    return None


def predicting(batch: Batch, *, decodes: bool) -> tuple[Side, Tensor]:
    """The side whose positions predict, and a mask [b t] of those that do.

    A decoder predicts at every position but padding, an encoder at every position of a token that is not special.
    """
    side = batch.source if batch.target is None else batch.target
    return side, side.real if decodes else side.real & ~side.special


def per_sentence(values: Tensor, rows: Tensor, sentences: int) -> Tensor:
    """The sums [b] over each sentence of values [n], which belong to the sentences `rows` [n]."""
    return values.new_zeros(sentences).index_add(0, rows, values)


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Σ -log p of labels [b t] in nats and their number, [b] each; positions labelled `IGNORED` do not count."""
    positions = (labels != IGNORED).nonzero()
    nll: Tensor = _TokenLosses.apply(logits, positions, labels)  # type: ignore[no-untyped-call]
    return per_sentence(nll, positions[:, 0], len(labels)), (labels != IGNORED).sum(dim=1)


class _TokenLosses(torch.autograd.Function):
    """-log p [n] of labels [b t] at `positions` [n 2] of logits [b t V], without a copy of all logits.

    Of 512 positions and 262,144 words each copy would take half a GB. So the gradient takes the place of the logits:
    it is computed once, and nothing reads them after it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, positions, labels)
        parts = [part.unbind(dim=1) for part in positions.split(max(1, CELLS // logits.shape[-1]))]
        return torch.cat([cross_entropy(precise(logits[part]), labels[part], reduction="none") for part in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor, None, None]:
        """By logits: p of every word, less 1 for the label, times the gradient by the position's loss."""
        logits, positions, labels = ctx.saved_tensors
        by_logits, step = logits.detach(), max(1, CELLS // logits.shape[-1])
        unread = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
        unread[positions.unbind(dim=1)] = False
        by_logits.masked_fill_(unread[..., None], 0)
        for part, factors in zip(positions.split(step), by_loss.split(step), strict=True):
            position = part.unbind(dim=1)
            p = precise(by_logits[position]).softmax(dim=-1)  # [n V]
            p.scatter_add_(1, labels[position][:, None], -torch.ones_like(p[:, :1]))
            by_logits[position] = p.mul_(factors[:, None]).to(logits.dtype)
        return by_logits, None, None


@dataclass(frozen=True)
class ObjectiveOutput:
    """The value of an objective on one batch.

    `values` [b] is differentiable with respect to the output; `counts` [b] is the number of predictions in each sum (or
    1): a mean over the corpus is Σ values / Σ counts. `aim` is the target of the objective, such as predicted ids,
    without gradient: an altered model is evaluated on that of the intact one. `vector` [b d] is for objectives that
    compare one vector a sentence, `states` [b n d] for those that compare several, zero at padding. NumericalError
    where a value is NaN.
    """

    values: Tensor
    counts: Tensor
    aim: Tensor | None = None
    vector: Tensor | None = None
    states: Tensor | None = None

    def __post_init__(self) -> None:
        checks = DEFERRED_CHECKS.get()
        if checks is None:
            self._refuse_nan()
        else:
            checks.add(self.values, self._refuse_nan, masked=True)

    def _refuse_nan(self) -> None:
        if bool(self.values.isnan().any()):  # infinite values are right: a probability of 0 has an infinite loss
            raise NumericalError(f"the objective is NaN on some sentences; take a wider {flag.dtype}")


class Objective(ABC):
    """One number per sentence; subclasses register themselves by `@objective`.

    Random choices (hidden tokens) depend on `seed` and sentence number, not on the batch.

    - `damage_words`: the heading of numbers of damage.
    - `higher_is_better`: damage lowers the value, otherwise it raises it.
    - `trains`: gates and models can learn by the damage.
    - `compares`: it compares one vector a sentence (`ObjectiveOutput.vector`) with the intact model's.
    - `reports`: what a user is shown of means over a corpus: the value; or, where models are compared, the distance to
      the intact model (the damage) or the similarity (1 − damage).
    - `needs_prompts`: it is about answers to prompts (`Batch.contrasts`).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    version: ClassVar[int] = 1
    damage_words: ClassVar[str] = "damage"
    higher_is_better: ClassVar[bool] = True
    trains: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    reports: ClassVar[Literal["value", "distance", "similarity"]] = "value"
    needs_prompts: ClassVar[bool] = False

    def __init__(self, *, seed: int = 1) -> None:
        self.seed = seed

    @classmethod
    @abstractmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        """Why the objective does not apply to a checkpoint on a text with a target or labels, None if it does."""

    def alters(self, checkpoint: Checkpoint) -> bool:
        """Whether `prepare` changes the text."""
        return False

    def prepare(self, checkpoint: Checkpoint, batch: Batch) -> Batch:
        """The batch as the model reads it; the same batch unless `alters`."""
        return batch

    def output(self, checkpoint: Checkpoint, batch: Batch) -> Tensor:
        """The model's output for a prepared batch, in one forward pass: logits, or what a subclass evaluates."""
        return checkpoint.logits(batch)

    @abstractmethod
    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        """The objective of an output for a prepared batch, on the `aim` of an earlier outcome (None: on its own)."""

    def outcome(self, checkpoint: Checkpoint, batch: Batch, aim: Tensor | None = None) -> ObjectiveOutput:
        """The objective of a batch that is not prepared, from one forward pass."""
        ready = self.prepare(checkpoint, batch)
        return self.evaluate(checkpoint, self.output(checkpoint, ready), ready, aim)

    def values(self, checkpoint: Checkpoint, batch: Batch, aim: Tensor | None = None) -> Tensor:
        """The values [b] of a batch that is not prepared, differentiable under `torch.enable_grad()`."""
        return self.outcome(checkpoint, batch, aim).values

    def damage(self, intact: ObjectiveOutput, changed_output: ObjectiveOutput) -> Tensor:
        """The damage [b] of `changed_output` against `intact`, both evaluated with the aim of `intact`."""
        difference = intact.values - changed_output.values
        return difference if self.higher_is_better else -difference


OBJECTIVES: Registry[type[Objective]] = Registry("objective", package="headscope.attribution.objectives")
objective = OBJECTIVES.add


DEFAULTS = ("loss", "top1", "representation")


def warn_without_target(checkpoint: Checkpoint, *, has_target: bool) -> None:
    """Warn (QuestionWarning) if a model generates text and there is no target to compare that with."""
    if checkpoint.needs_target and not has_target:
        warnings.warn(
            f"no {flag.target}: heads are judged by the encoder's states ({flag.objective} representation), not by "
            f"what the model writes; give {flag.target} FILE",
            QuestionWarning,
            stacklevel=1,
        )


def choose_objective(
    name: str, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool = False, has_answers: bool = False
) -> str:
    """The objective's name, or the default where `name` is empty.

    The default is `answer` for prompts; `loss` with a reference, hidden words or labels; `top1` for classifiers without
    labels; and `representation` for all others, with a QuestionWarning if for lack of a target. ConfigError for an
    unknown name, and for an objective that does not apply to this checkpoint or corpus.
    """
    corpus = {"has_target": has_target, "has_labels": has_labels, "has_answers": has_answers}
    if not name:
        warn_without_target(checkpoint, has_target=has_target or has_answers)
        names = ("answer", *DEFAULTS) if has_answers else DEFAULTS
        return next(default for default in names if _why_not(OBJECTIVES.get(default), checkpoint, **corpus) is None)
    why = _why_not(OBJECTIVES.get(name), checkpoint, **corpus)
    if why is not None:
        fitting = [candidate for candidate, cls in OBJECTIVES if _why_not(cls, checkpoint, **corpus) is None]
        raise ConfigError(f"{flag.objective} {name}: {why}; choose {' or '.join(fitting)}")
    return name


def _why_not(
    cls: type[Objective], checkpoint: Checkpoint, *, has_target: bool, has_labels: bool, has_answers: bool
) -> str | None:
    """Why an objective does not apply to a checkpoint on such a text, None if it does."""
    if cls.needs_prompts and not has_answers:
        return f"needs {flags('clean', 'corrupt', 'answer')}"
    return cls.applies(checkpoint, has_target=has_target, has_labels=has_labels)
