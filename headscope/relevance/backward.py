"""Rule sets that are a backward pass with rules in place of gradients; those of one batch share its forward pass.

`gim` are Gradient Interaction Modifications, which see what redundant parts hide from each other: Edin et al. 2025
(arXiv 2505.17630), read from the authors' programs; the forward pass is the model's own.

1. The softmax's gradient is S ∘ (g − Σ g·S) with S = softmax(scores / 2), without the factor 1/2.
2. The deviations of norms are constants.
3. Gradients are divided at products: queries and keys get a quarter, values a half, and each factor of a gated
   feed-forward layer a half (so does the program of the paper; the package gim-explain 0.1.4 leaves that layer alone).

Activations keep their gradients. Relevance is read at the contexts of heads with zero as the baseline, as of every rule
set here; the authors read it at embeddings, against those of a space. Deviation: gim-explain changes `torch.softmax`
or the fused attention, whichever a model calls, and of norms only torch's own, so that of a transformers model it
applies one half of this; here all of it holds for every architecture that the other rule sets know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.model.attention import precise
from headscope.relevance.gradient.recording import recording
from headscope.relevance.gradient.rules import Rules
from headscope.relevance.rulesets import (
    Explanation,
    RuleSet,
    Steps,
    Target,
    explained_output,
    explained_units,
    join_relevance,
    register,
)


@dataclass(frozen=True)
class Backward(RuleSet):
    """Rules for a backward pass through the model as it is; several of them share one forward pass.

    Values are explained, not indicators: relevance at the output is the logit itself.
    """

    name: str
    summary: str
    rules: Rules = field(default_factory=Rules)

    def explain(self, checkpoint: Checkpoint, batch: Batch, *, target: Target, steps: Steps) -> Explanation:
        return explain_backward(checkpoint, batch, [self], target=target, steps=steps)[self.name]


def explain_backward(
    checkpoint: Checkpoint, batch: Batch, rule_sets: Sequence[Backward], *, target: Target, steps: Steps
) -> dict[str, Explanation]:
    """Relevances of one batch under each rule set, from one forward pass.

    Explained is the logit of the likeliest token (`top1`), of the reference (`reference`), or the likeliest minus
    1/V of the sum of the V - 1 others (`contrastive`; Achtibat et al. advise it where most logits are negative).
    Decoders are explained at every real position, masked language models at every token that is not special, with
    nothing hidden; classifiers once; models that predict nothing by the projection of their mean-pooled final state on
    its own direction. `steps` "sum" takes one backward pass for the whole batch, "each" one per position.
    """
    with recording(checkpoint.model, {rule_set.name: rule_set.rules for rule_set in rule_sets}) as recorded:
        output, quantity = explained_output(checkpoint, batch, target)
    with torch.enable_grad():
        values, counts = _quantities(checkpoint, output, batch, quantity)  # [b p] each
        if steps == "sum":
            values, counts = values.sum(dim=1, keepdim=True), counts.sum(dim=1, keepdim=True)
        starts = values.sum(dim=0).unbind()
    explanations = {}
    for number, rule_set in enumerate(rule_sets):
        last = number == len(rule_sets) - 1
        # one backward pass for each start; the last of all frees the graph
        parts = [
            recorded.relevance(start, rule_set.rules, retain=not last or number < len(starts) - 1)
            for number, start in enumerate(starts)
        ]
        relevance = {layer: join_relevance([part[layer] for part in parts]) for layer in parts[0]}
        explanations[rule_set.name] = Explanation(relevance, counts.T, values.detach().T)
    return explanations


def _quantities(checkpoint: Checkpoint, output: Tensor, batch: Batch, quantity: str) -> tuple[Tensor, Tensor]:
    """The numbers to explain [b p], zero where there is none, and whether there is one [b p]."""
    if quantity == "representation":
        outcome = OBJECTIVES.get(quantity)().evaluate(checkpoint, output, batch)
        return outcome.values[:, None], outcome.counts[:, None]
    logits = output[:, None] if output.ndim == 2 else output  # [b p V]
    targets, counted = explained_units(checkpoint, batch, logits, quantity)
    rows, positions = counted.nonzero(as_tuple=True)
    picked = precise(logits[rows, positions, targets[rows, positions]])
    if quantity == "contrastive":
        position_logits = precise(logits[rows, positions])
        picked = picked - (position_logits.sum(dim=-1) - picked) / position_logits.shape[-1]
    values = picked.new_zeros(counted.shape).index_put((rows, positions), picked)
    return values, counted.to(values.dtype)


register(Backward("gradient", "gradient x input: the ordinary gradient (Michel et al. 2019 without absolute values)"))
register(
    Backward(
        "cp",
        "conservative propagation: attention weights and norm deviations are constants (Ali et al. 2022); half to "
        "each factor of a gated feed-forward layer",
        Rules(activation="identity", norm="constant", product=0.5, weights=0.0),
    )
)
register(
    Backward(
        "attnlrp",
        "AttnLRP: half to values, half through the softmax to queries and keys (Achtibat et al. 2024)",
        Rules(activation="identity", norm="constant", product=0.5, weights=0.5, values=0.5, scores=0.5),
    )
)
register(
    Backward(
        "epsilon",
        "as cp, with the epsilon rule at linear maps and weights x values (Bach et al. 2015; epsilon 0.25 rms)",
        Rules(activation="identity", norm="constant", product=0.5, weights=0.0, epsilon=0.25),
    )
)


register(
    Backward(
        "gim",
        "GIM: softmax gradients at temperature 2, constant norm deviations, half to each factor (Edin et al. 2025)",
        Rules(norm="constant", product=0.5, weights=0.5, values=0.5, scores=0.5, temperature=2.0),
    )
)
