"""The probability of the whole reference."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.attribution.objectives.base import Objective, ObjectiveOutput, objective
from headscope.attribution.objectives.predictions import negative_log_likelihood, no_words
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint


@objective
class LogProbability(Objective):
    """log p of the reference given the source (or of the text), in nats; a mean over it is over sentences.

    The sum over its tokens that `loss` is, with the other sign; only decoders give a text a probability.
    """

    name = "log-probability"
    summary = "log-probability of the whole reference"

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
