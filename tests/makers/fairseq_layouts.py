"""Layouts of fairseq checkpoints, and what their models compute for one pair of sentences."""

from typing import Any

import torch

from headscope.formats.fairseq.format import FairseqCheckpoint
from tests.oracles import fairseq

PRE = {"encoder_normalize_before": True, "decoder_normalize_before": True}
TIED = {"share_decoder_input_output_embed": True}
UNEQUAL = {"decoder_embed_dim": 8, "decoder_attention_heads": 2, "decoder_layers": 3, "decoder_ffn_embed_dim": 14}
SOURCE, PREVIOUS = [5, 9, 4, 3, 17, 2], [2, 7, 4, 12, 3]


def logits_of(checkpoint: FairseqCheckpoint) -> torch.Tensor:
    previous = torch.tensor([PREVIOUS])
    with torch.no_grad():
        if checkpoint.two_sided:
            output: torch.Tensor = checkpoint.model(torch.tensor([SOURCE]), previous)
        else:
            output = checkpoint.model(target=previous)
    return output[0]


LAYOUTS: dict[str, dict[str, Any]] = {
    "post-norm, tied": TIED,
    "trained with LayerDrop, which evaluates all layers": TIED | {"encoder_layerdrop": 0.2, "decoder_layerdrop": 0.1},
    "post-norm, untied, gelu": {"activation_fn": "gelu"},
    "pre-norm, learned positions": PRE | {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "pre-norm decoder only": {"decoder_normalize_before": True, "activation_fn": "gelu_fast"},
    "no final norm": PRE | {"no_decoder_final_norm": True},
    "all shared, norm of embeddings": {"share_all_embeddings": True, "layernorm_embedding": True},
    "no positions, no scale": TIED | {"no_token_positional_embeddings": True, "no_scale_embedding": True},
    "unequal sides": UNEQUAL,
    "projections": {"decoder_input_dim": 6, "decoder_output_dim": 10},
    "projections, tied": TIED | {"decoder_input_dim": 6, "decoder_output_dim": 6},
}
LMS: dict[str, dict[str, Any]] = {
    "lm": TIED,
    "lm, gelu, learned": {"activation_fn": "gelu", "decoder_learned_pos": True, "layernorm_embedding": True},
    "lm, with filters that only character embeddings read": TIED | {"character_filters": "[(1, 64), (2, 128)]"},
    "lm, no final norm": {"no_decoder_final_norm": True, "no_scale_embedding": True},
}
OPTIONS = {n: fairseq.BASE | more for n, more in LAYOUTS.items()} | {n: fairseq.LM | more for n, more in LMS.items()}
