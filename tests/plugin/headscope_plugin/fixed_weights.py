"""A set of relevance rules: the gradient of a model whose attention weights are constants."""

from __future__ import annotations

from headscope.relevance.backward import Backward
from headscope.relevance.gradient.rules import Rules
from headscope.relevance.rulesets import register

register(
    Backward(
        "fixed_weights", "gradient x input with all attention weights held constant", Rules(weights=0.0, scores=0.0)
    )
)
