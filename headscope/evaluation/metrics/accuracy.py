"""Accuracy: the share of tokens that are the likeliest, or of sentences and tagged words that get the right label."""

from __future__ import annotations

from collections import Counter

from headscope.bootstrap import Array
from headscope.data.batching import Omissions
from headscope.data.encoded import IGNORED
from headscope.evaluation.likelihood import Likelihood, labelled
from headscope.evaluation.metrics.base import Floor, LikelihoodMetric, ValidationText, metric, total_and_count
from headscope.formats.base import Checkpoint


@metric
class Accuracy(LikelihoodMetric):
    """Hits over labels, or over tokens."""

    name = "accuracy"
    title = "accuracy"
    order = 50

    def sums(self, read: Likelihood) -> Array:
        return total_and_count(read.right)

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        counts = label_counts(checkpoint, data)
        unit = "token" if checkpoint.predicts == "words" else "label"
        return Floor(max(counts.values()) / counts.total(), f"the share of the most frequent {unit}")

    def title_of(self, checkpoint: Checkpoint) -> str:
        return {"words": "token accuracy", "tags": "word accuracy"}.get(checkpoint.predicts, self.title)


def label_counts(checkpoint: Checkpoint, data: ValidationText) -> Counter[int]:
    """How often each label is the right one; where the corpus has none, each token that the model is to predict."""
    if data.corpus.has_labels:
        return Counter(label for line in data.corpus for label in (line.labels.ids if line.labels else ()))
    parts = labelled(checkpoint, data.corpus, data.reading, Omissions())
    return Counter(label for part in parts for label in part.labels[part.labels != IGNORED].tolist())
