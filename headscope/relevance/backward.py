"""Rule sets that are a backward pass with rules in place of gradients; they share a batch's forward pass.

`gim` is Gradient Interaction Modifications (Edin et al. 2025, arXiv 2505.17630, after the authors' programs), which
gives relevance to redundant parts that a gradient ignores. The forward pass is the model's own; the backward pass has
three changes:

1. The softmax's gradient is S ∘ (g − Σ g·S) with S = softmax(scores / 2), without the factor 1/2.
2. The deviations of norms are constants.
3. Gradients are divided at products: queries and keys get a quarter, values a half, and each factor of a gated
   feed-forward layer a half (as in the paper's program; the package gim-explain 0.1.4 does not change that layer).

Activations keep their gradients. Relevance is read at the contexts of heads with zero as the baseline, as in every rule
set here; the authors read it at embeddings, with the embedding of a space as the baseline. Deviation: gim-explain
changes `torch.softmax` or the fused attention, whichever a model calls, and only torch's own norms, so a model of
transformers gets a part of this; here all of it holds for every architecture that the other rule sets support.
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
from headscope.heads import SiteLayer
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


@dataclass
class RecordedPass:
    """Queries and contexts [b h t k] of every attention call, in one graph, and the rules that its nodes follow."""

    active: ActiveRules = field(default_factory=ActiveRules)
    calls: list[tuple[SiteLayer, Tensor, Tensor]] = field(default_factory=list)

    def relevance(self, value: Tensor, rules: Rules, *, retain: bool = True) -> dict[SiteLayer, Relevance]:
        """The relevance of heads for one `value`, in one backward pass by `rules`; the axis `p` has length 1.

        Sentences do not depend on each other, so the value may be a sum over the batch. `retain` False frees the graph.
        Layers that the value does not depend on have relevance zero.
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
    """The relevance of heads, context · gradient, from contexts and queries [b h t k] and their gradients.

    `rules.values` of it goes on to values. Queries and keys get the same, as Σ k · ∂k = Σ q · ∂q (both are
    Σ (q·k) · ∂(q·k)), so the gradients of queries give what goes to both.
    """
    neurons = precise(context) * precise(to_context)  # [b h t k]
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
        """q · k [b h t s]; in the lowest layer the graph begins here, so queries and keys require gradients."""
        query, key = (
            with_share(part.requires_grad_(), self.active, lambda rules: rules.scores) for part in (query, key)
        )
        with self.operations.one_rule():  # with_share has divided the gradient of this product already
            return torch.matmul(query, key.transpose(-1, -2))

    def context(self, weights: Tensor, value: Tensor) -> Tensor:
        """weights · v [b h t k]."""
        return Weighted.apply(weights, value.requires_grad_(), self.active)  # type: ignore[no-untyped-call]


@contextmanager
def recording(model: nn.Module, rule_sets: Mapping[str, Rules]) -> Iterator[RecordedPass]:
    """Within the block `model` builds a graph for `rule_sets`, in evaluation mode.

    CheckpointError, naming the module, for an operation that a rule set has no rule for.
    """
    recorded_pass = RecordedPass()
    operations = Operations(model, recorded_pass.active, dict(rule_sets))
    forwards: dict[nn.Module, Callable[..., Tensor]] = {}
    if any(rules != PLAIN for rules in rule_sets.values()):
        rules_of_modules = composite_modules(model)
        forwards |= {module: operations.with_module_rule(module, rule) for module, rule in rules_of_modules.items()}
        forwards |= {experts: operations.mixture(experts) for experts in experts_of(model)}

    def tap(attention_site: AttentionSite, call: AttentionCall, context: Tensor) -> Tensor:
        context = with_epsilon(context, recorded_pass.active) if operations.epsilon else context
        recorded_pass.calls.append((attention_site.site_layer, call.query, context))
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
    """A rule set of a backward pass; several of them share one forward pass of the model.

    The relevance of the output is the logit itself.
    """

    name: str
    summary: str
    rules: Rules = field(default_factory=Rules)

    def explain(self, checkpoint: Checkpoint, batch: Batch, *, target: Target, steps: Steps) -> Explanation:
        return explain_backward(checkpoint, batch, [self], target=target, steps=steps)[self.name]


def explain_backward(
    checkpoint: Checkpoint, batch: Batch, rule_sets: Sequence[Backward], *, target: Target, steps: Steps
) -> dict[str, Explanation]:
    """The relevance of heads in one batch by each rule set, from one forward pass.

    The `target` is the logit of the likeliest token (`top1`), of the reference (`reference`), or of the likeliest minus
    1/V of the sum of the V - 1 others (`contrastive`; Achtibat et al. advise it where most logits are negative).
    Decoders are explained at every position but padding, masked language models at every token that is not special,
    none hidden; classifiers once; models that predict nothing by the projection of their mean-pooled final state on
    its own direction. `steps` "sum" needs one backward pass for the whole batch, "each" one per position.
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
    """The values to explain [b p], zero where there is none, and their counts, 1 or 0 [b p]."""
    if quantity == "representation":
        outcome = OBJECTIVES.get(quantity)().evaluate(checkpoint, output, batch)
        return outcome.values[:, None], outcome.counts[:, None]
    logits = output[:, None] if output.ndim == 2 else output  # [b p V]
    targets, is_explained = explained_units(checkpoint, batch, logits, quantity)
    rows, positions = is_explained.nonzero(as_tuple=True)  # [n] each
    target_values = precise(logits[rows, positions, targets[rows, positions]])
    if quantity == "contrastive":
        position_logits = precise(logits[rows, positions])  # [n V]
        other_logits = position_logits.sum(dim=-1) - target_values
        target_values = target_values - other_logits / position_logits.shape[-1]
    values = target_values.new_zeros(is_explained.shape).index_put((rows, positions), target_values)
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
