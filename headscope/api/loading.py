"""`load`: open a model from files of any format, from the hub, or from memory."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headscope.api.model import Model
from headscope.api.options import PathName, in_python
from headscope.config import Companions
from headscope.errors import CheckpointError, ConfigError
from headscope.formats.base import open_checkpoint
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.formats.weights import refuse_damaged_model
from headscope.model.storage.stored_weights import is_packing


class InMemoryCheckpoint(HuggingFaceCheckpoint):
    """A transformers model in memory: neither copied nor moved, and its mode is restored after each call."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        super().__init__(path=f"{type(model).__name__} in memory", model=model, tokenizer=tokenizer, digest=None)

    def _tokenizer(self) -> Any:
        if self.tokenizer is None and self._reads == "input_ids":
            raise CheckpointError(
                f"{self.path} cannot read text without its tokenizer; load(model, tokenizer=tokenizer)"
            )
        return super()._tokenizer()


@in_python
def load(
    source: PathName | nn.Module | Model,
    *,
    tokenizer: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    format: str | None = None,
    dicts: PathName | None = None,
    hp: PathName | None = None,
    bpe: PathName | None = None,
) -> Model:
    """Open a model.

    source: a checkpoint of any format (a file, a directory or a hub id), or a transformers model that is already in
        memory. The latter is used as it is: every call leaves its weights, device, mode (train or eval), hooks and
        attention implementation as they were.
    tokenizer: of a model in memory; without it the model can be captured and gated, not read text.
    device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps". A model in memory stays where it is.
    dtype: "auto" (as stored, float32 on a CPU), "float32", "float64", "bfloat16", "float16".
    device_map: "auto" spreads a Hugging Face model over GPUs, the CPU's memory and the disk, or a JSON file says which
        module goes where ("cuda:0", "cpu", "disk"); needs accelerate (`pip install 'headscope[large]'`).
    format: the checkpoint's format; default: found from its content.
    dicts, hp, bpe: files that belong to a fairseq or story-of-heads checkpoint (dictionaries, hyper-parameters, codes
        that split text); default: dictionaries beside the checkpoint, text already split.

    CheckpointError where there is no such checkpoint or it is broken, ConfigError for options that do not fit.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, (str, PathLike)):
        if tokenizer is not None:
            raise ConfigError("tokenizer= is for a model in memory; a checkpoint has its own")
        files = {"dicts": dicts, "hp": hp, "bpe": bpe}
        companions = Companions(**{name: Path(path) for name, path in files.items() if path is not None})
        opened = open_checkpoint(
            str(source), format=format, device=device, dtype=dtype, device_map=device_map, companions=companions
        )
        return Model(opened, companions=companions)
    if not isinstance(source, PreTrainedModel):
        raise ConfigError(
            f"source: a {type(source).__name__} cannot be loaded; give a checkpoint's path, a hub id, or a "
            "transformers model (the model itself, not what wraps it)"
        )
    checkpoint_options = {
        "device": device != "auto",
        "dtype": dtype != "auto",
        "device_map": device_map,
        "format": format,
        "dicts": dicts,
        "hp": hp,
        "bpe": bpe,
    }
    if useless := [name for name, value in checkpoint_options.items() if value]:
        raise ConfigError(f"{useless[0]}= is for checkpoints on disk; a model in memory is used as it is")
    if is_packing(source):
        raise ConfigError(
            "bitsandbytes packs the 4-bit weights of this model for the CPU, and no gradient goes through them then; "
            "load it by its path"
        )
    checkpoint = InMemoryCheckpoint(source, tokenizer)
    refuse_damaged_model(checkpoint.path, source)
    return Model(checkpoint)
