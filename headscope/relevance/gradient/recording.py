"""One forward pass recorded so that relevances under every rule set can be read from it.

`with recording(model, rule_sets) as recorded: output = model(…)`, then `recorded.relevance(value, rules)` for
any of them, in or after the block. The graph begins at the queries, keys and values of the lowest layers, so
backward passes end there. Leaving the block restores the model, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headscope.heads import Site
from headscope.model.attention import AttentionCall, precise, replace_products, tapped
from headscope.model.discovery import AttentionSite, eval_mode, track_calls
from headscope.model.mixing.experts import experts_of
from headscope.model.taps import frozen_parameters
from headscope.relevance.gradient.operations import Operations, composite_modules
from headscope.relevance.gradient.rules import (
    ActiveRules,
    Rules,
    epsilon,
    shared,
    weighted_values,
    with_epsilon,
    with_share,
)
from headscope.relevance.modules import replaced_forwards
from headscope.relevance.rulesets import Relevance

Where = tuple[Site, int]


@dataclass
class RecordedPass:
    """Queries and contexts [b h t k] of every attention call, in one graph, and the rules that its nodes look up."""

    active: ActiveRules = field(default_factory=ActiveRules)
    calls: list[tuple[Where, Tensor, Tensor]] = field(default_factory=list)

    def add(self, attention_site: AttentionSite, call: AttentionCall, context: Tensor) -> None:
        """Record a call."""
        if attention_site.heads:
            self.calls.append(((attention_site.site, attention_site.layer), call.query, context))

    def relevance(self, value: Tensor, rules: Rules, *, retain: bool = True) -> dict[Where, Relevance]:
        """Relevances for one number, in one backward pass by `rules`; `p` is 1.

        Sentences do not depend on each other, so the sum of a batch's values explains each sentence's own. `retain`
        False frees the graph. Layers that the number does not depend on have relevance zero.
        """
        contexts = [context for _, _, context in self.calls]
        queries = [query for _, query, _ in self.calls] if rules.weights and rules.scores else []
        previous, self.active.rules = self.active.rules, rules
        try:
            gradients = torch.autograd.grad(value, [*contexts, *queries], retain_graph=retain, allow_unused=True)
        finally:
            self.active.rules = previous
        to_queries = gradients[len(contexts) :] or [None] * len(contexts)
        with torch.no_grad():
            return {
                layer: _read(context, to_context, query, to_query, rules)
                for (layer, query, context), to_context, to_query in zip(
                    self.calls, gradients[: len(contexts)], to_queries, strict=True
                )
            }


def _read(
    context: Tensor, to_context: Tensor | None, query: Tensor, to_query: Tensor | None, rules: Rules
) -> Relevance:
    """Relevance at contexts [b h t k], and where it goes from there.

    Σ v · ∂v of a head's values is its share of context · ∂context; Σ k · ∂k equals Σ q · ∂q, as both are
    Σ (q·k) · ∂(q·k) by the same share. So queries alone tell what goes through queries and keys.
    """
    b, h, t, _ = context.shape
    if to_context is None:
        zeros = context.new_zeros(1, b, h)
        return Relevance(zeros, zeros, context.new_zeros(1, b, h, t), zeros, zeros)
    neurons = precise(context) * precise(to_context)
    by_query = neurons.sum(dim=-1)
    raw = by_query.sum(dim=-1)
    onward = raw
    if rules.epsilon is not None:
        stable = epsilon(precise(to_context), precise(context), rules.epsilon)
        onward = (precise(context) * stable).sum(dim=(-1, -2))
    through_values = shared(onward, rules.values)
    through_scores = None if to_query is None else 2 * (precise(query) * precise(to_query)).sum(dim=(-1, -2))
    return Relevance(
        raw[None],
        neurons.abs().sum(dim=(-1, -2))[None],
        by_query[None],
        (torch.zeros_like(raw) if through_values is None else through_values)[None],
        (torch.zeros_like(raw) if through_scores is None else through_scores)[None],
    )


@dataclass(frozen=True)
class _Products:
    """The matrix products of attention, by the active rules."""

    active: ActiveRules
    operations: Operations

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """q · k [b h t s]; the graph begins at queries and keys below which there is no attention."""
        states = _requiring_grad(query), _requiring_grad(key)
        query, key = (with_share(part, self.active, lambda rules: rules.scores) for part in states)
        with self.operations.one_rule():  # a product of two variables, whose shares are already given
            return torch.matmul(query, key.transpose(-1, -2))

    def context(self, weights: Tensor, value: Tensor) -> Tensor:
        """weights · v [b h t k]."""
        return weighted_values(weights, _requiring_grad(value), self.active)


def _requiring_grad(states: Tensor) -> Tensor:
    return states if states.requires_grad else states.requires_grad_()


@contextmanager
def recording(model: nn.Module, rule_sets: Mapping[str, Rules]) -> Iterator[RecordedPass]:
    """Within the block `model` builds a graph for `rule_sets`, in evaluation mode and without dropout.

    CheckpointError, naming the module, where the model does something that a rule set has no rule for.
    """
    recorded = RecordedPass()
    operations = Operations(model, recorded.active, dict(rule_sets))
    strict = any(not rules.plain for rules in rule_sets.values())
    forwards: dict[nn.Module, Callable[..., Tensor]] = {}
    if strict:
        rules_of_modules = composite_modules(model)
        forwards |= {module: operations.with_module_rule(module, rule) for module, rule in rules_of_modules.items()}
        forwards |= {experts: operations.mixture(experts) for experts in experts_of(model)}
    with ExitStack() as stack:
        tracker = stack.enter_context(track_calls(model))
        stack.enter_context(eval_mode(model))
        stack.enter_context(frozen_parameters(model))
        stack.enter_context(replaced_forwards(forwards))
        stack.enter_context(replace_products(_Products(recorded.active, operations)))

        def tap(call: AttentionCall, context: Tensor) -> Tensor | None:
            context = with_epsilon(context, recorded.active) if operations.epsilon else context
            attention_site = tracker.attention_site(call.module)
            if attention_site is not None:
                recorded.add(attention_site, call, context)
            return context

        stack.enter_context(tapped(tap, before_mixing=True, first=True))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(operations)
        yield recorded
