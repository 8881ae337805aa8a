"""Tiny models of speech: a Whisper of two layers of three heads a side, with random weights."""

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 7))},
    **{"encoder_attention_heads": 3, "decoder_attention_heads": 3, "d_model": 12, "num_mel_bins": 5},
    **{"max_source_positions": 50, "max_target_positions": 31, "init_std": 0.4},
}


def whisper(**options: Any) -> Any:
    """A model whose generation settings are written beside it as they are set."""
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SIZES | options)).eval()
    model.generation_config._from_model_config = False  # transformers would drop what is set
    return model
