"""Where the modules of a Hugging Face model go: on one device, or as a device map says; and what its weights need.

A device map is accelerate's: it names a device for modules, "cpu" and "disk" too, whose weights come to where the
model runs when their turn comes. Weights of safetensors files are read from these files each time, not copied.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from headscope.errors import CheckpointError, ConfigError
from headscope.files.reading import read_json
from headscope.registry import unknown

AUTO = "auto"
NEEDED: Mapping[str, tuple[str, ...]] = {
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "bitsandbytes_4bit": ("bitsandbytes", "accelerate"),
    "bitsandbytes_8bit": ("bitsandbytes", "accelerate"),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
    "compressed-tensors": ("compressed_tensors",),
    "torchao": ("torchao",),
    "hqq": ("hqq",),
    "quanto": ("optimum.quanto",),
    "aqlm": ("aqlm",),
    "vptq": ("vptq",),
}
"""Packages that transformers needs for weights of a quantisation method."""


def read_device_map(text: str) -> str | dict[str, int | str]:
    """What `--device-map` says: "auto", or the devices of modules that a JSON file has.

    ConfigError for anything else, and where accelerate is missing.
    """
    if find_spec("accelerate") is None:
        raise ConfigError("--device-map needs accelerate, which is not installed; pip install 'headscope[large]'")
    if text == AUTO:
        return AUTO
    if not os.path.exists(text):
        raise ConfigError(f"--device-map {text}: give auto, or a JSON file that maps modules to devices")
    devices = read_json(Path(text))
    fitting = isinstance(devices, dict) and all(_is_device(device) for device in devices.values())
    if not (fitting and devices):
        raise ConfigError(
            f'--device-map {text}: it must map names of modules to devices, {{"model.layers.0": "cuda:0", …}}: '
            'cuda:N or N, mps, "cpu" and "disk"'
        )
    return dict(devices)


def check_quantisation(path: str, config: Any) -> str | None:
    """By which method a checkpoint's weights are quantised. Returns None if they are not.

    CheckpointError naming the packages that are missing.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, Mapping) else vars(settings)
    method = settings.get("quant_method")
    name = str(getattr(method, "value", method))
    if name not in {*AUTO_QUANTIZATION_CONFIG_MAPPING, *NEEDED}:
        raise CheckpointError(f"{path}: its weights are quantised ({name}), which transformers does not know")
    if missing := [package for package in NEEDED.get(name, ("accelerate",)) if not _installed(package)]:
        packages = " ".join(package.replace(".", "-").replace("_", "-") for package in missing)
        raise CheckpointError(f"{path}: its weights are quantised ({name}); pip install {packages} to open it")
    return name


@contextmanager
def placement(device: str, device_map: str | None, *, quantised: bool) -> Iterator[dict[str, Any]]:
    """Options of `from_pretrained` that put modules where they go; empty where the model is moved afterwards.

    Within the block there is a directory for weights on disk that do not come from safetensors files.
    """
    if device_map is None:
        yield {"device_map": {"": device}} if quantised else {}
        return
    devices = read_device_map(device_map)
    with tempfile.TemporaryDirectory(prefix="headscope-offload-") as folder:
        yield {"device_map": devices, "offload_folder": folder}


def check_devices(model: nn.Module, devices: str | Mapping[str, object] | None) -> None:
    """ConfigError for a device map that names what is no module, or that leaves out a part of the model."""
    if devices is None or isinstance(devices, str):
        return
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    if strange := [name for name in devices if name not in known]:
        parts = [name for name, _ in model.named_modules() if name.count(".") <= 1 and name]
        raise ConfigError(f"--device-map: {unknown('module', strange[0], parts)}")
    left_out = [
        name
        for name, _ in model.named_parameters()
        if not any(part in ("", name) or name.startswith(f"{part}.") for part in devices)
    ]
    if left_out:
        raise ConfigError(f"--device-map gives no device for {left_out[0]}; name every module, or those around them")


def _is_device(device: Any) -> bool:
    if isinstance(device, str):
        return device in ("cpu", "disk", "mps") or device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
