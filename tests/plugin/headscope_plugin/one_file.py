"""A checkpoint format: a native Transformer in one safetensors file, its config in the file's header."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headscope.config import Companions
from headscope.config.option import make_config, plain_config
from headscope.errors import CheckpointError, ConfigError
from headscope.files.reading import file_digest
from headscope.formats.base import FORMATS, CheckpointFormat, SavedFiles
from headscope.formats.native import native_state
from headscope.formats.transformer_checkpoint import TransformerCheckpoint, build_transformer
from headscope.model.native.transformer_config import TransformerConfig

KEY = "one-file-config"


class OneFile(CheckpointFormat[TransformerCheckpoint]):
    """One file NAME.safetensors; it has no vocabulary, so such a model reads no text."""

    name = "one_file"
    summary = f"a .safetensors file with the entry {KEY} in its header"

    def recognise(self, path: Path) -> bool:
        try:
            with safe_open(path, framework="pt") as file:
                return KEY in (file.metadata() or {})
        except (SafetensorError, OSError):
            return False

    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> TransformerCheckpoint:
        try:
            with safe_open(path, framework="pt") as file:
                config = make_config(TransformerConfig, json.loads(file.metadata()[KEY]))
                state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{path} is no checkpoint of one file ({str(error).splitlines()[0]})") from None
        return TransformerCheckpoint(
            path=path,
            format=self.name,
            model=build_transformer(path, config, state).to(device),
            model_type="transformer",
            digest=file_digest([Path(path)]),
            source=None,
            target=None,
        )

    def write(self, checkpoint: TransformerCheckpoint, folder: Path) -> SavedFiles:
        path = folder / f"{Path(checkpoint.path).stem}.safetensors"
        header = {KEY: json.dumps(plain_config(checkpoint.model.config))}
        save_file(native_state(checkpoint.model, checkpoint.file_types), path, metadata=header)
        return SavedFiles(path, self.name)


FORMATS.register(OneFile.name, OneFile(), where=__name__)
