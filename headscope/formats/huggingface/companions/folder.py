"""Where the files of a transformers checkpoint lie: a model inside a folder, an adapter, companions of the weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from headscope.errors import DataError
from headscope.files.reading import read_json
from headscope.formats.diagnosis import VOCABULARIES

CONFIG, MODULES, ADAPTER = "config.json", "modules.json", "adapter_config.json"
MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SENTENCES = "config_sentence_transformers.json"
SENTENCE_SETTINGS = "sentence_*_config.json"
"""`sentence_bert_config.json`, or one of its older names: what is done with texts."""
SENTENCE_FILES = (MODULES, SENTENCES, "sentence_bert_config.json")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""How sound and pictures become numbers: files that no class of a model reads, and that its copy needs too."""
COMPANIONS = (
    *PROCESSORS, "video_preprocessor_config.json", "audio_tokenizer_config.json", "*.jinja", "chat_template.json",
    "additional_chat_templates", "generation_config.json", "normalizer.json", "added_tokens.json",
    "special_tokens_map.json", "tokenizer_config.json", *VOCABULARIES, SENTENCE_SETTINGS,
)  # fmt: skip
"""Files that a folder needs in order to load as before, whatever opens it, besides config.json and weights."""
ENDS_WITH_EOS = "texts_end_with_eos"
"""Option of tokenizers that `headscope convert` writes: the language model was trained to end whole texts."""


def model_folder(folder: Path) -> Path:
    """The folder with the files of transformers: itself, or the encoder's part of a sentence-transformers model."""
    if os.path.isfile(folder / CONFIG) or not os.path.isfile(folder / MODULES):
        return folder
    return next(
        (folder / name for name in parts(folder) if "model_type" in json_object(folder / name / CONFIG)), folder
    )


def parts(folder: Path) -> list[str]:
    """The subfolders with modules of a sentence-transformers model."""
    return [path for _, path in modules_of(folder) if path and Path(path).name == path and path != ".."]


def modules_of(home: Path) -> list[tuple[str, str]]:
    """Kinds and folders of the modules that `modules.json` lists: [("Transformer", ""), ("Pooling", "1_Pooling")]."""
    modules = read_if_json(home / MODULES)
    entries = [entry for entry in modules if isinstance(entry, dict)] if isinstance(modules, list) else []
    return [(str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path") or "")) for entry in entries]


def sentence_home(encoder: Path) -> Path | None:
    """The folder of the sentence-transformers model to which an encoder's folder belongs: itself, or its parent."""
    for home in (encoder, encoder.parent):
        if os.path.isfile(home / MODULES) and model_folder(home) == encoder and modules_of(home):
            return home
    return None


def copy_companions(source: Path, folder: Path) -> None:
    """Copy files beside the weights in `source` that are not in `folder` yet, with modules that follow an encoder."""
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if not (folder / file.name).exists():
                (shutil.copytree if file.is_dir() else shutil.copyfile)(file, folder / file.name)
    if (home := sentence_home(source)) is None:
        return
    for name in (*parts(home), SENTENCES):
        if (home / name).exists() and home / name != source:
            (shutil.copytree if (home / name).is_dir() else shutil.copyfile)(home / name, folder / name)
    modules = [
        {**entry, "path": ""} if home / entry["path"] == source else entry for entry in read_if_json(home / MODULES)
    ]
    (folder / MODULES).write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")


def local_folder(path: str) -> Path | None:
    """The directory of a checkpoint: itself, or that of the hub's cache. Returns None for a model without one."""
    if os.path.isdir(path):
        return Path(path)
    if os.path.isfile(path):
        return None
    from transformers.utils.hub import cached_file

    try:
        config = cached_file(path, CONFIG, local_files_only=True)
    except OSError:
        return None
    return None if config is None else Path(config).parent


def read_if_json(path: Path) -> Any:
    """The content of a JSON file. Returns None if it is not JSON."""
    try:
        return read_json(path)
    except DataError:
        return None


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    content = read_if_json(path) if os.path.isfile(path) else None
    return content if isinstance(content, dict) else {}
