"""headscope's own checkpoints: a directory with config.toml, model.safetensors and the vocabularies.

`config.toml` has the `TransformerConfig`, how to search, and how each side splits text; `model.safetensors` has the
state dict of the model, tied weights once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headscope.config import Companions
from headscope.config.option import make_config, plain_config
from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.errors import CheckpointError, ConfigError, DataError, HeadscopeError, reason_of, restate
from headscope.files.output_checks import OutputKind
from headscope.files.reading import file_digest, read_bytes, read_json, read_toml, to_toml
from headscope.formats.base import FORMATS, CheckpointFormat, SavedFiles
from headscope.formats.exports import Probe
from headscope.formats.transformer_checkpoint import TransformerCheckpoint, build_transformer, probe_logits
from headscope.model.native.beams import SearchConfig
from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import TransformerConfig
from headscope.model.nonfinite import refuse_damaged_file
from headscope.model.stored_weights import written_type

FORMAT, VERSION = "headscope", 1
CONFIG, WEIGHTS = "config.toml", "model.safetensors"
SIDES = ("source", "target")
IDS = ("start", "end", "unknown", "pad", "special", "prefix", "suffix", "begin")
"""Fields of a vocabulary that config.toml has, beside how text is split; its files are named after the side."""
FORMER = ("files", "checksum")  # digests in files of earlier versions; they are not read
FILES = (CONFIG, WEIGHTS, *(f"{side}.{part}" for side in SIDES for part in ("pieces.json", "codes")))
DIRECTORY = OutputKind("checkpoint", "native checkpoint", "", FILES)


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """The content of config.toml."""

    format: str
    version: int
    model: TransformerConfig
    search: SearchConfig = SearchConfig()
    source: Mapping[str, Any] | None = None
    target: Mapping[str, Any] | None = None
    origin: str = "transformer"


_LIMIT = "other programs: `headscope convert` makes a Hugging Face folder of it, as far as transformers has a class"


class NativeFormat(CheckpointFormat[TransformerCheckpoint]):
    """A directory with config.toml and model.safetensors."""

    name = "native"
    summary = f"a directory with {CONFIG} (format = {FORMAT!r}) and {WEIGHTS}"
    kind = DIRECTORY
    converts = True

    def recognise(self, path: Path) -> bool:
        try:
            return path.is_dir() and read_toml(path / CONFIG).get("format") == FORMAT
        except HeadscopeError:  # damaged, if it is there
            return all((path / name).is_file() for name in (CONFIG, WEIGHTS))

    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> TransformerCheckpoint:
        folder = Path(path)
        with restate(CheckpointError, f"{folder / CONFIG}: {{why}}", ConfigError):
            values = read_toml(folder / CONFIG)
            if (values.get("format"), version := values.get("version")) != (FORMAT, VERSION):
                raise ConfigError(f"it is version {version} of {values.get('format')!r}, and version {VERSION} is read")
            content = make_config(ConfigFile, {name: value for name, value in values.items() if name not in FORMER})
        try:
            state = load_file(folder / WEIGHTS)
        except FileNotFoundError:
            raise CheckpointError(f"there is no {folder / WEIGHTS}; a native checkpoint needs its weights") from None
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            why = reason_of(error, max_length=200)
            raise CheckpointError(f"{folder / WEIGHTS} is truncated or broken ({why})") from None
        refuse_damaged_file(folder / WEIGHTS, state)
        model, file_types = placed_transformer(path, content.model, state, dtype=dtype, device=device)
        with restate(CheckpointError, f"{path}: {{why}}", ConfigError, DataError):
            sides = [_read_side(folder, name, getattr(content, name)) for name in SIDES]
        return TransformerCheckpoint(
            path=path,
            format=self.name,
            model=model,
            model_type=content.origin,
            digest=file_digest([folder / CONFIG, folder / WEIGHTS]),
            source=sides[0],
            target=sides[1],
            search=content.search,
            file_types=file_types,
        )

    def write(self, checkpoint: TransformerCheckpoint, folder: Path) -> SavedFiles:
        sides = {name: side for name in SIDES if (side := getattr(checkpoint, name)) is not None}
        save_file(native_state(checkpoint.model, checkpoint.file_types), folder / WEIGHTS, metadata={"format": "pt"})
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "origin": checkpoint.model_type,
            "model": plain_config(checkpoint.model.config),
            "search": plain_config(checkpoint.search),
            **{name: _write_side(folder, name, side) for name, side in sides.items()},
        }
        (folder / CONFIG).write_text(to_toml(content), encoding="utf-8")
        return SavedFiles(folder, self.name, (), ("headscope",), (_LIMIT,))

    def convert(self, checkpoint: TransformerCheckpoint, folder: Path, probe: Probe) -> SavedFiles:
        files = self.write(checkpoint, folder)
        copy = self.load(str(folder), device="cpu", dtype="float64", companions=Companions())
        notes = () if checkpoint.target is not None else ("no vocabulary: the checkpoint came without",)
        return replace(files, notes=notes, architecture="Transformer", logits=probe_logits(copy.model, probe))


NATIVE = NativeFormat()
FORMATS.register("native", NATIVE, where=__name__)


def native_state(model: Transformer, file_types: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """The state dict as it is written: tied weights once, on the CPU, in its `file_types` if that loses nothing."""
    return {
        key: value.detach().cpu().contiguous().to(written_type(key, value, file_types.get))
        for key, value in model.state_dict().items()
        if key not in model.tied()
    }


def placed_transformer(
    path: str, config: TransformerConfig, state: Mapping[str, Tensor], *, dtype: str, device: str
) -> tuple[Transformer, dict[str, torch.dtype]]:
    """The model in a type and on a device, and with "auto" the types of its file's weights by name.

    "auto" is the stored type; float32 if types are mixed, unusual, or half precision on a CPU.
    """
    model = build_transformer(path, config, state)  # its type changes first: not every device has float64
    if dtype != "auto":
        return model.to(getattr(torch, dtype)).to(device), {}
    file_types = {key: tensor.dtype for key, tensor in state.items() if tensor.is_floating_point()}
    types = set(file_types.values())
    usual = {torch.float32, torch.float64} | (set() if device == "cpu" else {torch.float16, torch.bfloat16})
    return model.to(types.pop() if len(types) == 1 and types <= usual else torch.float32).to(device), file_types


def _write_side(folder: Path, name: str, vocabulary: Vocabulary) -> dict[str, Any]:
    splitter = vocabulary.splitter
    pieces = json.dumps(vocabulary.subwords, ensure_ascii=False, indent=0) + "\n"
    (folder / f"{name}.pieces.json").write_text(pieces, encoding="utf-8")
    if splitter.codes is not None:
        (folder / f"{name}.codes").write_bytes(splitter.codes)
    ids = {entry: value for entry in IDS if (value := getattr(vocabulary, entry)) is not None}
    ids = {entry: value if isinstance(value, int) else [*value] for entry, value in ids.items()}
    return {"kind": splitter.kind, **ids, "special": sorted(vocabulary.special), "codes": splitter.codes is not None}


def _read_side(folder: Path, name: str, table: Any) -> Vocabulary | None:
    if table is None:
        return None
    codes = read_bytes(folder / f"{name}.codes", name=f"{name}.codes") if table.get("codes") else None
    parts = {"subwords": read_json(folder / f"{name}.pieces.json"), "splitter": Splitter(table.get("kind"), codes)}
    return make_config(Vocabulary, {**parts, **{entry: table[entry] for entry in IDS if entry in table}})
