"""Checkpoints of models that lie in memory, as if they were opened."""

from typing import Any

from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint

DIGEST = "0" * 64


def hugging_face(model: Any, tokenizer: Any = None) -> HuggingFaceCheckpoint:
    return HuggingFaceCheckpoint(path="memory", model=model, tokenizer=tokenizer, digest=DIGEST)


def native(model: Any, source: Any = None, target: Any = None, **more: Any) -> TransformerCheckpoint:
    fields = {"path": "memory", "format": "native", "model_type": "transformer", "digest": DIGEST, **more}
    return TransformerCheckpoint(model=model, source=source, target=target, **fields)
