"""Opening a folder or a hub id: the checked model of transformers, and its tokenizer.

transformers opens any path that an index of weights names, so indices are checked to name only files of their folder.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from headscope.config import Companions
from headscope.config.option import MAX_LAYERS
from headscope.errors import CheckpointError, ConfigError, HeadscopeError, flag, restate, shortlist
from headscope.files.archives import first_member, zip_damage
from headscope.files.hub import is_cached
from headscope.files.reading import file_digest, is_lfs_pointer, no_path, read_object
from headscope.formats.diagnosis import VOCABULARIES, check_weights, common_prefix, forget_renamings
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.formats.huggingface.companions.folder import (
    ADAPTER,
    COMPANIONS,
    CONFIG,
    MODULE_WEIGHTS,
    SENTENCE_FILES,
    json_object,
    local_folder,
    model_folder,
    parts,
)
from headscope.formats.huggingface.companions.languages import language_numbers, set_languages, set_spoken
from headscope.formats.huggingface.companions.sentences import sentence_encoder
from headscope.formats.huggingface.selfcontained import is_narrowed, narrowed_class
from headscope.formats.huggingface.speech import SpeechCheckpoint
from headscope.model.interface import quiet_transformers, reads_sound
from headscope.model.stored_weights import PACKING
from headscope.registry import unknown

INDEX = "*.index.json"
WEIGHTS = ("*.safetensors", "*.bin")
HEADS = (
    transformers.AutoModelForMaskedLM,
    transformers.AutoModelForSeq2SeqLM,
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForSequenceClassification,
    transformers.AutoModelForTokenClassification,
)
"""The task heads to try for a model whose config does not name its class."""


def open_model(
    path: str, *, device: str, device_map: str | None, dtype: str, companions: Companions
) -> HuggingFaceCheckpoint:
    """The model of a folder or hub id, placed, in the languages of `companions`; CheckpointError for a broken one."""
    path, options = locate(path)
    for file in sorted((local_folder(path) or Path(os.devnull)).glob("pytorch_model*.bin")):
        if first_member(file) and (damage := zip_damage(file)):  # transformers maps it, and compares no checksums
            raise CheckpointError(f"{file} is truncated or broken ({damage}); fetch it again")
    with loading(path), ExitStack() as stack:
        config, absent = _read_config(path, options)
        for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"):
            if isinstance(layers := getattr(config, name, None), int) and layers > MAX_LAYERS:
                raise CheckpointError(f"config.json says {name} {layers}; at most {MAX_LAYERS} are believed")
        _forget_kernels(config)
        placing = stack.enter_context(placement(device, device_map, is_quantized=is_quantised(path, config)))
        # the stored type, but float32 if all runs on a CPU, where half precision is slow and inexact
        keeps_type = isinstance(config.dtype, torch.dtype) and (device_map or device != "cpu")
        stored_type: Any = config.dtype if keeps_type else torch.float32

        def load(cls: Any, **more: Any) -> Any:
            return (narrowed_class(cls) if is_narrowed(config) else cls).from_pretrained(
                path,
                config=config,
                dtype=stored_type if dtype == "auto" else getattr(torch, dtype),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, with their names
                **placing,
                **options,
                **more,
            )

        model, info = _fill_model(load, path, config)
        prefix, renamings = common_prefix(info, model)
        if renamings:
            del model
            model, info = _fill_model(partial(load, key_mapping=renamings), path, config)
            forget_renamings(model, renamings)
        weakref.finalize(model, stack.pop_all().close)
    check_weights(path, info, absent, model)
    check_devices(model, placing.get("device_map"))
    model = ready(model, None if placing else device)
    folder = _fetch_files(path, options)
    tokenizer, why_no_tokenizer = _open_tokenizer(path, folder, options)
    kind = SpeechCheckpoint if reads_sound(model) else HuggingFaceCheckpoint
    (set_spoken if kind is SpeechCheckpoint else set_languages)(tokenizer, model, companions, path)
    weights = next((files for pattern in WEIGHTS if (files := sorted(folder.glob(pattern)))), [])
    checkpoint = kind(
        path=path,
        model=model,
        tokenizer=tokenizer,
        digest=file_digest([folder / CONFIG, *weights]),
        why_no_tokenizer=why_no_tokenizer,
        sentences=sentence_encoder(path),
    )
    checkpoint.prefix = prefix
    return checkpoint


def _read_config(path: str, options: dict[str, bool]) -> tuple[Any, frozenset[str]]:
    """The config of a model, and the names of weights that its files lack on purpose."""
    values = PretrainedConfig.get_config_dict(path, **options)[0]
    if values.get("model_type") != "nemotron-nas":
        return AutoConfig.from_pretrained(path, **options), frozenset()
    from headscope.formats.huggingface.decilm import as_llama  # only here: it loads the Llama of transformers

    return as_llama(values, path)


def ready(model: Any, device: str | None) -> Any:
    """Prepare a loaded model for analyses: gradients through its experts and weights; move it to `device` if given."""
    # torch's product of all experts takes no double precision, and only rows of multiples of 16 bytes
    parts = (part for part in model.modules() if not isinstance(part, nn.Conv1d))
    stacks = [weight for part in parts for weight in part.parameters(recurse=False) if weight.ndim == 3]
    odd = any(size * weight.element_size() % 16 for weight in stacks for size in weight.shape[1:])
    if odd or model.dtype == torch.float64:
        model.set_experts_implementation("eager")
    for part in model.modules():
        if hasattr(part, PACKING):
            setattr(part, PACKING, False)
    return (model if device is None else model.to(device)).eval()


def locate(path: str) -> tuple[str, dict[str, bool]]:
    """A model's folder or name on the hub, and the options of `from_pretrained`; CheckpointError if not found."""
    local = os.path.exists(path)
    if local:
        if (Path(path) / ADAPTER).is_file():
            base = str(json_object(Path(path) / ADAPTER).get("base_model_name_or_path") or "its base model")[:100]
            raise CheckpointError(
                f"{path} holds an adapter of {base} ({ADAPTER}); merge it in Python (PeftModel.from_pretrained(MODEL, "
                f"{path!r}).merge_and_unload().save_pretrained(DIR), and the tokenizer) and open DIR, or open {base}"
            )
        inner = model_folder(Path(path))
        path = path if inner == Path(path) else str(inner)
        check_shards(inner)
    on_hub = None if local else _hub_has(path)
    if not (local or on_hub or "/" in path or is_cached(path)):
        example = "a model of the hub is OWNER/NAME, such as google-bert/bert-base-uncased"
        raise CheckpointError(f"{no_path(path, 'file or directory')}; {example}")
    return path, {"trust_remote_code": False, "local_files_only": on_hub is None}


def check_shards(folder: Path) -> None:
    """CheckpointError if an index of weights is malformed, or names a file outside its folder or the hub's cache."""
    for index in sorted(folder.glob(INDEX)):
        shards = read_object(index, error=CheckpointError).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{index} has no weight_map of names of files; fetch the checkpoint again")
        for name in sorted(set(shards.values())):
            paths = PurePosixPath(name), PureWindowsPath(name)
            outside = "\0" in name or any(path.is_absolute() or path.drive or ".." in path.parts for path in paths)
            if not outside:
                home, file = folder.resolve(), (folder / name).resolve()
                of_cache = home.parent.name == "snapshots" and file.parent == home.parent.parent / "blobs"
                outside = not (file.is_relative_to(home) or of_cache)
            if outside:
                raise CheckpointError(f"{index} names {name[:100]!r}, which lies outside its folder; copy it there")


def _hub_has(name: str) -> bool | None:
    """Whether the hub has a model. Returns None if it does not answer: transformers would retry for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=10)
    except HfHubHTTPError:
        return False
    except Exception:  # no network, or no name at all, whatever the client raises then
        return None
    return True


def _forget_kernels(config: Any) -> None:
    """Forget a stored implementation such as "flash_attention_2", which would require a package not used here."""
    if config._attn_implementation not in ("eager", "sdpa"):
        config._attn_implementation_internal = None
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _forget_kernels(part)


def _fill_model(load: Callable[[Any], Any], path: str, config: Any) -> tuple[Any, dict[str, Any]]:
    """Load the model of the class in config.json (else the plain one); returns it with transformers' loading info.

    Without a class in config.json, as in many models of 2019 (SciBERT, BioBERT), the task head that fits the weights.
    """
    name = config.architectures[0] if isinstance(config.architectures, list) and config.architectures else None
    architecture: Any = getattr(transformers, str(name), AutoModel)
    if not (inspect.isclass(architecture) and issubclass(architecture, (PreTrainedModel, AutoModel))):
        raise CheckpointError(f"{path}: config.json names the architecture {name}, which is no model")
    model, info = load(architecture)
    if config.architectures or not info["unexpected_keys"]:
        return model, info
    for auto in HEADS:
        if type(config) in auto._model_mapping:
            with_head, its = load(auto)
            if not (its["missing_keys"] or its["mismatched_keys"]):
                return with_head, its
    return model, info


def _open_tokenizer(path: str, folder: Path, options: dict[str, bool]) -> tuple[Any, str]:
    files = [file for pattern in VOCABULARIES for file in folder.glob(pattern)]
    read = [file for file in files if file.name == VOCABULARIES[0]] or files
    if pointers := [file.name for file in read if is_lfs_pointer(file)]:
        return None, f"{shortlist(pointers)}: a Git LFS pointer, and not the file itself; run `git lfs pull`"
    complete = any(file.is_file() for file in files)
    try:
        with loading(path):
            tokenizer: Any = AutoTokenizer.from_pretrained(path, **options)
    except CheckpointError as error:
        return None, str(error).removeprefix(f"{path} ") if complete else "it has no vocabulary file"
    if type(tokenizer).vocab_files_names and not complete:
        return None, "it has no vocabulary file"
    longest, known_languages = tokenizer.model_max_length, language_numbers(tokenizer)
    requirements = {}
    if type(longest) not in (int, float) or not 1 <= longest < math.inf or longest != int(longest):
        requirements["model_max_length"] = "a whole number from 1 on"
    if known_languages and tokenizer.src_lang not in known_languages:
        requirements["src_lang"] = f"one of {shortlist([*known_languages])}"
    for name, values in requirements.items():
        value = str(getattr(tokenizer, name))[:40]
        raise CheckpointError(f"{path}: {name} of its tokenizer_config.json is {value!r}; make it {values}")
    tokenizer.model_max_length = int(longest)
    return tokenizer, ""


def _fetch_files(path: str, options: dict[str, bool]) -> Path:
    """The directory of an opened checkpoint; from the hub also fetch the files that a written copy needs besides."""
    folder = local_folder(path)
    assert folder is not None  # its config.json was read
    if os.path.isdir(path):
        return folder
    from transformers.utils.hub import cached_file

    def fetch(*names: str) -> None:
        for name in names:
            with suppress(OSError):  # most models have none
                cached_file(path, name, local_files_only=options["local_files_only"])

    fetch(*(name for name in COMPANIONS if "*" not in name), *SENTENCE_FILES)
    fetch(*(f"{part}/{name}" for part in parts(folder) for name in (CONFIG, *MODULE_WEIGHTS)))
    return folder


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Within the block transformers shows no logs and progress bars, and its errors become one line."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # torch, of foreign pickles
            yield
    except HeadscopeError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {_one_line(error)}") from error


PROBLEMS = (
    ("trust_remote_code|custom code", "it needs program code of its own, which headscope never runs"),
    ("model type `(.*?)` but Transformers does not recognize", "its model type {} is unknown to this transformers"),
    ("(?i)should have a `model_type`", 'its config.json says no model_type, such as "model_type": "bert"; add it'),
    (r"GLOBAL (\S+)", "its weights file holds a Python object ({}), and nothing of it is run; save it as safetensors"),
    ("file named config.json", "there is no config.json in it, so it is no model of transformers"),
    ("no file named", "there is no weights file; put model.safetensors or pytorch_model.bin beside config.json"),
    ("(?i)connect", "it is no local directory, and the model hub cannot be reached; check the path or the connection"),
)
"""Patterns of errors that transformers and torch raise for a checkpoint, and the problem with its remedy."""


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    unpickling = any(Path(frame.filename).parts[-2:] == ("torch", "serialization.py") for frame in frames)
    if ("Safetensor" in type(error).__name__ or unpickling) and "GLOBAL" not in text:
        return f"its weights file is truncated or broken ({text.rpartition('error: ')[2][:100]}); fetch it again"
    if isinstance(error, (AttributeError, KeyError, json.JSONDecodeError)):
        return f"its json files are broken or do not fit the architecture that they name ({text[:300]})"
    for pattern, advice in PROBLEMS:
        if match := re.search(pattern, text):
            return advice.format(*match.groups())
    return text if len(text) <= 300 else text[:300] + "…"


def is_quantised(path: str, config: Any) -> bool:
    """Whether weights are quantised; CheckpointError for a method that transformers would ignore."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    method = (settings if isinstance(settings, Mapping) else vars(settings)).get("quant_method")
    name = str(getattr(method, "value", method))
    if not any(kind == name or kind.startswith(f"{name}_") for kind in AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise CheckpointError(f"{path}: its weights are quantised ({name}), which transformers does not know")
    return True


@contextmanager
def placement(device: str, device_map: str | None, *, is_quantized: bool) -> Iterator[dict[str, Any]]:
    """Within the block, options of `from_pretrained` that place modules on devices, and a folder for weights on disk.

    `device_map`: "auto", or a JSON file with the devices of modules; ConfigError for others.
    """
    if device_map is None:
        yield {"device_map": {"": device}} if is_quantized else {}
        return
    if find_spec("accelerate") is None:
        raise ConfigError(f"{flag.device_map} needs accelerate, which is not installed; pip install 'headscope[large]'")
    devices: Any = device_map
    example = '{"model.layers.0": "cuda:0", …}'
    if device_map != "auto":
        with restate(ConfigError, f"{flag.device_map}: {{why}}; give auto, or a JSON file of devices, {example}"):
            devices = read_object(Path(device_map), error=ConfigError)
    with tempfile.TemporaryDirectory(prefix="headscope-offload-") as folder:
        yield {"device_map": devices, "offload_folder": folder}


def check_devices(model: nn.Module, devices: str | Mapping[str, object] | None) -> None:
    """ConfigError for a device map with an unknown module, which transformers would ignore."""
    modules = dict(model.named_modules())
    device_names = () if devices is None or isinstance(devices, str) else devices
    if strange := [name for name in device_names if name not in {*modules, *dict(model.named_parameters())}]:
        parts = [name for name in modules if name.count(".") <= 1 and name]
        raise ConfigError(f"{flag.device_map}: {unknown('module', strange[0], parts)}")
