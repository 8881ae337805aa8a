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
"""Option of a tokenizer that `headscope convert` writes: what a language model says after a whole text is its end."""


def model_folder(folder: Path) -> Path:
    """Where the files of transformers are: in a folder, or in the encoder's part of a sentence-transformers model."""
    if os.path.isfile(folder / CONFIG) or not os.path.isfile(folder / MODULES):
        return folder
    return next(
        (folder / name for name in parts(folder) if "model_type" in json_object(folder / name / CONFIG)), folder
    )


def parts(folder: Path) -> list[str]:
    """The folders of the modules of a sentence-transformers model, but one that lies in the folder itself."""
    return [path for _, path in modules_of(folder) if path and Path(path).name == path and path != ".."]


def modules_of(home: Path) -> list[tuple[str, str]]:
    """Kinds and folders of the modules that `modules.json` lists: [("Transformer", ""), ("Pooling", "1_Pooling")]."""
    modules = read_if_json(home / MODULES)
    entries = [entry for entry in modules if isinstance(entry, dict)] if isinstance(modules, list) else []
    return [(str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path") or "")) for entry in entries]


def sentence_home(encoder: Path) -> Path | None:
    """The folder of the sentence-transformers model whose encoder lies in a folder: itself, or the one it lies in."""
    for home in (encoder, encoder.parent):
        if os.path.isfile(home / MODULES) and model_folder(home) == encoder and modules_of(home):
            return home
    return None


def copy_companions(source: Path, folder: Path) -> None:
    """Copy what lies beside the weights in `source` and is not written yet, modules behind an encoder among it."""
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
    """The directory of a checkpoint: itself, or where the hub's files are kept. None for a model without one."""
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
    """The content of a JSON file. Returns None if it is no JSON."""
    try:
        return read_json(path)
    except DataError:
        return None


def json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; an empty one where there is none."""
    content = read_if_json(path) if os.path.isfile(path) else None
    return content if isinstance(content, dict) else {}
