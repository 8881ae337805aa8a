"""Gradient Interaction Modifications: gradients that see what redundant parts hide from each other.

Edin et al. 2025 (arXiv 2505.17630), read from the authors' programs; the forward pass is the model's own.

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

from headscope.relevance.backward import Backward
from headscope.relevance.gradient.rules import Rules
from headscope.relevance.rulesets import register

register(
    Backward(
        "gim",
        "GIM: softmax gradients at temperature 2, constant norm deviations, half to each factor (Edin et al. 2025)",
        Rules(norm="constant", product=0.5, weights=0.5, values=0.5, scores=0.5, temperature=2.0),
    )
)
