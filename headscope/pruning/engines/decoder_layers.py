"""The layers of Llama-like decoders, with the heads that their weights have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

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

    def filled(self, part: str, *, groups: int, shared: int) -> Tensor:
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
