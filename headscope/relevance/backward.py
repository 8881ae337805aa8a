"""Rule sets that are a backward pass with rules in place of gradients; they share a batch's forward pass.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.attention import PRODUCTS, AttentionCall, holding, precise
from headscope.model.discovery import AttentionSite, eval_mode
from headscope.model.interface import replaced_forwards
from headscope.model.mixing.experts import experts_of
from headscope.model.taps import frozen_parameters, tapped_sites
from headscope.relevance.gradient.operations import Operations, composite_modules
from headscope.relevance.gradient.rules import PLAIN, ActiveRules, Rules, Weighted, epsilon, with_epsilon, with_share
from headscope.relevance.rulesets import (
    Explanation,
    Relevance,
    RuleSet,
    Steps,
    Target,
    explained_output,
    explained_units,
    join_relevance,
    register,
)

Where = tuple[Site, int]


@dataclass
class RecordedPass:
    """Queries and contexts [b h t k] of every attention call, in one graph, and the rules that its nodes look up."""

    active: ActiveRules = field(default_factory=ActiveRules)
    calls: list[tuple[Where, Tensor, Tensor]] = field(default_factory=list)

    def relevance(self, value: Tensor, rules: Rules, *, retain: bool = True) -> dict[Where, Relevance]:
        """Relevances for one number, in one backward pass by `rules`; `p` is 1.

        Sentences do not depend on each other, so the sum of a batch's values explains each sentence's own. `retain`
        False frees the graph. Layers that the number does not depend on have relevance zero.
        """
        contexts = [context for _, _, context in self.calls]
        queries = [query for _, query, _ in self.calls] if rules.weights and rules.scores else []
        previous, self.active.rules = self.active.rules, rules
        try:
            gradients = torch.autograd.grad(
                value, [*contexts, *queries], retain_graph=retain, allow_unused=True, materialize_grads=True
            )
        finally:
            self.active.rules = previous
        to_queries = gradients[len(contexts) :] or [None] * len(contexts)
        all_calls = zip(self.calls, gradients[: len(contexts)], to_queries, strict=True)
        with torch.no_grad():
            return {
                layer: _read(context, to_context, query, to_query, rules)
                for (layer, query, context), to_context, to_query in all_calls
            }


def _read(context: Tensor, to_context: Tensor, query: Tensor, to_query: Tensor | None, rules: Rules) -> Relevance:
    """Relevance at contexts [b h t k], and where it goes from there.

    Σ v · ∂v of a head's values is its share of context · ∂context; Σ k · ∂k equals Σ q · ∂q, as both are
    Σ (q·k) · ∂(q·k) by the same share. So queries alone tell what goes through queries and keys.
    """
    neurons = precise(context) * precise(to_context)
    by_query = neurons.sum(dim=-1)
    raw = onward = by_query.sum(dim=-1)
    if rules.epsilon is not None:
        stable = epsilon(precise(to_context), precise(context), rules.epsilon)
        onward = (precise(context) * stable).sum(dim=(-1, -2))
    through_scores = torch.zeros_like(raw)
    if to_query is not None:
        through_scores = 2 * (precise(query) * precise(to_query)).sum(dim=(-1, -2))
    parts = (raw, neurons.abs().sum(dim=(-1, -2)), by_query, onward * rules.values, through_scores)
    return Relevance(*(part[None] for part in parts))


@dataclass(frozen=True)
class _Products:
    """The matrix products of attention, by the active rules."""

    active: ActiveRules
    operations: Operations

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """q · k [b h t s]; the graph begins at queries and keys below which there is no attention."""
        query, key = (
            with_share(part.requires_grad_(), self.active, lambda rules: rules.scores) for part in (query, key)
        )
        with self.operations.one_rule():  # a product of two variables, whose shares are already given
            return torch.matmul(query, key.transpose(-1, -2))

    def context(self, weights: Tensor, value: Tensor) -> Tensor:
        """weights · v [b h t k]."""
        return Weighted.apply(weights, value.requires_grad_(), self.active)  # type: ignore[no-untyped-call]


@contextmanager
def recording(model: nn.Module, rule_sets: Mapping[str, Rules]) -> Iterator[RecordedPass]:
    """Within the block `model` builds a graph for `rule_sets`, in evaluation mode and without dropout.

    CheckpointError, naming the module, where the model does something that a rule set has no rule for.
    """
    recorded_pass = RecordedPass()
    operations = Operations(model, recorded_pass.active, dict(rule_sets))
    strict = any(rules != PLAIN for rules in rule_sets.values())
    forwards: dict[nn.Module, Callable[..., Tensor]] = {}
    if strict:
        rules_of_modules = composite_modules(model)
        forwards |= {module: operations.with_module_rule(module, rule) for module, rule in rules_of_modules.items()}
        forwards |= {experts: operations.mixture(experts) for experts in experts_of(model)}

    def tap(attention_site: AttentionSite, call: AttentionCall, context: Tensor) -> Tensor:
        context = with_epsilon(context, recorded_pass.active) if operations.epsilon else context
        recorded_pass.calls.append((attention_site.place, call.query, context))
        return context

    with (
        tapped_sites(model, tap, before_mixing=True, first=True),
        eval_mode(model),
        frozen_parameters(model),
        replaced_forwards(forwards),
        holding(PRODUCTS, _Products(recorded_pass.active, operations)),
        torch.enable_grad(),
        operations,
    ):
        yield recorded_pass


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
    with recording(checkpoint.model, {rule_set.name: rule_set.rules for rule_set in rule_sets}) as recorded_pass:
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
            recorded_pass.relevance(start, rule_set.rules, retain=not last or number < len(starts) - 1)
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
    targets, is_explained = explained_units(checkpoint, batch, logits, quantity)
    rows, positions = is_explained.nonzero(as_tuple=True)
    values_explained = precise(logits[rows, positions, targets[rows, positions]])
    if quantity == "contrastive":
        position_logits = precise(logits[rows, positions])
        other_logits = position_logits.sum(dim=-1) - values_explained
        values_explained = values_explained - other_logits / position_logits.shape[-1]
    values = values_explained.new_zeros(is_explained.shape).index_put((rows, positions), values_explained)
    return values, is_explained.to(values.dtype)


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
