"""How much worse a model gets under each of many masks of heads, all masks in one pass over the corpus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headscope.attribution.objectives.base import OBJECTIVES, Objective
from headscope.bootstrap import Array, GroupSums, Ratio
from headscope.data.batching import Omissions, batches
from headscope.data.corpus import Corpus
from headscope.evaluation.likelihood import LikelihoodOptions, likelihood
from headscope.evaluation.quality import text_scores
from headscope.evaluation.translation import translate_lines
from headscope.formats.base import Checkpoint
from headscope.formats.translate_options import TranslateOptions
from headscope.heads import HeadId
from headscope.model.gating import masked

Masks = Sequence[Sequence[HeadId]]
Step = Callable[[int], None]


@dataclass
class PerformanceDrop:
    """What masks do, by metric: sums and counts per sentence (a cell for each mask), or plain numbers [mask].

    `falls` names the metrics that a harmful mask lowers. The first mask is empty: differences are to it.
    """

    sums: dict[str, GroupSums] = field(default_factory=dict)
    plain: dict[str, Array] = field(default_factory=dict)
    falls: frozenset[str] = frozenset({"accuracy", "bleu"})


def measure_drop(
    checkpoint: Checkpoint, corpus: Corpus, masks: Masks, reading: LikelihoodOptions, *, objective: str, step: Step
) -> PerformanceDrop:
    """Harm of every mask by an objective: loss (with accuracy), or the damage of any other."""
    assert not masks[0], "differences are to the first mask, which is empty"
    return _MEASURES.get(objective, _damage)(checkpoint, corpus, masks, reading, OBJECTIVES.get(objective), step)


def _loss(
    checkpoint: Checkpoint,
    corpus: Corpus,
    masks: Masks,
    reading: LikelihoodOptions,
    objective: type[Objective],
    step: Step,
) -> PerformanceDrop:
    found = likelihood(checkpoint, corpus, reading, masks=masks, progress=step)
    return PerformanceDrop({"loss": found.nll, "accuracy": found.right})


def _damage(
    checkpoint: Checkpoint,
    corpus: Corpus,
    masks: Masks,
    reading: LikelihoodOptions,
    objective: type[Objective],
    step: Step,
) -> PerformanceDrop:
    asked, sums = objective(seed=reading.seed), GroupSums()
    read = batches(
        corpus,
        checkpoint,
        tokens=reading.tokens,
        limit=reading.limit,
        long=reading.long,
        losses=Omissions(),
        labels=True,
    )
    with torch.inference_mode():
        for batch in read:
            here = batch.to(checkpoint.device)
            intact = asked.outcome(checkpoint, here)
            columns = [torch.zeros_like(intact.values)]
            for heads in masks[1:]:
                with masked(checkpoint.model, heads):
                    columns.append(asked.damage(intact, asked.outcome(checkpoint, here, intact.aim)))
            sums.add(batch.indices, Ratio(torch.stack(columns, dim=1), intact.counts[:, None].expand(-1, len(masks))))
            step(len(batch.indices))
    return PerformanceDrop({objective.name: sums})


_MEASURES: Mapping[str, Callable[..., PerformanceDrop]] = {"loss": _loss}


def bleu_drop(checkpoint: Checkpoint, corpus: Corpus, masks: Masks, *, tokens: int, step: Step) -> PerformanceDrop:
    """BLEU of the translations under every mask: as the checkpoint translates, detokenised (sacreBLEU 13a)."""
    references = [checkpoint.joined(sentence.target or "") for sentence in corpus]
    found = []
    for heads in masks:
        with masked(checkpoint.model, heads):
            lines = (sentence.source for sentence in corpus)
            best = translate_lines(checkpoint, lines, options=TranslateOptions(), tokens=tokens, progress=step)
            hypotheses = [each[0].text for each in best]
        found.append(text_scores(hypotheses, references, ["bleu"], mode="raw", replicates=0)[0].value)
    return PerformanceDrop(plain={"bleu": np.array(found)})
