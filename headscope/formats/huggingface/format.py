"""Hugging Face directories and hub ids: how they are recognised, opened, and written.

transformers fills what a weights file lacks with fresh random numbers and says so in a log line at most, so every
missing, left-over and mismatched weight is checked here.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel

from headscope.bounds import MOST_LAYERS
from headscope.config import Companions
from headscope.errors import CheckpointError, DataError, HeadscopeError, shortlist
from headscope.files.hub import is_cached
from headscope.files.reading import read_json
from headscope.formats.base import FORMATS, MASKED, SAME, CheckpointFormat, Export, SavedFiles
from headscope.formats.exports import Conversion, Probe
from headscope.formats.huggingface import decilm
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.formats.huggingface.layouts import check_shards, is_adapter, model_folder, refuse_adapter
from headscope.formats.huggingface.native_models.from_native import converted, quiet_transformers
from headscope.formats.huggingface.plain_class import in_plain_class, padded_in_plain_class, says_head_width
from headscope.formats.huggingface.removal.kept_heads import check_kept_heads
from headscope.formats.huggingface.selfcontained import is_narrowed, narrowed_class, plain_name, write_folder
from headscope.formats.huggingface.speech import SpeechCheckpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.formats.weights import file_digest
from headscope.model.sound import reads_sound
from headscope.model.storage.placement import check_devices, check_quantisation, pick_device, placement
from headscope.model.storage.stored_weights import keep_differentiable

WEIGHTS = ("*.safetensors", "*.bin")
# Files that hold a vocabulary; without any, transformers 5 makes up a tokenizer that knows no word.
VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json")
# Weights that a checkpoint may lack without any head being affected: the pooler is trained with a task.
_MAY_BE_MISSING = re.compile(r"(^|\.)pooler\.")
_LAYER = re.compile(r"\.\d+\.")
OPENS_OWN_CODE = (
    "transformers, with the modelling file beside the weights: `from_pretrained(FOLDER, trust_remote_code=True)`",
    "headscope, which runs no code of the folder",
)


class HuggingFaceFormat(CheckpointFormat[HuggingFaceCheckpoint]):
    """A directory with config.json and safetensors or .bin weights, or a hub id."""

    name = "huggingface"
    summary = "a directory with config.json (with a model_type) and *.safetensors or *.bin, or a hub id"

    exports = (
        replace(SAME, name="self-contained", adds_bias=True),
        Export(
            name="native",
            build=lambda checkpoint, plan: in_plain_class(checkpoint.without_heads(plan), plan),
            after="self-contained",
            refine=in_plain_class,
            padded=padded_in_plain_class,
            holds=lambda checkpoint: says_head_width(checkpoint.model),
        ),
        MASKED,
    )
    export_names = ("self-contained", "native", "masked")
    converts = True

    def recognise(self, path: Path) -> bool:
        if is_adapter(path):
            return True  # `load` says what to do
        config_file = model_folder(path) / "config.json"
        if not os.path.isfile(config_file):
            return False
        try:
            config = read_json(config_file)
        except DataError:
            return True  # not JSON: `load` says so
        return isinstance(config, dict) and "model_type" in config

    def recognise_name(self, name: str) -> bool:
        return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is not None

    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> HuggingFaceCheckpoint:
        return self._load(path, device=device, device_map=None, dtype=dtype)

    def load_mapped(self, path: str, *, device_map: str, dtype: str, companions: Companions) -> HuggingFaceCheckpoint:
        return self._load(path, device=pick_device("auto"), device_map=device_map, dtype=dtype)

    def _load(self, path: str, *, device: str, device_map: str | None, dtype: str) -> HuggingFaceCheckpoint:
        if os.path.exists(path):
            refuse_adapter(Path(path))
            inner = model_folder(Path(path))
            path = path if inner == Path(path) else str(inner)
            check_shards(inner)
        elif not ("/" in path or is_cached(path) or _hub_has(path)):
            raise CheckpointError(
                f"there is no file or directory {path}; a model of the hub is written OWNER/NAME, such as "
                "google-bert/bert-base-uncased"
            )
        options = {"trust_remote_code": False, "local_files_only": os.path.exists(path) or _hub_has(path) is None}
        with _quiet(path), ExitStack() as stack:
            config, absent = _config(path, options)
            _check_depth(config)
            _forget_kernels(config)
            quantised = check_quantisation(path, config) is not None
            placed = stack.enter_context(placement(device, device_map, quantised=quantised))
            plain = _model_class(path, config)
            model, info = (narrowed_class(plain) if is_narrowed(config) else plain).from_pretrained(
                path,
                config=config,
                dtype=_dtype(dtype, config, "" if device_map else device),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, with their names
                **placed,
                **options,
            )
            weakref.finalize(model, stack.pop_all().close)
        _check_weights(path, info, absent)
        if model.dtype == torch.float64:
            model.set_experts_implementation("eager")  # the others' matrix products have no double precision
        check_devices(model, placed.get("device_map"))
        keep_differentiable(model)
        model = (model if placed else model.to(device)).eval()
        if is_narrowed(config):
            check_kept_heads(model, path)
        tokenizer, without = _open_tokenizer(path, options)
        kind = SpeechCheckpoint if reads_sound(model) else HuggingFaceCheckpoint
        return kind(path=path, model=model, tokenizer=tokenizer, digest=_digest(path), without=without)

    def write(self, checkpoint: HuggingFaceCheckpoint, folder: Path, companions: Companions) -> SavedFiles:
        own_code = write_folder(checkpoint, folder)
        name = plain_name(checkpoint.model)
        if not own_code:
            opens = (
                f"transformers, without any code of its own: class {name}",
                f"programs that read such folders, as far as they take {name} with the head_dim of config.json",
                "headscope",
            )
            return SavedFiles(folder, self.name, opens=opens)
        note = "opens with AutoModel….from_pretrained(folder, trust_remote_code=True), without headscope"
        limit = (
            f"programs that build class {name} themselves (vLLM, SGLang, llama.cpp's converter): "
            "it has one number of heads for all layers. For them: `prune rank --allocate uniform`, then `prune remove "
            "--export native`, or `--pad`; for llama.cpp `--export gguf`; of layers as Qwen3's `--export laguna`"
        )
        return SavedFiles(folder, self.name, (note,), OPENS_OWN_CODE, (limit, *adapter_limit(checkpoint.config)))

    def convert(self, checkpoint: TransformerCheckpoint, folder: Path, probe: Probe) -> Conversion:
        return converted(checkpoint, folder, probe)


FORMATS.register("huggingface", HuggingFaceFormat(), where=__name__)


def adapter_limit(config: Any) -> tuple[str, ...]:
    """How PEFT leaves out layers without heads, whose projections it does not know; nothing where all layers have some.

    Its option is matched against whole names of modules.
    """
    if not (empty := config.narrowed["empty"]):
        return ()
    pattern = f"(.*[.])?({'|'.join(map(re.escape, empty))})[.].*"
    return (
        "PEFT, where adapters are for projections by name: layers without heads have none. Leave these out: "
        f'`LoraConfig(target_modules=[…], exclude_modules=r"{pattern}")`; '
        '`target_modules="all-linear"` finds the others by itself',
    )


def _config(path: str, options: dict[str, bool]) -> tuple[Any, frozenset[str]]:
    """What config.json describes, and the names of weights that no file has because nothing reads them."""
    values, _ = PretrainedConfig.get_config_dict(path, **options)
    if values.get("model_type") == decilm.MODEL_TYPE:
        return decilm.as_llama(values, path)
    return AutoConfig.from_pretrained(path, **options), frozenset()


def _check_depth(config: Any) -> None:
    """Refuse a config of absurdly many layers, which would be built before any weight is looked at."""
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"):
        layers = getattr(config, name, None)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise CheckpointError(f"config.json says {name} {layers}; at most {MOST_LAYERS} are believed")


def _forget_kernels(config: Any) -> None:
    """Let transformers choose the attention where a config asks for a kernel: headscope's replaces either.

    A stored "flash_attention_2" would ask for a package that nothing here calls.
    """
    if config._attn_implementation not in ("eager", "sdpa"):
        config._attn_implementation_internal = None
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _forget_kernels(part)


def _hub_has(name: str) -> bool | None:
    """Whether the hub has a model of this name (a few have no owner). Returns None if the hub does not answer.

    transformers itself would try an absent network for half a minute.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=10)
    except HfHubHTTPError:
        return False
    except Exception:  # no network, or no name at all, whatever the client raises then
        return None
    return True


def _model_class(path: str, config: Any) -> Any:
    """The class that config.json names (with its task head), or the plain model where it names none."""
    architectures = config.architectures or [None]
    architecture: Any = getattr(transformers, str(architectures[0]), None) if isinstance(architectures, list) else None
    if architecture is None:
        return AutoModel
    if not (inspect.isclass(architecture) and issubclass(architecture, PreTrainedModel)):
        raise CheckpointError(f"{path}: config.json names the architecture {architectures[0]}, which is no model")
    return architecture


def _dtype(name: str, config: Any, device: str) -> torch.dtype:
    """`auto` is what the checkpoint stores, but float32 on a CPU alone, where half precision is slow and coarse."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return torch.float32 if device == "cpu" else stored


def _check_weights(path: str, info: dict[str, Any], absent: frozenset[str]) -> None:
    """Refuse a checkpoint whose weights do not fill the model that its config describes, but for those `absent`."""
    if mismatched := sorted(_mismatch(entry) for entry in info["mismatched_keys"]):
        raise CheckpointError(_disagree(path, "of another size than config.json says", mismatched))
    missing = sorted(key for key in {*info["missing_keys"]} - absent if not _MAY_BE_MISSING.search(key))
    if missing:
        raise CheckpointError(_disagree(path, "missing", missing))
    if extra := sorted(key for key in info["unexpected_keys"] if _LAYER.search(f".{key}.")):
        raise CheckpointError(_disagree(path, "left over (does config.json say fewer layers?)", extra))


def _mismatch(entry: Any) -> str:
    """`name (5×7, config.json: 5×11)` of transformers' (name, size in the file, size in the model)."""
    if not (isinstance(entry, tuple) and len(entry) == 3):
        return str(entry)
    name, *sizes = entry
    stored, expected = ("×".join(map(str, size)) for size in sizes)
    return f"{name} ({stored}, config.json: {expected})"


def _disagree(path: str, problem: str, keys: list[str]) -> str:
    return f"{path}: weights are {problem}: {shortlist(keys)}; config.json and the weights file must agree"


def _open_tokenizer(path: str, options: dict[str, bool]) -> tuple[Any, str]:
    """The tokenizer, or None and the reason."""
    try:
        with _quiet(path):
            tokenizer: Any = AutoTokenizer.from_pretrained(path, **options)
    except CheckpointError as error:
        complete = _has_vocabulary(path)
        return None, str(error).removeprefix(f"{path} ") if complete else "it has no vocabulary file"
    if type(tokenizer).vocab_files_names and not _has_vocabulary(path):
        return None, "it has no vocabulary file"
    longest = tokenizer.model_max_length
    if type(longest) not in (int, float) or not 1 <= longest < math.inf or longest != int(longest):
        raise CheckpointError(
            f"{path}: model_max_length of its tokenizer_config.json is {str(longest)[:40]!r}, and has to be a whole "
            "number from 1 on; correct it"
        )
    tokenizer.model_max_length = int(longest)
    return tokenizer, ""


def _has_vocabulary(path: str) -> bool:
    folder = _folder(path)
    return any(file.is_file() for pattern in VOCABULARIES for file in folder.glob(pattern))


def _folder(path: str) -> Path:
    """The directory of a checkpoint: itself, or where the hub's files are kept."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    from transformers.utils.hub import cached_file

    config = cached_file(path, "config.json", local_files_only=True)
    assert config is not None  # it raises OSError where there is none
    return Path(config).parent


def _digest(path: str) -> str:
    folder = _folder(path)
    files = [folder / "config.json"]
    for pattern in WEIGHTS:
        if weights := sorted(folder.glob(pattern)):
            return file_digest([*files, *weights])
    return file_digest(files)


@contextmanager
def _quiet(path: str) -> Iterator[None]:
    """Keep transformers' log lines and progress bars away; turn what it raises into one line."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # torch, of foreign pickles
            yield
    except HeadscopeError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """What is wrong and what to do, for what transformers and torch raise at broken checkpoints."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text or "custom code" in text:
        return "it needs program code of its own, which headscope never runs; take a model type of transformers"
    if unknown := re.search(r"model type `(.*?)` but Transformers does not recognize", text):
        return f"model type {unknown[1]!r} is unknown to transformers {transformers.__version__}"
    if foreign := re.search(r"GLOBAL (\S+)", text):
        return (
            f"its weights file holds a Python object ({foreign[1]}), and headscope runs nothing that a "
            "checkpoint brings; save the weights as safetensors"
        )
    frames = traceback.extract_tb(error.__traceback__)
    unpickling = any(Path(frame.filename).parts[-2:] == ("torch", "serialization.py") for frame in frames)
    if "Safetensor" in type(error).__name__ or unpickling:
        return f"its weights file is truncated or broken ({text.rpartition('error: ')[2][:100]}); fetch it again"
    if "file named config.json" in text:
        return (
            "there is no config.json in it, so it is no model of transformers; where it is an adapter (PEFT), merge "
            "it into its base model, and of a sentence-transformers model open the folder 0_Transformer"
        )
    if "no file named" in text:
        return "there is no weights file; put model.safetensors or pytorch_model.bin beside config.json"
    if isinstance(error, OSError) and "connect" in text.lower():
        return "it is no local directory, and the model hub cannot be reached; check the path or the connection"
    if isinstance(error, json.JSONDecodeError):
        return f"one of its json files is broken ({text})"
    if isinstance(error, AttributeError):
        return f"its config.json does not fit the architecture that it names ({text})"
    if isinstance(error, KeyError):
        return f"its json files hold or lack the entry {text}, which transformers cannot go on with"
    return text if len(text) <= 300 else text[:300] + "…"
