"""Where the files of a transformers checkpoint lie: a model inside a folder, an adapter, companions of the weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headscope.errors import DataError
from headscope.files.reading import read_json

CONFIG, MODULES, ADAPTER = "config.json", "modules.json", "adapter_config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""How sound and pictures become numbers: files that no class of a model reads, and that its copy needs too."""
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
    return next((folder / name for name in _parts(folder) if _names_a_model(folder / name)), folder)


def _parts(folder: Path) -> list[str]:
    """The folders of the modules of a sentence-transformers model, but one that lies in the folder itself."""
    modules = read_if_json(folder / MODULES)
    names = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return [name for name in names if isinstance(name, str) and name and Path(name).name == name]


def pooling_note(path: str) -> tuple[str, ...]:
    """What a copy of the encoder of a sentence-transformers model lacks, and where it is; nothing of other models."""
    if (encoder := local_folder(path)) is None:
        return ()
    homes = [folder for folder in (encoder, encoder.parent) if os.path.isfile(folder / MODULES)]
    if not homes or model_folder(homes[0]) != encoder or not _parts(homes[0]):
        return ()
    home, names = homes[0].resolve().name, [MODULES, *_parts(homes[0])]
    beside = f"copy {', '.join(names[:-1])} and {names[-1]} of it into the folder"
    instead = f"put the folder in place of {encoder.name} in a copy of it"
    return (
        f"SentenceTransformer takes the mean of this encoder's states; for what {home} says instead, "
        f"{beside if homes[0] == encoder else instead}",
    )


def local_folder(path: str) -> Path | None:
    """The directory of a checkpoint: itself, or where the hub's files are kept. None for a model that has no files."""
    if os.path.isdir(path):
        return Path(path)
    from transformers.utils.hub import cached_file

    try:
        config = cached_file(path, CONFIG, local_files_only=True)
    except OSError:
        return None
    return None if config is None else Path(config).parent


def _names_a_model(folder: Path) -> bool:
    config = read_if_json(folder / CONFIG) if os.path.isfile(folder / CONFIG) else None
    return isinstance(config, dict) and "model_type" in config


def read_if_json(path: Path) -> Any:
    """What a JSON file holds. Returns None if it is no JSON."""
    try:
        return read_json(path)
    except DataError:
        return None
