"""What exports of Llama-like decoders share: layers with the heads that their weights have, and the proof.

A folder that transformers opened again is held against the model that it was made of, along greedy continuations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from headscope.evaluation.model_inputs import InputTexts, prompts
from headscope.export.base import check_difference
from headscope.model.forward import with_cache
from headscope.model.interface import suppress_warnings

PARTS = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
FEED_FORWARD = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
"""The projections of a layer by the names that llama.cpp gives them."""


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: kept query heads and key/value groups, and the module they come from."""

    module: Any
    heads: int
    groups: int
    width: int

    @property
    def biases(self) -> frozenset[str]:
        """The parts that have a bias; what stands in for a projection of a layer without heads keeps none."""
        owners = {part: getattr(self.module.self_attn, name) for part, name in PARTS.items()}
        owners |= {part: getattr(self.module.mlp, name) for part, name in FEED_FORWARD.items()}
        return frozenset(
            part for part, owner in owners.items() if isinstance(getattr(owner, "bias", None), nn.Parameter)
        )

    @property
    def padded(self) -> DecoderLayer:
        """The same layer with one head of zeros where it has none: a place for its bias."""
        return self if self.heads else DecoderLayer(self.module, 1, 1, self.width)

    def attention(self, part: str) -> tuple[Tensor, Tensor | None]:
        """Weight [out in] and bias of a part; zeros for the one head of a layer that has none."""
        owner = getattr(self.module.self_attn, PARTS[part])
        if isinstance(owner, nn.Linear):
            return owner.weight.detach(), None if owner.bias is None else owner.bias.detach()
        like = self.module.input_layernorm.weight
        shape = (len(like), self.width) if part == "attn_output" else (self.width, len(like))
        bias = owner.bias.detach() if isinstance(getattr(owner, "bias", None), nn.Parameter) else None
        return like.new_zeros(shape).detach(), bias

    def pad_heads(self, part: str, *, groups: int, shared: int) -> Tensor:
        """Weight [out in] of a part, filled up with zeros to so many groups of `shared` query heads each."""
        weight, _ = self.attention(part)
        rows = weight.T.contiguous() if part == "attn_output" else weight
        queries = part in ("attn_q", "attn_output")
        own = rows.view(max(self.groups, 1), -1, self.width, rows.shape[1])  # [g h/g k d]
        whole = own.new_zeros(groups, shared if queries else 1, *own.shape[2:])
        whole[: own.shape[0], : own.shape[1]] = own
        flat = whole.flatten(0, 2)  # [h·k d] or [g·k d]
        return flat.T.contiguous() if part == "attn_output" else flat


def decoder_layer(module: Any) -> DecoderLayer:
    """A layer with the heads that its weights have."""
    attention = module.self_attn
    width = int(attention.head_dim)
    if not isinstance(attention.q_proj, nn.Linear):  # a stand-in of a layer without heads
        return DecoderLayer(module, 0, 0, width)
    return DecoderLayer(
        module, attention.q_proj.weight.shape[0] // width, attention.k_proj.weight.shape[0] // width, width
    )


STEPS, PROMPT = 32, 8


def folder_proof(model: Any, reopened: Any, data: InputTexts, *, n_padding: int) -> dict[str, Any]:
    """What an `EngineFile` says of a folder that transformers `reopened`, with `n_padding` heads of zeros.

    It is held against 32 greedy tokens of `model`, at once and token by token through its cache.
    """
    difference, largest, same, starts = 0.0, 1.0, 0, prompts(data, PROMPT)
    for prompt in starts:
        start = torch.tensor([prompt], device=model.device)
        ids = _greedy(model, start)
        log_p = _log_probabilities(model, ids)  # [n V]
        largest = max(largest, float(log_p.abs().max()))
        for other_log_p in (_log_probabilities(reopened, ids), _through_cache(reopened, ids)):
            difference = max(difference, float((other_log_p - log_p).abs().max()))
        same += torch.equal(_greedy(reopened, start), ids)
    greedy = f"transformers, with its cache, continues {same} of {len(starts)} texts greedily as the model does"
    return {
        "runtime": f"transformers {transformers.__version__}",
        "difference": difference,
        "limit": check_difference(difference, largest, model.dtype, "transformers"),
        "notes": (greedy, *([f"filled up with {n_padding} heads of zeros"] if n_padding else [])),
    }


def _greedy(model: Any, start: Tensor) -> Tensor:
    """Ids [1 n] with up to 32 greedy tokens behind a start, as far as the model has positions."""
    steps = min(STEPS, model.config.max_position_embeddings - start.shape[1])
    with torch.no_grad(), suppress_warnings():
        ids: Tensor = model.generate(
            start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=steps, min_new_tokens=steps
        )
    return ids


def _log_probabilities(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def _through_cache(model: Any, ids: Tensor) -> Tensor:
    cache, rows = None, []
    with torch.no_grad():
        for step in ids.split(1, dim=1):
            out, cache = with_cache(model, cache, input_ids=step)
            rows.append(out.logits[0])
    return torch.cat(rows).double().log_softmax(-1)
