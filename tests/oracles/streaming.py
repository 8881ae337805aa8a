"""Mixed full and streaming attention inside transformers' own models, and a reader of DuoAttention's files.

Written from decoders.md §2: loops over queries, a softmax of its own for each of both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "oracle-streaming"
_GATES: dict[int, tuple[list[float], int, int]] = {}


def _mixed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float = 1.0, **_: Any
) -> tuple[Tensor, None]:
    gates, sink, recent = _GATES[module.layer_idx]
    heads, queries = query.shape[1:3]
    rows = []
    for head in range(heads):
        group = head * key.shape[1] // heads
        alpha = gates[group]
        for t in range(queries):
            scores = (query[0, head, t] * key[0, group]).sum(-1) * scaling
            full = [s for s in range(queries) if s <= t]
            near = [s for s in full if s < sink or t - s < recent]
            parts = [torch.softmax(scores[keys], -1) @ value[0, group][keys] for keys in (full, near)]
            rows.append(alpha * parts[0] + (1 - alpha) * parts[1])
    contexts = torch.stack(rows).view(1, heads, queries, -1)
    return contexts.transpose(1, 2), None


AttentionInterface.register(NAME, _mixed_attention)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def mix_attention(model: Any, gates: dict[int, list[float]], *, sink: int, recent: int) -> Iterator[None]:
    """Within the block every layer's attention is mixed by its gates, one a key/value head."""
    before = model.config._attn_implementation
    _GATES.update({layer: (alphas, sink, recent) for layer, alphas in gates.items()})
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _GATES.clear()


def loss(
    model: Any, gates: dict[int, list[float]], ids: list[int], first: int, *, sink: int, recent: int, penalty: float
) -> float:
    """The loss of DuoAttention for one text whose tokens from `first` on are labelled."""
    inputs = torch.tensor([ids])
    with torch.no_grad():
        full = model.model(input_ids=inputs).last_hidden_state[0]
        with mix_attention(model, gates, sink=sink, recent=recent):
            states = model.model(input_ids=inputs).last_hidden_state[0]
    terms = [((full[t] - states[t]) ** 2).mean().item() for t in range(first, len(ids))]
    gate_values = [abs(gate) for layer in gates.values() for gate in layer]
    return float(sum(terms) / len(terms) + penalty * sum(gate_values) / len(gate_values))
