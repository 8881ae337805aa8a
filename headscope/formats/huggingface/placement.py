"""Where the modules of a Hugging Face model go: on one device, or as a device map of accelerate's says."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from headscope.errors import CheckpointError, ConfigError, flag
from headscope.files.reading import read_json
from headscope.registry import unknown

AUTO = "auto"


def read_device_map(text: str) -> str | dict[str, int | str]:
    """What `--device-map` says: "auto", or the devices of modules that a JSON file has; ConfigError for others."""
    if find_spec("accelerate") is None:
        raise ConfigError(f"{flag.device_map} needs accelerate, which is not installed; pip install 'headscope[large]'")
    if text == AUTO:
        return AUTO
    if not os.path.exists(text):
        raise ConfigError(f"{flag.device_map} {text}: give auto, or a JSON file that maps modules to devices")
    devices = read_json(Path(text))
    kinds = re.compile(r"\d+|cpu|disk|mps|cuda(:.*)?")
    if not (isinstance(devices, dict) and devices and all(kinds.fullmatch(str(name)) for name in devices.values())):
        raise ConfigError(
            f'{flag.device_map} {text}: it must map names of modules to devices, {{"model.layers.0": "cuda:0", …}}: '
            'cuda:N or N, mps, "cpu" and "disk"'
        )
    return devices


def is_quantised(path: str, config: Any) -> bool:
    """Whether weights are quantised; CheckpointError for a method that transformers would pass over."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    method = (settings if isinstance(settings, Mapping) else vars(settings)).get("quant_method")
    name = str(getattr(method, "value", method))
    if not any(known == name or known.startswith(f"{name}_") for known in AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise CheckpointError(f"{path}: its weights are quantised ({name}), which transformers does not know")
    return True


@contextmanager
def placement(device: str, device_map: str | None, *, is_quantized: bool) -> Iterator[dict[str, Any]]:
    """Options of `from_pretrained` that put modules where they go, with a folder for weights on disk; or none."""
    if device_map is None:
        yield {"device_map": {"": device}} if is_quantized else {}
        return
    devices = read_device_map(device_map)
    with tempfile.TemporaryDirectory(prefix="headscope-offload-") as folder:
        yield {"device_map": devices, "offload_folder": folder}


def check_devices(model: nn.Module, devices: str | Mapping[str, object] | None) -> None:
    """ConfigError for a device map that names what is no module, or that leaves out a part of the model."""
    if devices is None or isinstance(devices, str):
        return
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    if strange := [name for name in devices if name not in {*modules, *parameters}]:
        parts = [name for name in modules if name.count(".") <= 1 and name]
        raise ConfigError(f"{flag.device_map}: {unknown('module', strange[0], parts)}")
    prefixes = tuple(part and f"{part}." for part in devices)
    if left_out := [name for name in parameters if not f"{name}.".startswith(prefixes)]:
        raise ConfigError(f"{flag.device_map} gives no device for {left_out[0]}; name every module, or its parent")
