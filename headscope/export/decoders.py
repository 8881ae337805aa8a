"""What exports of Llama-like decoders share: layers with the heads that their weights have, and the proof.

A folder that transformers opened again is held against the model that it was made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from headscope.evaluation.model_inputs import InputTexts, prompts
from headscope.export.base import OUTPUTS, check_difference, greedy_difference, tolerance
from headscope.formats.base import Checkpoint
from headscope.model.forward import max_abs_difference, outputs, with_cache

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


PROMPT = 8


def folder_proof(checkpoint: Checkpoint, reopened: Any, data: InputTexts, *, n_padding: int) -> dict[str, Any]:
    """What an `EngineFile` says of a folder that transformers `reopened`, with `n_padding` heads of zeros.

    It is held against the checkpoint that it was made of on texts at once, and along greedy tokens through its cache.
    """
    reopened = reopened.to(checkpoint.device).eval()

    def step(new: Tensor, _: Tensor, cache: Any) -> tuple[Tensor, Any]:
        with torch.no_grad():
            result, after = with_cache(reopened, cache, input_ids=new)
        return result.logits, after

    (start,) = prompts(data, PROMPT, count=1)
    ids = torch.tensor([start], device=checkpoint.device)
    difference, note = greedy_difference(step, ids, checkpoint.model, runtime="transformers")
    for batch in data.feeds:
        expected_logits = outputs(checkpoint.model, batch)
        difference = max(difference, max_abs_difference(outputs(reopened, batch), expected_logits))
    return {
        "runtime": f"transformers {transformers.__version__}",
        "difference": difference,
        "quantity": OUTPUTS,
        "limit": check_difference(difference, tolerance(checkpoint.dtype, 1.0), "transformers", OUTPUTS),
        "notes": (note, *([f"filled up with {n_padding} heads of zeros"] if n_padding else [])),
    }
