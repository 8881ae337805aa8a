"""fairseq's names of weights and the native model's: one table for both directions, and the names of older versions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headscope.errors import CheckpointError, shortlist

WEIGHT_AND_BIAS = ("weight", "bias")
Rows = tuple[tuple[str, str | None], ...]
# In the order of fairseq's modules. {s} is encoder or decoder, {w} weight or bias; None: dropped, it changes no result.
BEFORE: Rows = (
    ("{s}.version", None),
    ("{s}.embed_tokens.weight", "{s}.embeddings.tokens.weight"),
    ("{s}.embed_positions.weight", "{s}.embeddings.positions.weight"),
    ("{s}.embed_positions._float_tensor", None),
    ("{s}.embed_positions.weights", None),
)
AFTER: Rows = (("{s}.layer_norm.{w}", "{s}.norm.{w}"), ("{s}.layernorm_embedding.{w}", "{s}.embeddings.norm.{w}"))
INPUT: Rows = (("decoder.project_in_dim.weight", "decoder.embeddings.projection.weight"),)
OUTPUT: Rows = (
    ("decoder.project_out_dim.weight", "before_output.weight"),
    ("decoder.output_projection.weight", "output.weight"),
)
ATTENTION: Rows = (
    ("alphas", "mixing.alpha"),
    ("alphas_bias", None),  # stored by the MHR fork, never used in its forward pass
    ("k_proj.{w}", "key.{w}"),
    ("v_proj.{w}", "value.{w}"),
    ("q_proj.{w}", "query.{w}"),
    ("out_proj.{w}", "output.{w}"),
)
LAYER: Rows = (
    *((f"self_attn.{theirs}", ours and f"self_attention.{ours}") for theirs, ours in ATTENTION),
    ("self_attn_layer_norm.{w}", "self_attention_norm.{w}"),
    *((f"encoder_attn.{theirs}", ours and f"cross_attention.{ours}") for theirs, ours in ATTENTION),
    ("encoder_attn_layer_norm.{w}", "cross_attention_norm.{w}"),
    ("fc1.{w}", "ffn.inner.{w}"),
    ("fc2.{w}", "ffn.outer.{w}"),
    ("final_layer_norm.{w}", "ffn_norm.{w}"),
)
# Names of fairseq 0.5 and before: norms by number, the output projection by another name.
OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
OLD_OUTPUT = "decoder.embed_out"
_BEFORE_SIDE = re.compile(r"((?:.*?\.)??)(?:encoder|decoder)\.")
_FUSED_KEY = re.compile(r"(.*)\.in_proj_(weight|bias)")
_OLD_NORM = re.compile(r"(encoder|decoder)(\.layers\.\d+\.)layer_norms\.(\d)\.(weight|bias)")


@dataclass(frozen=True)
class Origin:
    """A fairseq file's keys in order, its tensors that the native model lacks, and whether alphas are folded away."""

    keys: tuple[str, ...] = ()
    extra_tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    is_folded: bool = False

    @property
    def of_fork(self) -> bool:
        """Whether the file has the MHR fork's matrices `alphas`."""
        return any(key.endswith(".alphas") for key in self.keys)


def key_table(layers: Mapping[str, int]) -> dict[str, str | None]:
    """Native keys by fairseq's, for stacks with `layers` by side; None for a tensor that is dropped."""
    table: dict[str, str | None] = {}
    for side, count in layers.items():
        before, after = (INPUT, OUTPUT) if side == "decoder" else ((), ())
        inner = [
            (f"{{s}}.layers.{i}.{fairseq_key}", native_key and f"{{s}}.layers.{i}.{native_key}")
            for i in range(count)
            for fairseq_key, native_key in LAYER
        ]
        rows = [*BEFORE, *before, *inner, *AFTER, *after]
        for fairseq_key, native_key in rows:
            for w in WEIGHT_AND_BIAS if "{w}" in fairseq_key else ("",):
                table[fairseq_key.format(s=side, w=w)] = native_key and native_key.format(s=side, w=w)
    return table


def layer_counts(keys: Iterable[str]) -> dict[str, int]:
    """The number of layers of each side that has weights."""
    counts: dict[str, int] = {}
    for key in keys:
        side, _, name = key.partition(".")
        if side in ("encoder", "decoder"):
            number = re.match(r"layers\.(\d{1,4})\.", name)
            counts[side] = max(counts.get(side, 0), int(number[1]) + 1 if number else 0)
    return counts


def without_prefix(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """The prefix of all keys before `encoder.` or `decoder.`, which wrappers leave behind, and the state without it."""
    prefixes = {match[1] if (match := _BEFORE_SIDE.match(key)) else "" for key in state}
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    return prefix, {key.removeprefix(prefix): tensor for key, tensor in state.items()}


def upgrade_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under the names of fairseq 0.9: fused projections split, old names replaced."""
    weights: dict[str, Tensor] = {}
    for key, tensor in state.items():
        names = current_keys(key)
        if len(names) == 1:
            weights[names[0]] = tensor
        elif tensor.ndim and not len(tensor) % 3:
            weights |= zip(names, (part.contiguous() for part in tensor.chunk(3)), strict=True)
        else:
            weights[key] = tensor
    return weights


def current_keys(key: str) -> list[str]:
    """The keys that fairseq 0.9 writes for one of any version: three for a fused projection, else one."""
    if fused_match := _FUSED_KEY.fullmatch(key):
        return [f"{fused_match[1]}.{part}_proj.{fused_match[2]}" for part in "qkv"]
    if key == OLD_OUTPUT:
        return ["decoder.output_projection.weight"]
    old = _OLD_NORM.fullmatch(key)
    if old is None or int(old[3]) >= len(OLD_NORMS[old[1]]):
        return [key]
    return [f"{old[1]}{old[2]}{OLD_NORMS[old[1]][int(old[3])]}.{old[4]}"]


def native_weights(path: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Upgraded weights under native names; CheckpointError names weights that fairseq's Transformers lack."""
    rows = key_table(layer_counts(state))
    strange = [key for key in state if key not in rows]
    if strange:
        names = shortlist([key[:80] for key in strange])
        raise CheckpointError(f"{path}: the weights {names} are not those of fairseq's plain Transformer")
    return {
        native_key: state[fairseq_key]
        for fairseq_key, native_key in rows.items()
        if native_key is not None and fairseq_key in state
    }


def origin(state: Mapping[str, Tensor]) -> Origin:
    """The entries that `fairseq_weights` needs beside native weights to write a file like this one."""
    rows = key_table(layer_counts(state))
    extra_tensors = {key: tensor for key, tensor in state.items() if key in rows and rows[key] is None}
    return Origin(tuple(state), extra_tensors)


def fairseq_weights(state: Mapping[str, Tensor], origin: Origin) -> dict[str, Tensor]:
    """Native weights under the keys of the file they came from, in its order; `state` may have fewer heads."""
    rows = key_table(layer_counts([*origin.keys, *state]))
    parts = {key: [row for name in current_keys(key) if (row := rows.get(name)) in state] for key in origin.keys}
    weights: dict[str, Tensor] = {}
    for key, own_keys in parts.items():
        if key in origin.extra_tensors:
            weights[key] = origin.extra_tensors[key]
        elif own_keys:
            tensors = [state[row] for row in own_keys if row is not None]
            weights[key] = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    fairseq_keys = {native_key: fairseq_key for fairseq_key, native_key in rows.items() if native_key is not None}
    written_keys = {row for own_keys in parts.values() for row in own_keys}
    for native_key in sorted({*state} & {*fairseq_keys} - written_keys):
        tensor = state[native_key]
        is_alpha = native_key.endswith("mixing.alpha")  # which a plain fairseq file never had
        if not (is_alpha and torch.equal(tensor, torch.eye(len(tensor), dtype=tensor.dtype))):
            weights[fairseq_keys[native_key]] = tensor
    for key, tensor in weights.items():  # the unused bias of alphas has one row per head
        if key.endswith("alphas_bias"):
            heads = weights.get(key.removesuffix("_bias"), tensor)
            weights[key] = tensor[: len(heads)]
    return weights
