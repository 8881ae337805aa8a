"""What lies in a folder of transformers, read without the library: a model, one inside, an adapter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headscope.errors import DataError
from headscope.files.reading import read_json

CONFIG, MODULES, ADAPTER = "config.json", "modules.json", "adapter_config.json"
CLOSED = "texts_end_with_eos"
"""Option of a tokenizer that `headscope convert` writes: what a language model says after a whole text is its end."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, alone or beside its base model."""
    return os.path.isfile(folder / ADAPTER)


def model_folder(folder: Path) -> Path:
    """Where in a folder the files of transformers are: itself, or the encoder's part of a sentence-transformers model.

    That part (`0_Transformer`) is the whole encoder; pooling and what follows it have no heads.
    """
    if os.path.isfile(folder / CONFIG) or not os.path.isfile(folder / MODULES):
        return folder
    modules = read_if_json(folder / MODULES)
    names = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    inner = [name for name in names if isinstance(name, str) and Path(name).name == name]
    return next((folder / name for name in inner if _names_a_model(folder / name)), folder)


def _names_a_model(folder: Path) -> bool:
    config = read_if_json(folder / CONFIG) if os.path.isfile(folder / CONFIG) else None
    return isinstance(config, dict) and "model_type" in config


def read_if_json(path: Path) -> Any:
    """What a JSON file holds. Returns None if it is no JSON."""
    try:
        return read_json(path)
    except DataError:
        return None
