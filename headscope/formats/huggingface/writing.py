"""Hugging Face directories as they are written: in the type of the source, self-contained where heads are removed."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from headscope.errors import CheckpointError
from headscope.files.writing import write_failure
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.native_models.from_native import quiet_transformers
from headscope.formats.huggingface.selfcontained import is_narrowed, write_code

STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def write_folder(checkpoint: Checkpoint, folder: Path) -> bool:
    """Write weights in the type that the source stores them in, config, and tokenizer.

    Returns whether there is a modelling file too, because the class in transformers cannot hold the model.
    """
    model: Any = with_stored_dtype(checkpoint)
    config = model.config
    narrowed = is_narrowed(config)
    if narrowed:
        config.auto_map = write_code(folder, config, model)
    elif hasattr(config, "auto_map"):
        del config.auto_map
    with quiet_transformers():
        try:
            model.save_pretrained(folder)
        except Exception as error:  # whatever transformers may raise
            if write_failure(error):
                raise
            raise CheckpointError(f"it cannot be saved: {' '.join(str(error).split())[:200]}") from error
        tokenizer = getattr(checkpoint, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path := Path(checkpoint.path) / name).is_file():
            shutil.copyfile(path, folder / name)
    _drop_auto_map_of_others(folder)
    return narrowed


def with_stored_dtype(checkpoint: Checkpoint) -> nn.Module:
    """The model in the type that its checkpoint stores, where it was widened to compute with it."""
    stored = _stored_dtype(checkpoint.path)
    if stored is None or torch.promote_types(stored, checkpoint.dtype) != checkpoint.dtype:
        return checkpoint.model
    if stored == checkpoint.dtype:
        return checkpoint.model
    return copy.deepcopy(checkpoint.model).to(stored)


def _stored_dtype(path: str) -> torch.dtype | None:
    """The one type of all weights of a local folder, what config.json says elsewhere; None where there are several."""
    from transformers import AutoConfig

    if files := list(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []:
        dtypes = set()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                dtypes |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
        return STORED.get(dtypes.pop()) if len(dtypes) == 1 else None
    try:
        with quiet_transformers():
            dtype = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True).dtype
    except (OSError, ValueError):
        return None
    return dtype if isinstance(dtype, torch.dtype) else None


def _drop_auto_map_of_others(folder: Path) -> None:
    """A tokenizer's own remote code does not come along, so nothing may refer to it."""
    path = folder / "tokenizer_config.json"
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("auto_map", None) is not None:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
