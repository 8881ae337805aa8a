"""DeciLM (nemotron-nas) folders as Llamas with other numbers of key/value heads in every layer, or no attention.

headscope runs no code of theirs: `block_configs` of config.json are the sizes of a narrowed Llama of the same names.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from headscope.errors import CheckpointError
from headscope.formats.huggingface.modeling_decilm import DeciLMConfig, width_of
from headscope.formats.huggingface.narrowing import ENTRIES

_OWN = ("model_type", "architectures", "auto_map", "block_configs", "num_key_value_heads")
_KNOWN_KEYS = {"attention": {"no_op", "n_heads_in_group"}, "ffn": {"no_op", "ffn_mult"}}


def as_llama(values: dict[str, Any], path: str) -> tuple[LlamaConfig, frozenset[str]]:
    """The config of a narrowed Llama, and the names of norms before absent attention, which DeciLM's files lack."""
    blocks, heads, hidden = values["block_configs"], values["num_attention_heads"], values["hidden_size"]
    for problem in _problems(values):
        raise CheckpointError(f"{path} is a DeciLM ({DeciLMConfig.model_type}) that headscope cannot open: {problem}")
    shared = [None if block["attention"]["no_op"] else block["attention"]["n_heads_in_group"] for block in blocks]
    widths = [width_of(block["ffn"]["ffn_mult"], hidden) for block in blocks]
    config: Any = LlamaConfig.from_dict(
        {name: value for name, value in values.items() if name not in _OWN}
        | {"num_key_value_heads": max(heads // share for share in shared if share), "intermediate_size": max(widths)}
    )
    config.architectures = ["LlamaForCausalLM"]
    config.narrowed = _sizes(config, shared, widths)
    numbers = {str(layer): list(range(heads)) if share else [] for layer, share in enumerate(shared)}
    config.kept_heads = {"decoder-self": numbers}
    absent = [layer for layer, share in enumerate(shared) if not share]
    return config, frozenset(f"model.layers.{layer}.input_layernorm.weight" for layer in absent)


def _problems(values: dict[str, Any]) -> list[str]:
    blocks, heads = values["block_configs"], values["num_attention_heads"]
    if len(blocks) != values["num_hidden_layers"]:
        return [f"block_configs has {len(blocks)} layers, and num_hidden_layers is {values['num_hidden_layers']}"]
    problems = [name for name in ("attention_bias", "mlp_bias") if values.get(name)]
    for layer, block in enumerate(blocks):
        extras = {
            part: {name for name in block[part] if block[part][name]} - expected_names
            for part, expected_names in _KNOWN_KEYS.items()
        }
        problems += [f"layer {layer} has {part}.{name}" for part, names in extras.items() for name in sorted(names)]
        if block["ffn"]["no_op"]:
            problems.append(f"layer {layer} has no feed-forward layer (ffn.no_op)")
        group_size = block["attention"].get("n_heads_in_group")
        if not block["attention"]["no_op"] and (type(group_size) is not int or group_size < 1 or heads % group_size):
            problems.append(f"layer {layer} has n_heads_in_group {group_size!r}, which does not divide {heads} heads")
    if all(block["attention"]["no_op"] for block in blocks):
        problems.append("no layer has attention")
    return problems


def _sizes(config: Any, shared: list[int | None], widths: list[int]) -> dict[str, Any]:
    """The table for `narrow`; `shared`: query heads per key/value head of each layer, None for no attention."""
    hidden, width = config.hidden_size, config.head_dim
    table: dict[str, dict[str, Any]] = {entry: {} for entry in ENTRIES}
    for layer, (share, ffn) in enumerate(zip(shared, widths, strict=True)):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        table["attributes"][attention] = {"num_key_value_groups": share or 1}
        if share:
            keys = config.num_attention_heads // share * width
            table["shapes"] |= {f"{attention}.{part}_proj.weight": [keys, hidden] for part in "kv"}
        else:
            table["zeros"] |= {f"{attention}.{part}_proj": width for part in "qkv"}
            table["biases"][f"{attention}.o_proj"] = table["empty"][attention] = True
        table["shapes"] |= {f"{mlp}.{part}_proj.weight": [ffn, hidden] for part in ("gate", "up")}
        table["shapes"][f"{mlp}.down_proj.weight"] = [hidden, ffn]
    return table
