"""Hugging Face directories and hub ids: how they are recognised and written, without importing transformers early."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.config import Companions
from headscope.errors import DataError, flag
from headscope.files.reading import read_json
from headscope.formats.base import FORMATS, CheckpointFormat
from headscope.formats.diagnosis import WEIGHT_FILES
from headscope.formats.exports import MASKED, SAME, Export, Probe, SavedFiles
from headscope.formats.huggingface.companions.folder import ADAPTER, CONFIG, local_folder, model_folder, sentence_home
from headscope.formats.transformer_checkpoint import TransformerCheckpoint

if TYPE_CHECKING:
    from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint

OPENS_OWN_CODE = (
    "transformers, with the modelling file beside the weights: `from_pretrained(FOLDER, trust_remote_code=True)`",
    "headscope, which runs no code of the folder",
)


def _lazily(name: str) -> Any:
    """A function of `selfcontained`, which is imported when it is called."""
    return lambda *arguments: getattr(import_module("headscope.formats.huggingface.selfcontained"), name)(*arguments)


class FolderFormat(CheckpointFormat["HuggingFaceCheckpoint"]):
    """A format that is opened as a model of transformers, and written as a Hugging Face folder."""

    exports = (
        replace(SAME, name="self-contained", adds_bias=True),
        Export(
            name="native",
            build=lambda checkpoint, plan: _lazily("in_plain_class")(checkpoint.alter_heads(plan, "shrink"), plan),
            refine=_lazily("in_plain_class"),
            padded=_lazily("padded_in_plain_class"),
            holds=_lazily("says_head_width"),
        ),
        MASKED,
    )
    export_names = ("self-contained", "native", "masked")

    def write(self, checkpoint: HuggingFaceCheckpoint, folder: Path) -> SavedFiles:
        from headscope.formats.huggingface.selfcontained import plain_name, write_folder

        own_code = write_folder(checkpoint, folder)
        name, source = plain_name(checkpoint.model), local_folder(checkpoint.path)
        notes = list[str]()
        if self.name != "huggingface":
            notes.append(
                f"written as a huggingface folder: headscope reads {self.name} files and writes none with this command"
            )
        if source is not None and sentence_home(source) is not None:
            trust = ", trust_remote_code=True" if own_code else ""
            notes.append(f"opens with SentenceTransformer(folder{trust}): modules, prompts and settings are copied")
        if not own_code:
            opens = (
                f"transformers, without any code of its own: class {name}",
                f"programs that read such folders, as far as they take {name} with the head_dim of config.json",
                "headscope",
            )
            return SavedFiles(folder, "huggingface", tuple(notes), opens=opens)
        limit = (
            f"programs that build class {name} themselves (vLLM, SGLang, llama.cpp's converter): "
            "it has one number of heads for all layers. For them: `prune rank --allocate uniform`, then `prune remove "
            f"{flag.export} native`, or `--pad`; for llama.cpp `--export gguf`; of layers as Qwen3's `--export laguna`"
        )
        limits = (limit, *adapter_limit(checkpoint.config))
        return SavedFiles(folder, "huggingface", tuple(notes), OPENS_OWN_CODE, limits)


class HuggingFaceFormat(FolderFormat):
    """A directory with config.json and safetensors or .bin weights, or a hub id."""

    name = "huggingface"
    summary = "a directory with config.json (with a model_type) and *.safetensors or *.bin, or a hub id"
    converts = True
    spreads = True
    names = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
    takes = frozenset({"src_lang", "tgt_lang", "task"})

    def recognise(self, path: Path) -> bool:
        if (path / ADAPTER).is_file():
            return True  # `load` says what to do
        config_file = model_folder(path) / CONFIG
        if not config_file.is_file():
            return False
        try:
            config = read_json(config_file)
        except DataError:
            return True  # not JSON: `load` says so
        weights = any(file for name in WEIGHT_FILES for file in config_file.parent.glob(name))
        return isinstance(config, dict) and ("model_type" in config or weights)  # `load` says what is missing

    def load(
        self, path: str, *, device: str, dtype: str, companions: Companions, device_map: str | None = None
    ) -> HuggingFaceCheckpoint:
        from headscope.formats.huggingface.opening import open_model

        return open_model(path, device=device, device_map=device_map, dtype=dtype, companions=companions)

    def convert(self, checkpoint: TransformerCheckpoint, folder: Path, probe: Probe) -> SavedFiles:
        from headscope.formats.huggingface.from_native import convert_checkpoint

        return convert_checkpoint(checkpoint, folder, probe)


FORMATS.register("huggingface", HuggingFaceFormat(), where=__name__)


def adapter_limit(config: Any) -> tuple[str, ...]:
    """The limit of PEFT with layers without heads, and its setting that leaves them out; empty if all have heads."""
    if not (empty := config.narrowed["empty"]):
        return ()
    pattern = f"(.*[.])?({'|'.join(map(re.escape, empty))})[.].*"
    return (
        "PEFT, where adapters are for projections by name: layers without heads have none. Leave these out: "
        f'`LoraConfig(target_modules=[…], exclude_modules=r"{pattern}")`; '
        '`target_modules="all-linear"` finds the others by itself',
    )
