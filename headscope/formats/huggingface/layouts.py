"""Folders that hold a model in another layout than transformers' own: sentence-transformers, and adapters (PEFT)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headscope.errors import CheckpointError, DataError
from headscope.files.reading import is_file, read_json

CONFIG, MODULES, ADAPTER = "config.json", "modules.json", "adapter_config.json"
UNMERGEABLE = ("PROMPT", "P_TUNING", "PREFIX", "ADAPTION_PROMPT", "CPT")
"""Beginnings of the kinds of PEFT that add virtual tokens instead of changing weights."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, alone or beside its base model."""
    return is_file(folder / ADAPTER)


def model_folder(folder: Path) -> Path:
    """Where in a folder the files of transformers are: itself, or the encoder's part of a sentence-transformers model.

    That part (`0_Transformer`) is the whole encoder; pooling and what follows it have no heads.
    """
    if is_file(folder / CONFIG) or not is_file(folder / MODULES):
        return folder
    modules = _read(folder / MODULES)
    names = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    inner = [name for name in names if isinstance(name, str) and Path(name).name == name]
    return next((folder / name for name in inner if _names_a_model(folder / name)), folder)


def _names_a_model(folder: Path) -> bool:
    config = _read(folder / CONFIG) if is_file(folder / CONFIG) else None
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
    if is_file(folder / CONFIG):
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
