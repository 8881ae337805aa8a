"""Tensors of a Llama-like decoder by llama.cpp's names, and the architecture of llama.cpp that can hold them.

Of rotary embeddings, llama.cpp scales the frequencies by `rope.scaling.type` and `rope.scaling.factor`, or divides each
by an entry of `rope_freqs`. It multiplies cosines and sines by `rope.scaling.attn_factor`, with YaRN also by
1 + 0.1·ln(factor) (src/llama-context.cpp; ggml_rope_yarn_corr_dims of ggml.c). None of these architectures reads YaRN's
bounds, `beta_fast` and `beta_slow`; frequencies with other bounds are written as divisors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headscope.errors import ConfigError, flag, raise_first
from headscope.export.base import FEED_FORWARD, PARTS, DecoderLayer, decoder_layer
from headscope.formats.base import Checkpoint

SCALINGS = ("default", "linear", "llama3", "yarn")
BOUNDS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""YaRN's bounds in llama.cpp."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary settings of a file: `kind` and `factor` scale the frequencies of base `theta` ("" and None: not scaled).

    `original_context` is YaRN's original context, `gain` multiplies cosines and sines, `divisors` [k/2] divide the
    frequencies (empty: none). `unsupported` names frequencies that these settings cannot express.
    """

    theta: float
    kind: str = ""
    factor: float | None = None
    original_context: int | None = None
    gain: float = 1.0
    divisors: Tensor = field(default_factory=lambda: torch.empty(0))
    unsupported: str = ""


def rotary_of(model: Any, width: int, *, divides: bool) -> Rotary:
    """A model's rotary embeddings as settings of a file; `divides`: the architecture reads `rope_freqs`."""
    rope = rope_parameters(model.config)
    rotary = type(model.model.rotary_emb)(model.config)  # a new one: the model's may be rounded to half precision
    kind, theta, scaling = rope["rope_type"], float(rope["rope_theta"]), float(rotary.attention_scaling)
    bounds = [f"{name} {rope[name]}" for name, usual in BOUNDS.items() if rope.get(name, usual) not in (usual, None)]
    if kind == "default":
        return Rotary(theta=theta, gain=scaling)
    if kind in ("linear", "yarn") and not bounds:
        factor = float(rope["factor"])
        yarn_gain = 1 + 0.1 * math.log(factor) if kind == "yarn" and factor > 1 else 1.0
        original_context = int(rope["original_max_position_embeddings"]) if kind == "yarn" else None
        gain = scaling / yarn_gain
        return Rotary(theta=theta, kind=kind, factor=factor, original_context=original_context, gain=gain)
    frequencies = rotary.inv_freq.double().cpu()  # [k/2]
    unscaled = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)  # [k/2]
    if divides and frequencies.shape == unscaled.shape:
        return Rotary(theta=theta, gain=scaling, divisors=(unscaled / frequencies).float())
    return Rotary(theta=theta, unsupported=f"{kind} frequencies" + (f" with {', '.join(bounds)}" if bounds else ""))


def rope_parameters(config: Any) -> dict[str, Any]:
    """The rotary parameters of a transformers config, with its defaults for absent ones of YaRN."""
    rope: dict[str, Any] = {"rope_type": "default", **config.rope_parameters}
    if rope["rope_type"] == "yarn":
        longest = config.max_position_embeddings
        rope["original_max_position_embeddings"] = rope.get("original_max_position_embeddings") or longest
        rope["factor"] = rope.get("factor") or longest / rope["original_max_position_embeddings"]
    return rope


SHORTEST = 2
"""Tokens of the shortest context that llama.cpp can continue: one is read, one follows."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """An architecture of llama.cpp, by what its loader reads and its graph computes (llama.cpp, src/models).

    - `per_layer_heads`: every layer has its own number of heads.
    - `interleaved_rotary`: rotary pairs are neighbours, so rows of W_Q and W_K are permuted.
    - `fused_qkv`: one matrix [q; k; v].
    - `norms`: queries and keys are normalised.
    - `biases`: parts whose bias is read.
    - `untied_output`: an output matrix is read.
    - `factors`: divisors of rotary frequencies are read.
    - `empty`: layers after the first may have no heads (all widths are read from the first).
    - `square`: all heads together are as wide as the model.
    - `gated`: contexts are multiplied by softplus of a matrix times x; the matrix is written as zeros, and W_O divided
      by softplus(0) = ln 2.
    """

    name: str
    per_layer_heads: bool = False
    interleaved_rotary: bool = False
    fused_qkv: bool = False
    norms: bool = False
    biases: frozenset[str] = frozenset()
    untied_output: bool = True
    factors: bool = False
    empty: bool = False
    square: bool = False
    gated: bool = False


_ALL = frozenset([*PARTS, *FEED_FORWARD])
LLAMA = Container(name="llama", interleaved_rotary=True, biases=_ALL, factors=True)
QWEN2 = Container(name="qwen2", biases=frozenset(["attn_q", "attn_k", "attn_v"]), square=True)
QWEN3 = Container(name="qwen3", norms=True)
DECI = Container(name="deci", per_layer_heads=True, interleaved_rotary=True, biases=_ALL, factors=True, empty=True)
OPENELM = Container(name="openelm", per_layer_heads=True, fused_qkv=True, norms=True, untied_output=False)
LAGUNA = Container(name="laguna", per_layer_heads=True, norms=True, gated=True)
FAMILIES = {
    "llama": (LLAMA, DECI),
    "mistral": (LLAMA, DECI),
    "qwen2": (QWEN2, LLAMA, DECI),
    "qwen3": (QWEN3, OPENELM, LAGUNA),
}
"""The containers to try, the plainest first, by model type of transformers."""


class LlamaDecoder:
    """A causal language model with layers like Llama's, in the plainest architecture of llama.cpp that can hold it.

    `layers` have a head of zeros where the `container` requires one. ConfigError for a model that is not of this kind,
    and where no architecture can hold its heads.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        check_family(checkpoint)
        model: Any = checkpoint.model
        self.model, self.config = model, model.config
        layers, reasons = [decoder_layer(module) for module in model.model.layers], list[str]()
        self.width, biases = layers[0].width, frozenset[str]().union(*(layer.biases for layer in layers))
        self.tied = model.lm_head.weight is model.model.embed_tokens.weight
        for container in FAMILIES[checkpoint.model_type]:
            self.container, self.rotary = container, rotary_of(model, self.width, divides=container.factors)
            self.layers = [
                layer if number and container.empty and "attn_output" not in layer.biases else layer.padded
                for number, layer in enumerate(layers)
            ]
            if not (reason := self._misfit(biases)):
                return
            reasons.append(f"{container.name} {reason}")
        raise ConfigError(
            f"gguf: llama.cpp has no architecture for this {checkpoint.model_type} with these heads "
            f"({'; '.join(reasons)}). It could without biases: remove heads with {flag.compensate} none"
        )

    def _misfit(self, biases: frozenset[str]) -> str:
        """Why the container cannot hold the model, "" if it can."""
        container, counts = self.container, {(layer.heads, layer.groups) for layer in self.layers}
        extra = sorted(biases - container.biases)
        wide = any(heads * self.width != self.config.hidden_size for heads, _ in counts)
        reasons = {
            "has one number of heads for all layers": len(counts) > 1 and not container.per_layer_heads,
            "has heads that are together as wide as the model": container.square and wide,
            f"reads no bias of {', '.join(extra)}": bool(extra),
            "reads no output matrix of its own": not container.untied_output and not self.tied,
            f"knows no {self.rotary.unsupported}": bool(self.rotary.unsupported),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


def check_family(checkpoint: Checkpoint) -> None:
    """Raise ConfigError where llama.cpp cannot run a model of this kind, whichever heads are removed."""
    model: Any = checkpoint.model
    if checkpoint.model_type not in FAMILIES or not hasattr(model, "lm_head"):
        kind = f"{type(model).__name__} of type {checkpoint.model_type!r}"
        raise ConfigError(f"gguf writes causal language models ({', '.join(FAMILIES)}), and this is {kind}")
    config, layers, containers = model.config, model.model.layers, FAMILIES[checkpoint.model_type]
    rope: dict[str, Any] = config.rope_parameters
    rope_type, length = rope.get("rope_type", "default"), context_length(config)
    scalings = [layer.self_attn.scaling * layer.self_attn.head_dim**0.5 for layer in layers]
    problems = {
        f"hidden_act {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
        "another scale of scores than 1/√k": any(abs(scaling - 1) > 1e-6 for scaling in scalings),
        "partial rotary embeddings": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"rope_type {rope_type}": rope_type not in SCALINGS,
        f"context as short as {length} (a sliding_window must be {SHORTEST} or more)": length < SHORTEST,
    }
    beginning = "gguf: llama.cpp's architectures for such layers know no "
    raise_first(ConfigError, problems, beginning)
    divides = any(container.factors for container in containers)
    unsupported = rotary_of(model, layers[0].self_attn.head_dim, divides=divides).unsupported
    raise_first(ConfigError, {unsupported: unsupported}, beginning)


def context_length(config: Any) -> int:
    """The positions within which the file is exact: these architectures of llama.cpp have no sliding window."""
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    longest = int(config.max_position_embeddings)
    return longest if window is None or not slides else min(longest, int(window))


def tensors(decoder: LlamaDecoder) -> Iterator[tuple[str, Tensor]]:
    """The names and values of all tensors of the file."""
    import gguf

    container, layers = decoder.container, decoder.layers
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, len(layers))  # has all names of Llama-like layers
    empty = [f"model.layers.{number}.input_layernorm.weight" for number, layer in enumerate(layers) if not layer.heads]
    for key, values in decoder.model.state_dict().items():
        module, _, kind = key.rpartition(".")
        is_norm = module.endswith("_norm") and container.norms
        is_tied = key == "lm_head.weight" and decoder.tied
        if key not in empty and not is_tied and ("self_attn" not in key or is_norm):
            yield f"{names.get_name(module)}.{kind}", values.detach()
    if len(divisors := decoder.rotary.divisors):
        yield "rope_freqs.weight", divisors
    for number, layer in enumerate(layers):
        for name, values in _attention_tensors(layer, container) if layer.heads else ():
            yield f"blk.{number}.{name}", values


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Permute the rows [h·k …] of each head from rotary pairs (i, i + k/2) to pairs of neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])  # [h 2 k/2 …]
    return halves.transpose(1, 2).reshape(rows.shape)


def _attention_tensors(layer: DecoderLayer, container: Container) -> Iterator[tuple[str, Tensor]]:
    """The names and values of a layer's attention tensors, in the layout of the container."""
    parts = {part: layer.attention(part) for part in PARTS}
    if container.interleaved_rotary:
        for part, count in (("attn_q", layer.heads), ("attn_k", layer.groups)):
            weight, bias = parts[part]
            parts[part] = (interleave(weight, count), None if bias is None else interleave(bias, count))
    if container.fused_qkv:
        yield "attn_qkv.weight", torch.cat([parts[part][0] for part in ("attn_q", "attn_k", "attn_v")])
        del parts["attn_q"], parts["attn_k"], parts["attn_v"]
    if container.gated:
        weight, bias = parts["attn_output"]
        parts["attn_output"] = weight / math.log(2), bias
        parts["attn_gate"] = weight.new_zeros(layer.heads, weight.shape[0]), None
    for part, (weight, bias) in parts.items():
        yield f"{part}.weight", weight
        if bias is not None:
            yield f"{part}.bias", bias
