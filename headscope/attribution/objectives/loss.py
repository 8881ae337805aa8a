"""The training criterion, and the probability of the whole reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headscope.attribution.objectives.base import (
    Objective,
    ObjectiveOutput,
    negative_log_likelihood,
    no_words,
    objective,
)
from headscope.data.encoded import IGNORED, Batch
from headscope.data.labels import no_labels
from headscope.distributed import upload
from headscope.errors import CheckpointError, flag
from headscope.evaluation.likelihood import hidden_at_random
from headscope.formats.base import Checkpoint


@objective
class LossObjective(Objective):
    """Σ -log p of the labels, in nats, without label smoothing; counts are predicted tokens.

    Decoders are teacher-forced and predict every token of the reference and the end-of-sentence token (a decoder-only
    Hugging Face model every token after its first). Masked language models predict 15 % of the tokens that are not
    special, at least one a sentence, all replaced by the mask token at once, as `headscope evaluate --hiding
    random` does (in its training BERT keeps or swaps some of them). Which ones follows from the seed and the
    sentence's number. Of classifiers it is the cross-entropy of the labels that the corpus has.
    """

    name = "loss"
    summary = "the training criterion: -log p of the reference, of hidden tokens, or of labels"
    damage_words = "loss rises by (nats)"
    higher_is_better = False
    trains = True

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if checkpoint.label_names:
            needs = None if has_labels else f"needs {flag.labels} FILE, what the classifier should say"
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
        """Masked language models: with hidden tokens, and these as labels."""
        if not self.alters(checkpoint):
            return batch
        source = batch.on_host.source
        hidden = torch.zeros_like(source.real)
        ordinary = (source.real & ~source.special).tolist()
        for row, (number, positions) in enumerate(zip(batch.indices.tolist(), ordinary, strict=True)):
            candidates = [n for n, is_ordinary in enumerate(positions) if is_ordinary]
            hidden[row, hidden_at_random(candidates, number, seed=self.seed)] = True
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
    """log p of the reference given the source (or of the text), in nats; a mean over it is over sentences.

    The sum over its tokens that `loss` is, with the other sign; only decoders give a text a probability.
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
