"""Objectives of a model's outputs: the training criterion, probabilities, logits, final states of encoders."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from headscope.attribution.objectives.base import (
    Objective,
    ObjectiveOutput,
    negative_log_likelihood,
    no_words,
    objective,
    per_sentence,
    predicting,
)
from headscope.data.encoded import IGNORED, Batch
from headscope.data.labels import no_labels
from headscope.distributed import upload
from headscope.errors import CheckpointError, flag
from headscope.evaluation.likelihood import choose_hidden
from headscope.evaluation.metrics.states import cosine, relative_l2
from headscope.formats.base import Checkpoint
from headscope.model.attention import precise
from headscope.model.forward import Pool


@objective
class LossObjective(Objective):
    """Σ -log p of the labels, in nats, without label smoothing; counts are predicted tokens.

    Decoders are teacher-forced and predict every token of the reference and the end-of-sentence token (a decoder-only
    Hugging Face model every token after its first). Masked language models predict 15 % of the tokens that are not
    special, at least one a sentence, chosen by seed and sentence number. All are replaced by the mask token at once,
    as `headscope evaluate --hiding random` does (BERT's training keeps or swaps some of them). For classifiers it is
    the cross-entropy of the corpus's labels.
    """

    name = "loss"
    summary = "the training criterion: -log p of the reference, of hidden tokens, or of labels"
    damage_words = "loss rises by (nats)"
    higher_is_better = False
    trains = True

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if checkpoint.label_names:
            needs = None if has_labels else f"needs {flag.labels} FILE, the correct classes"
            return no_labels(checkpoint) or needs
        why = no_words(checkpoint, has_target=has_target)
        if why is None and not checkpoint.decodes:
            try:
                checkpoint.mask_id()
            except CheckpointError as error:
                return str(error)
        return why

    def alters(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.predicts == "words" and not checkpoint.decodes

    def prepare(self, checkpoint: Checkpoint, batch: Batch) -> Batch:
        """The batch as it is; of masked language models with tokens hidden, and these as labels."""
        if not self.alters(checkpoint):
            return batch
        source = batch.on_host.source
        hidden = torch.zeros_like(source.real)
        ordinary = (source.real & ~source.special).tolist()
        for row, (number, positions) in enumerate(zip(batch.indices.tolist(), ordinary, strict=True)):
            candidates = [n for n, is_ordinary in enumerate(positions) if is_ordinary]
            hidden[row, choose_hidden(candidates, number, seed=self.seed)] = True
        ids, hidden = batch.source.ids, upload(hidden, batch.source.ids.device)
        source = replace(batch.source, ids=ids.masked_fill(hidden, checkpoint.mask_id()))
        return replace(batch, source=source, labels=ids.masked_fill(~hidden, IGNORED))

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        assert batch.labels is not None, "the batch was read without labels"
        return ObjectiveOutput(*negative_log_likelihood(output, batch.labels))


@objective
class LogProbability(Objective):
    """log p of the reference given the source (or of the text), in nats; counts are sentences.

    This is `loss`, a sum over tokens, with the opposite sign. Only decoders give a text a probability.
    """

    name = "log-probability"
    summary = "log-probability of the whole reference"
    damage_words = "log-probability falls by (nats)"

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if checkpoint.predicts == "words" and not checkpoint.decodes:
            return "a masked language model gives a text no probability"
        return no_words(checkpoint, has_target=has_target)

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        assert batch.labels is not None, "the batch was read without labels"
        nll, _ = negative_log_likelihood(output, batch.labels)
        return ObjectiveOutput(-nll, torch.ones_like(nll))


@objective
class AnswerObjective(Objective):
    """logit(answer) − logit(wrong answer) at the position where a prompt asks for it (Wang et al. 2022).

    If a prompt has no wrong answer: log p(answer), in nats. Counts are prompts.
    """

    name = "answer"
    summary = "logit of the answer to a prompt, less that of the wrong answer"
    damage_words = "logit of the answer falls by"
    needs_prompts = True

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if checkpoint.predicts in ("words", "classes"):
            return None
        return "needs a model that predicts words or classes"

    def output(self, checkpoint: Checkpoint, batch: Batch) -> Tensor:
        """The logits [b V] at the positions of the answers."""
        assert batch.contrasts is not None, "the sentences are not prompts"
        if checkpoint.predicts == "classes":
            return checkpoint.logits(batch)[:, 0]
        return checkpoint.logits_at(batch, batch.contrasts.positions)

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        contrasts = batch.contrasts
        assert contrasts is not None, "the sentences are not prompts"
        logits, rows = precise(output), torch.arange(len(output), device=output.device)
        answer = logits[rows, contrasts.answers]  # [b]
        lacks_wrong = contrasts.wrong == IGNORED
        wrong = logits[rows, contrasts.wrong.masked_fill(lacks_wrong, 0)]
        values = answer - torch.where(lacks_wrong, logits.logsumexp(dim=-1), wrong)
        return ObjectiveOutput(values, torch.ones_like(values))


@objective
class Top1(Objective):
    """Σ over positions of the largest logit; counts are positions. For a classifier the logit of its class.

    A decoder predicts at every position but padding, teacher-forced; an encoder and a token classifier at every token
    that is not special, none of them masked. `aim` [b t] (or [b]) has the ids that the intact model predicts; the value
    of an altered model is the sum of their logits.
    """

    name = "top1"
    summary = "logit of the model's prediction: the likeliest token of each position, or the class"
    damage_words = "logit of its prediction falls by"

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        return None if checkpoint.label_names else no_words(checkpoint, has_target=has_target)

    def output(self, checkpoint: Checkpoint, batch: Batch) -> Tensor:
        logits = checkpoint.logits(batch)
        return logits[:, 0] if checkpoint.predicts == "classes" else logits

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        if aim is None:
            aim = output.detach().argmax(dim=-1)  # [b t] or [b]
        if output.ndim == 2:
            values = precise(output).gather(1, aim[:, None])[:, 0]
            return ObjectiveOutput(values, torch.ones_like(values), aim)
        _, is_prediction = predicting(batch, decodes=checkpoint.decodes)
        rows, positions = is_prediction.nonzero(as_tuple=True)
        values = precise(output[rows, positions, aim[rows, positions]])
        return ObjectiveOutput(per_sentence(values, rows, len(is_prediction)), is_prediction.sum(dim=1), aim)


class FinalStates(Objective):
    """Objectives of final states [b t d], for all models, also those that predict nothing.

    The states are of the last stack that runs: the decoder if there is one and a target, else the encoder.
    """

    trains = True

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        return None

    def output(self, checkpoint: Checkpoint, batch: Batch) -> Tensor:
        return checkpoint.states(batch)

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        real = (batch.source if batch.target is None else batch.target).real
        return self.project(precise(output), real, aim, checkpoint.pool)

    @abstractmethod
    def project(self, states: Tensor, real: Tensor, aim: Tensor | None, pool: Pool) -> ObjectiveOutput:
        """The projections of the compared vectors on their own directions, held constant, or on `aim`."""


@objective
class Representation(FinalStates):
    """The mean-pooled final state of a sentence, for models that predict nothing.

    The mean is over all positions but padding, special ones too; a sentence-transformers model pools as its files say.
    The value is the projection of that vector on its own direction, which is held constant: the gradient is that of
    the norm. The value of an altered model is the projection on the intact model's direction (`aim` [b d]). The damage
    is the cosine distance to the intact vector, 1 − cos, in [0, 2].
    """

    name = "representation"
    summary = "mean-pooled final state: its length along its own direction, cosine distance for ablations"
    damage_words = "cosine distance"
    reports = "similarity"
    compares = True

    def project(self, states: Tensor, real: Tensor, aim: Tensor | None, pool: Pool) -> ObjectiveOutput:
        mean = pool(states, real)
        direction = torch.nn.functional.normalize(mean.detach(), dim=-1) if aim is None else aim
        values = (mean * direction).sum(dim=-1)
        return ObjectiveOutput(values, torch.ones_like(values), direction, mean)

    def damage(self, intact: ObjectiveOutput, changed_output: ObjectiveOutput) -> Tensor:
        """1 − cos of the two vectors [b]."""
        assert intact.vector is not None and changed_output.vector is not None
        return 1 - torch.nn.functional.cosine_similarity(intact.vector, changed_output.vector, dim=-1)


class StateDistance(FinalStates):
    """The projections of several states on their own directions (`aim` [b n d]), summed over a sentence.

    The damage compares each state with the intact model's: by the relative l2 distance ‖v' − v‖ / ‖v‖ if `reports` is
    "distance", else by 1 − cos. Counts are states, so means are over all states of the corpus; states at padding are
    zero. With `pools` there is one state a sentence, the pooled one.
    """

    pools: ClassVar[bool] = False

    def project(self, states: Tensor, real: Tensor, aim: Tensor | None, pool: Pool) -> ObjectiveOutput:
        if self.pools:
            states, counts = pool(states, real)[:, None], real.any(dim=-1).long()
        else:
            states, counts = states * real[..., None], real.sum(dim=-1)
        directions = torch.nn.functional.normalize(states.detach(), dim=-1) if aim is None else aim
        return ObjectiveOutput((states * directions).sum(dim=(1, 2)), counts, directions, states=states)

    def damage(self, intact: ObjectiveOutput, changed_output: ObjectiveOutput) -> Tensor:
        assert intact.states is not None and changed_output.states is not None
        if self.reports == "distance":
            return relative_l2(intact.states, changed_output.states).sum(dim=-1)
        return intact.counts - cosine(intact.states, changed_output.states).sum(dim=-1)


@objective
class RepresentationL2(StateDistance):
    """As `representation`, but the damage is ‖v' − v‖ / ‖v‖, which depends on lengths too."""

    name = "representation-l2"
    summary = "mean-pooled final state, relative l2 distance for ablations"
    damage_words = "relative l2 distance"
    reports = "distance"
    pools = True


@objective
class TokenRepresentationL2(StateDistance):
    """As `token-representation`, but the damage of a token is ‖v' − v‖ / ‖v‖."""

    name = "token-representation-l2"
    summary = "final states of all tokens, relative l2 distance for ablations"
    damage_words = "relative l2 distance of tokens"
    reports = "distance"


@objective
class TokenRepresentation(StateDistance):
    """The final states of all tokens, special ones too; the damage of a token is 1 − cos to the intact model."""

    name = "token-representation"
    summary = "final states of all tokens, cosine distance for ablations"
    damage_words = "cosine distance of tokens"
    reports = "similarity"
