"""How much worse a model gets under each of many masks of heads, all masks in one pass over the corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headscope.attribution.objectives.base import OBJECTIVES, Objective, choose_objective
from headscope.attribution.patching import patched, recorded
from headscope.bootstrap import Array, GroupSums, Ratio
from headscope.config.small import TranslateOptions
from headscope.data.batching import batches
from headscope.data.corpus import Corpus
from headscope.evaluation.likelihood import LikelihoodOptions, likelihood
from headscope.evaluation.quality import text_score
from headscope.evaluation.text_mode import text_mode
from headscope.evaluation.translation import translate_lines
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.taps import masked

Masks = Sequence[Sequence[HeadId]]
Step = Callable[[int], None]


@dataclass
class PerformanceDrop:
    """Metrics under masks of heads: sums and counts per sentence and mask, or values per corpus [mask].

    `higher_is_better` names the metrics that drop under a harmful mask; all others rise. The first mask is empty:
    drops are differences to it.
    """

    sums: dict[str, GroupSums] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    higher_is_better: frozenset[str] = frozenset({"accuracy", "bleu"})
    objective: str = "loss"


def measure_drop(
    checkpoint: Checkpoint, corpus: Corpus, masks: Masks, options: LikelihoodOptions, *, objective: str, step: Step
) -> PerformanceDrop:
    """The objective (or the default one) under every mask: loss, with accuracy, or the damage by any other objective.

    A masked head gives nothing; of prompts, where the objective is the answer, what it gives on the corrupt prompt.
    KeyboardInterrupt where not the whole text was scored.
    """
    assert not masks[0], "differences are to the first mask, which is empty"
    name = choose_objective(objective, checkpoint, **corpus.comes_with, has_answers=corpus.has_contrast)
    if name == "loss":
        scored = likelihood(checkpoint, corpus, options, masks=masks, progress=step)
        if not scored.complete:
            raise KeyboardInterrupt
        return PerformanceDrop({"loss": scored.nll, "accuracy": scored.right})
    damage = _damage(checkpoint, corpus, masks, options, OBJECTIVES.get(name)(seed=options.seed), step)
    return PerformanceDrop({name: damage}, objective=name)


def _damage(
    checkpoint: Checkpoint, corpus: Corpus, masks: Masks, options: LikelihoodOptions, objective: Objective, step: Step
) -> GroupSums:
    sums = GroupSums()
    corpus_batches = batches(
        corpus,
        checkpoint,
        tokens=options.tokens,
        limit=options.limit,
        long=options.long,
        labels=corpus.has_labels or checkpoint.predicts == "words",
    )
    with torch.inference_mode():
        for batch in corpus_batches:
            on_device = batch.to(checkpoint.device)
            intact = objective.outcome(checkpoint, on_device)
            columns = [torch.zeros_like(intact.values)]
            corrupt = recorded(checkpoint, on_device.corrupted).contexts if objective.needs_prompts else {}
            for heads in masks[1:]:
                with masked(checkpoint.model, heads) if not corrupt else patched(checkpoint, heads, corrupt):
                    altered = objective.outcome(checkpoint, on_device, intact.aim)
                columns.append(objective.damage(intact, altered))
            sums.add(batch.indices, Ratio(torch.stack(columns, dim=1), intact.counts[:, None].expand(-1, len(masks))))
            step(len(batch.indices))
    return sums


def bleu_drop(checkpoint: Checkpoint, corpus: Corpus, masks: Masks, *, tokens: int, step: Step) -> PerformanceDrop:
    """BLEU of the translations under every mask: as the checkpoint translates, detokenised."""
    references = [checkpoint.joined(sentence.target or "") for sentence in corpus]
    scores = []
    for heads in masks:
        with masked(checkpoint.model, heads):
            lines = (sentence.source for sentence in corpus)
            best = translate_lines(checkpoint, lines, options=TranslateOptions(), tokens=tokens, progress=step)
            hypotheses = [translations[0].text for translations in best]
        scores.append(text_score("bleu", hypotheses, references, text=text_mode(checkpoint)[0]).value)
    return PerformanceDrop(values={"bleu": np.array(scores)})
