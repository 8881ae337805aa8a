"""DeciLM (nemotron-nas): a Llama whose layers have their own numbers of key/value heads, or no attention.

`config.block_configs` lists the layers: `attention.no_op` and `attention.n_heads_in_group` (query heads that share a
key/value head), `ffn.ffn_mult` (the width of the feed-forward layer as a share of two thirds of the model's, rounded up
to 256). Only torch and transformers are needed, so a copy of this file lies beside the weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

MULTIPLE = 256


def width_of(ffn_mult: float, hidden: int) -> int:
    """The width of a feed-forward layer."""
    return -(-int(2 * ffn_mult * hidden / 3) // MULTIPLE) * MULTIPLE


class DeciLMConfig(LlamaConfig):
    """A Llama's config with `block_configs`, which are read by attribute."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.block_configs = [_by_attribute(block) for block in block_configs or []]

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON has it."""
        blocks = [{name: vars(part) for name, part in vars(block).items()} for block in self.block_configs]
        return {**super().to_dict(), "block_configs": blocks, "num_key_value_heads": None}


def _by_attribute(block: Any) -> Any:
    if isinstance(block, SimpleNamespace):
        return block
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in block.items()})


class NoAttention(nn.Module):
    """In place of attention: it adds nothing."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """Zeros like the states."""
        return torch.zeros_like(hidden_states), None


class DeciLMForCausalLM(LlamaForCausalLM):
    """A Llama of these layers."""

    config_class = DeciLMConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden, heads = config.hidden_size, config.num_attention_heads
        for layer, block in zip(self.model.layers, config.block_configs, strict=True):
            attention: Any = layer.self_attn
            if block.attention.no_op:
                layer.self_attn, layer.input_layernorm = NoAttention(), nn.Identity()
            else:
                width = heads // block.attention.n_heads_in_group * attention.head_dim
                attention.k_proj = nn.Linear(hidden, width, bias=False)
                attention.v_proj = nn.Linear(hidden, width, bias=False)
                attention.num_key_value_groups = block.attention.n_heads_in_group
            ffn = width_of(block.ffn.ffn_mult, hidden)
            layer.mlp.gate_proj = nn.Linear(hidden, ffn, bias=False)
            layer.mlp.up_proj = nn.Linear(hidden, ffn, bias=False)
            layer.mlp.down_proj = nn.Linear(ffn, hidden, bias=False)
        self.post_init()
