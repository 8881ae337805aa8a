"""What objectives share: which positions of a batch predict something, and -log p of their labels."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.data.encoded import IGNORED, Batch, Side
from headscope.formats.base import Checkpoint


def no_words(checkpoint: Checkpoint, *, has_target: bool) -> str | None:
    """Why a checkpoint predicts no words on a corpus, None where it does."""
    if checkpoint.predicts != "words":
        return "needs a model that predicts words (one with a language-model head)"
    if checkpoint.two_sided and not has_target:
        return "needs a --target, which the decoder is to say"
    return None


def predicting(batch: Batch, *, decodes: bool) -> tuple[Side, Tensor]:
    """The side whose positions predict, and which of them do [b t].

    A decoder predicts at every real position, an encoder at every position of a token that is not special.
    """
    side = batch.source if batch.target is None else batch.target
    return side, side.real if decodes else side.real & ~side.special


def per_sentence(values: Tensor, rows: Tensor, sentences: int) -> Tensor:
    """Sums [b] of values [n] that belong to sentences `rows` [n]."""
    return values.new_zeros(sentences).index_add(0, rows, values)


def precise(values: Tensor) -> Tensor:
    """At least float32."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Σ -log p of labels [b t] in nats and their number, [b] each; positions labelled `IGNORED` do not count."""
    rows, positions = (labels != IGNORED).nonzero(as_tuple=True)
    nll = torch.nn.functional.cross_entropy(precise(logits[rows, positions]), labels[rows, positions], reduction="none")
    return per_sentence(nll, rows, len(labels)), (labels != IGNORED).sum(dim=1)
