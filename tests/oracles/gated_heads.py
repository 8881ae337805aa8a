"""Small random models whose heads have input-dependent gates."""

from functools import cache
from typing import Any

import transformers

from headscope.formats.base import Checkpoint
from tests.oracles import speakers
from tests.oracles.speakers import SPEAKERS
from tests.oracles.tiny import PAD, PIECES


@cache
def checkpoint(kind: str) -> Checkpoint:
    """A "qwen" (Qwen3-Next, one layer of it linear) has its gates beside the queries, an "afmoe" apart."""
    sizes: dict[str, Any] = {"vocab_size": len(PIECES), "hidden_size": 20, "intermediate_size": 11, "head_dim": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 97, "pad_token_id": PAD}
    if kind == "qwen":
        linear: dict[str, Any] = {f"linear_{name}": 2 for name in ("num_value_heads", "num_key_heads")}
        linear |= {f"linear_{name}": 5 for name in ("key_head_dim", "value_head_dim")}
        linear |= {"layer_types": ["linear_attention", "full_attention", "full_attention"], "num_hidden_layers": 3}
        config: Any = transformers.Qwen3NextConfig(**sizes, **linear, mlp_only_layers=[0, 1, 2], num_experts=0)
        make: Any = transformers.Qwen3NextForCausalLM
    else:
        config = transformers.AfmoeConfig(
            **sizes, num_hidden_layers=2, num_dense_layers=2, layer_types=["full_attention"] * 2
        )
        make = transformers.AfmoeForCausalLM
    return speakers.wrap_model(lambda: make(config), SPEAKERS["llama"])
