"""The steps of SentenceTransformer around an encoder, from files beside the weights: prompts, pooling, more modules."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import normalizers
from torch import Tensor, nn

from headscope.errors import CheckpointError, CheckpointWarning, reason_of
from headscope.formats.huggingface.companions.folder import (
    CONFIG,
    MODULE_WEIGHTS,
    SENTENCE_SETTINGS,
    SENTENCES,
    json_object,
    local_folder,
    modules_of,
    sentence_home,
)
from headscope.model.forward import Pool, mean_pooled

LEGACY = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
"""Names of poolings in folders from before 2026; several are concatenated in this order."""

Stage = Callable[[Tensor], Tensor]


def _at(states: Tensor, positions: Tensor) -> Tensor:
    return states[torch.arange(len(states), device=states.device), positions]


POOLINGS: Mapping[str, Pool] = {
    "cls": lambda states, real: _at(states, real.int().argmax(dim=1)),
    "max": lambda states, real: states.masked_fill(~real[..., None], -torch.inf).amax(dim=1),
    "mean": mean_pooled,
    "mean_sqrt_len_tokens": lambda states, real: (
        (states * real[..., None]).sum(dim=1) / real.to(states.dtype).sum(-1, keepdim=True).sqrt()
    ),
    "weightedmean": lambda states, real: (  # by numbers of positions, from 1 on (SGPT)
        mean_pooled(states, real * torch.arange(1, real.shape[1] + 1, device=real.device))
    ),
    "lasttoken": lambda states, real: _at(states, real.shape[1] - 1 - real.flip(1).int().argmax(dim=1)),
}


@dataclass(frozen=True)
class SentenceEncoder:
    """Settings around an encoder. `stages` follow pooling, without a normalisation at the end."""

    max_length: int | None
    lower_case: bool
    prompt: str
    poolings: tuple[str, ...]
    pools_prompt: bool
    stages: tuple[Stage, ...]

    def tokenizer(self, tokenizer: Any) -> Any:
        """The tokenizer, or a copy that lower-cases texts first if the settings say so."""
        if not self.lower_case:
            return tokenizer
        lowercasing = copy.deepcopy(tokenizer)
        backend = lowercasing.backend_tokenizer
        own_normalizers = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own_normalizers])
        return lowercasing

    def pool(self, states: Tensor, real: Tensor, *, tokenizer: Any) -> Tensor:
        """Vectors [b d] of final states [b t d] at real positions [b t], before a normalisation at the end."""
        if self.prompt and not self.pools_prompt:
            ids = tokenizer(self.prompt)["input_ids"]  # a special id after the prompt does not belong to it
            length = len(ids) - (ids[-1] in tokenizer.all_special_ids)
            real = real & (torch.arange(real.shape[1], device=real.device) >= length)
        vectors = torch.cat([POOLINGS[name](states, real) for name in self.poolings], dim=-1)
        for stage in self.stages:
            vectors = stage(vectors)
        return vectors


def sentence_encoder(path: str) -> SentenceEncoder | None:
    """The steps around an encoder. Returns None if there are none.

    Warns of modules that are not run; CheckpointError for invalid settings.
    """
    if (folder := local_folder(path)) is None or (home := sentence_home(folder)) is None:
        return None
    settings = next(filter(None, map(json_object, sorted(folder.glob(SENTENCE_SETTINGS)))), dict[str, Any]())
    config = json_object(home / SENTENCES)
    longest, name = settings.get("max_seq_length"), config.get("default_prompt_name")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise CheckpointError(f"{path}: max_seq_length is {str(longest)[:40]!r}; make it a whole number from 1 on")
    prompts = config.get("prompts")
    prompt = (prompts if isinstance(prompts, dict) else {}).get(name, None if name else "")
    if not isinstance(prompt, str):
        raise CheckpointError(f"{path}: default_prompt_name {str(name)[:40]!r} is none of its prompts; correct it")
    poolings, pools_prompt, stages, unknown = _around(home)
    if unknown:
        text = f"SentenceTransformer goes on with {', '.join(unknown)}; headscope compares the vectors before it"
        warnings.warn(f"{path}: {text}", CheckpointWarning, stacklevel=2)
    return SentenceEncoder(longest, settings.get("do_lower_case") is True, prompt, poolings, pools_prompt, stages)


def _around(home: Path) -> tuple[tuple[str, ...], bool, tuple[Stage, ...], tuple[str, ...]]:
    (kind, pooling), *behind = [(kind, home / folder) for kind, folder in modules_of(home)][1:] or [("", home)]
    config = json_object(pooling / CONFIG) if kind == "Pooling" else {}
    mode_setting = config.get("pooling_mode") or [mode for key, mode in LEGACY.items() if config.get(key)] or "mean"
    poolings = (mode_setting,) if isinstance(mode_setting, str) else tuple(map(str, mode_setting))
    if not config or not {*poolings} <= {*POOLINGS}:
        return ("mean",), True, (), tuple(name for name in (kind, *(name for name, _ in behind)) if name)
    stages: list[Stage] = []
    while behind and (stage := _stage(*behind[0])) is not None:
        stages.append(stage)
        behind = behind[1:]
    while stages and stages[-1] in (_normalize, _identity):
        stages.pop()
    return poolings, config.get("include_prompt") is not False, tuple(stages), tuple(name for name, _ in behind)


_identity, _normalize = nn.Identity(), partial(nn.functional.normalize, dim=-1)


def _stage(kind: str, folder: Path) -> Stage | None:
    if kind in ("Normalize", "Dropout"):
        return _normalize if kind == "Normalize" else _identity
    if kind not in ("Dense", "LayerNorm"):
        return None
    config, weights = json_object(folder / CONFIG), _weights(folder)
    if kind == "LayerNorm":
        return lambda x: nn.functional.layer_norm(
            x, x.shape[-1:], weights["norm.weight"].to(x), weights["norm.bias"].to(x)
        )
    function_name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = getattr(nn, function_name.rpartition(".")[2], None) if function_name.startswith("torch.nn.") else None
    inner = {config.get(f"module_{side}_name") for side in ("input", "output")} - {None, "sentence_embedding"}
    if inner or not (inspect.isclass(activation) and issubclass(activation, nn.Module)):
        return None
    return partial(_dense, weights=weights, activation=activation(), residual=config.get("use_residual") is True)


def _dense(vectors: Tensor, *, weights: dict[str, Tensor], activation: nn.Module, residual: bool) -> Tensor:
    layer = {name: weight.to(vectors) for name, weight in weights.items()}
    out: Tensor = activation(nn.functional.linear(vectors, layer["linear.weight"], layer.get("linear.bias")))
    if not residual:
        return out
    return out + (nn.functional.linear(vectors, layer["residual.weight"]) if "residual.weight" in layer else vectors)


def _weights(folder: Path) -> dict[str, Tensor]:
    try:
        if (file := folder / MODULE_WEIGHTS[0]).is_file():
            return load_file(file)
        tensors: dict[str, Tensor] = torch.load(folder / MODULE_WEIGHTS[1], map_location="cpu", weights_only=True)
    except Exception as error:  # whatever safetensors and torch raise at broken files
        raise CheckpointError(f"{folder}: its weights cannot be read ({reason_of(error)}); fetch it again") from error
    return tensors
