"""Folders as they may come: sentence-transformers' layout, adapters (PEFT), and weights in several files.

An index of such files (`model.safetensors.index.json`) comes with a checkpoint, from whoever made it, and transformers
opens whatever path it says: only files of its own folder are let pass.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from headscope.errors import CheckpointError, DataError
from headscope.files.reading import read_json, read_object

CONFIG, MODULES, ADAPTER = "config.json", "modules.json", "adapter_config.json"
UNMERGEABLE = ("PROMPT", "P_TUNING", "PREFIX", "ADAPTION_PROMPT", "CPT")
"""Beginnings of the kinds of PEFT that add virtual tokens instead of changing weights."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, alone or beside its base model."""
    return os.path.isfile(folder / ADAPTER)


def model_folder(folder: Path) -> Path:
    """Where in a folder the files of transformers are: itself, or the encoder's part of a sentence-transformers model.

    That part (`0_Transformer`) is the whole encoder; pooling and what follows it have no heads.
    """
    if os.path.isfile(folder / CONFIG) or not os.path.isfile(folder / MODULES):
        return folder
    modules = _read(folder / MODULES)
    names = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    inner = [name for name in names if isinstance(name, str) and Path(name).name == name]
    return next((folder / name for name in inner if _names_a_model(folder / name)), folder)


def _names_a_model(folder: Path) -> bool:
    config = _read(folder / CONFIG) if os.path.isfile(folder / CONFIG) else None
    return isinstance(config, dict) and "model_type" in config


def refuse_adapter(folder: Path) -> None:
    """CheckpointError for a folder with an adapter, which says what it is and how to get the model that it makes."""
    if not is_adapter(folder):
        return
    stored = _read(folder / ADAPTER)
    adapter: dict[str, Any] = stored if isinstance(stored, dict) else {}
    base = str(adapter.get("base_model_name_or_path") or adapter.get("model_name") or "its base model")[:100]
    kind = str(adapter.get("peft_type") or "")[:40].upper()
    merge = (
        f"merge the adapter in Python (PeftModel.from_pretrained(MODEL, {str(folder)!r}).merge_and_unload()"
        ".save_pretrained(DIR), and the tokenizer) and open DIR"
    )
    if kind.startswith(UNMERGEABLE):
        merge = f"{kind} adds virtual tokens, which cannot be merged: open {base} itself"
    if os.path.isfile(folder / CONFIG):
        raise CheckpointError(
            f"{folder} holds a model and an adapter ({ADAPTER}), and the model without it computes something else: "
            f"{merge}, or move {ADAPTER} elsewhere to open the model without it"
        )
    named = f"{kind} adapter" if kind else "adapter"
    raise CheckpointError(f"{folder} holds no model but an adapter of one ({named} of {base}): {merge}")


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except DataError:
        return None


INDEX = "*.index.json"


def check_shards(folder: Path) -> None:
    """CheckpointError where an index of a folder is malformed, or names a file that lies elsewhere.

    Files of the hub's cache are links from `snapshots/REVISION` to `blobs` beside `snapshots`; others may be links
    within the folder alone.
    """
    for index in sorted(folder.glob(INDEX)):
        shards = read_object(index, error=CheckpointError).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{index} has no weight_map of names of files; fetch the checkpoint again")
        for name in sorted(set(shards.values())):
            if not _is_inside(folder, name):
                raise CheckpointError(
                    f"{index} names {name[:100]!r}, which lies outside its folder; the weights of a checkpoint have "
                    "to be files of its own folder: copy them there, or fetch the checkpoint again"
                )


def _is_inside(folder: Path, name: str) -> bool:
    paths = PurePosixPath(name), PureWindowsPath(name)
    if "\0" in name or any(path.is_absolute() or path.drive or ".." in path.parts for path in paths):
        return False
    home, file = folder.resolve(), (folder / name).resolve()
    of_cache = home.parent.name == "snapshots" and file.parent == home.parent.parent / "blobs"
    return file.is_relative_to(home) or of_cache
