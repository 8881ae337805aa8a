"""Models that write text for sound as Whisper does: always as many frames, halved by convolutions to positions."""

from __future__ import annotations

from typing import Any

from torch import nn


def reads_sound(model: nn.Module) -> bool:
    """Whether an encoder reads features of sound [b bins frames] of one fixed length, and a decoder writes text."""
    config: Any = getattr(model, "config", None)
    sizes = all(isinstance(getattr(config, name, None), int) for name in ("num_mel_bins", "max_source_positions"))
    return sizes and getattr(model, "main_input_name", "") == "input_features" and bool(config.is_encoder_decoder)


def features_shape(config: Any) -> tuple[int, int, int]:
    """Shape [1 bins frames] of the features of one recording: two frames for each position of the encoder."""
    return 1, config.num_mel_bins, 2 * config.max_source_positions
