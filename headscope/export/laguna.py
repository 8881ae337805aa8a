"""`--export laguna`: a different number of query heads in every layer, for unmodified transformers and for servers.

transformers' `LagunaForCausalLM` has a number of query heads for every layer, and one number of key/value groups for
all. Its layers are those of Qwen3 (queries and keys normalised by head, no biases) with a gate: contexts are multiplied
by softplus(W_G x), one factor a head. W_G is written as zeros, and W_O divided by softplus(0) in the type of the
weights (ln 2; in bfloat16 0.69140625). Servers also read `gating: false`, without gate and division.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from headscope.errors import CheckpointError, ConfigError
from headscope.evaluation.model_inputs import InputTexts
from headscope.export.base import (
    EngineExport,
    EngineFile,
    decoder_layer,
    engine,
    padded_attention,
    padded_model,
    verify_folder,
)
from headscope.formats.base import Checkpoint
from headscope.formats.exports import Card, write_card
from headscope.formats.huggingface.selfcontained import stored_copy, write_folder
from headscope.model.attention import is_half
from headscope.model.interface import quiet_transformers

FOLDER, SERVERS = "laguna", "laguna-server"
SERVER_PROGRAMS = "vLLM, SGLang, TensorRT-LLM"
_WEIGHTS = re.compile(
    r"model\.(embed_tokens|norm)\.weight|lm_head\.weight|model\.layers\.\d+\."
    r"(input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj)\.weight"
)
"""Names of the weights that a model may have."""


@engine
class Laguna(EngineExport):
    """Decoders with layers like Qwen3's, each layer with its own number of query heads, for unmodified transformers.

    Layers with fewer groups than others, and those without heads, are filled up with heads of zeros.
    """

    name = "laguna"
    summary = "folders for unmodified transformers and for servers, of Qwen3-like decoders"
    install = "headscope[engines]"
    allocation = "per-group"

    def check(self, checkpoint: Checkpoint) -> None:
        if not hasattr(transformers, "LagunaForCausalLM"):
            raise ConfigError(f"laguna: transformers {transformers.__version__} has no Laguna; upgrade transformers")
        if problem := _problem(checkpoint.model):
            raise ConfigError(
                "laguna writes causal language models with layers as Qwen3's (queries and keys normalised by head, no "
                f"biases, dense feed-forward layers); {checkpoint.path}, {type(checkpoint.model).__name__}, {problem}"
            )

    def adds_bias(self, checkpoint: Checkpoint) -> bool:
        return False

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, *, quantize: str = "none") -> EngineFile:
        source_model: Any = stored_copy(checkpoint)
        layers = [decoder_layer(module) for module in source_model.model.model.layers]
        groups = max(1, *(layer.groups for layer in layers))
        shared = [layer.heads // layer.groups if layer.heads else 1 for layer in layers]
        model = source_model.model
        gate = float(torch.nn.functional.softplus(torch.zeros(())).to(model.dtype))  # of a W_G of zeros
        weights = {name: values.detach() for name, values in model.state_dict().items()}
        weights |= padded_attention(layers, [groups] * len(layers), shared)
        gates = {
            f"model.layers.{number}.self_attn.g_proj.weight": torch.zeros(groups * heads, model.config.hidden_size)
            for number, heads in enumerate(shared)
        }
        config = _laguna_config(model, groups=groups, shared=shared)
        stock = padded_model(transformers.LagunaForCausalLM, config, model, _divide_output(weights, gate) | gates)
        write_folder(source_model.with_model(stock), folder / FOLDER)
        counts = stock.config.num_attention_heads_per_layer
        n_padding = sum(counts) - sum(layer.heads for layer in layers)
        proof = verify_folder(source_model, _open_folder(folder / FOLDER), data, n_padding=n_padding)
        _write_servers(stock, weights, gate, folder)
        limits = [f"`{SERVERS}` in transformers: it reads `gating: false` as a gate, and fills it with random numbers"]
        if is_half(model.dtype):
            limits.append(
                f"`{FOLDER}` opened in float32: its gate is {gate} in {str(model.dtype).removeprefix('torch.')}, which "
                f"W_O is divided by, and {math.log(2):.6f} in float32, so heads would write "
                f"{math.log(2) / gate - 1:+.2%}; open it as it is stored, which is the default of transformers"
            )
        file = EngineFile(
            **proof,
            export=self.name,
            file=FOLDER,
            sizes=f"query heads {', '.join(map(str, counts))} over {stock.config.num_key_value_heads} groups",
            opens=(
                f"`{FOLDER}`: transformers, `AutoModelForCausalLM.from_pretrained`, without any code of its own",
                f"`{SERVERS}`: {SERVER_PROGRAMS}, by what their sources say; nothing here ran them",
            ),
            limits=tuple(limits),
        )
        card = Card(
            title=f"Laguna for servers: {file.sizes}",
            command=f"prune remove … --export {file.export}",
            facts=(
                f"its weights are those of `{FOLDER}` beside it, without the gate, and W_O is not divided by it: read "
                "again and compared number by number",
                f"run here: `{FOLDER}`, {file.quantity} {file.difference:.1e} by {file.runtime}",
                f"only read: that {SERVER_PROGRAMS} take `gating: false`, `num_attention_heads_per_layer` and other "
                "entries of config.json, in their sources; none of them ran this folder",
            ),
            opens=(f"{SERVER_PROGRAMS}: by their sources",),
            limits=(
                "transformers: it takes `gating: false` for a gate per element, and fills it with random numbers",
                "vLLM before its fix #45564, SGLang before #32625",
            ),
        )
        write_card(card, folder / SERVERS)
        return file


def _problem(model: Any) -> str:
    """In what a model differs from Qwen3, "" if in nothing."""
    names = [name for name, _ in model.named_parameters()]
    if unknown_names := [name for name in names if not _WEIGHTS.fullmatch(name)]:
        return f"has {unknown_names[0]}"
    if not any(name.endswith("self_attn.q_norm.weight") for name in names):
        return "has no q_norm"
    layers = model.model.layers
    attention = [layer.self_attn for layer in layers]
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    problems = {
        "normalises all heads together": any(module.q_norm.weight.shape != (module.head_dim,) for module in attention),
        "scales scores by another factor than 1/√k": any(
            abs(module.scaling * module.head_dim**0.5 - 1) > 1e-6 for module in attention
        ),
        "has feed-forward layers of different widths": len({layer.mlp.down_proj.weight.shape for layer in layers}) > 1,
        f"has layers of type {', '.join(sorted(kinds))}": bool(kinds),
    }
    return next((problem for problem, holds in problems.items() if holds), "")


def _divide_output(weights: dict[str, Tensor], gate: float) -> dict[str, Tensor]:
    """The weights with W_O divided by the gate."""
    outputs = {name: values for name, values in weights.items() if name.endswith("o_proj.weight")}
    return weights | {name: (values.double() / gate).to(values.dtype) for name, values in outputs.items()}


SHARED = (
    *("vocab_size", "hidden_size", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "attention_dropout"),
)
"""Settings that Laguna's config takes from the model's."""


def _laguna_config(model: Any, *, groups: int, shared: list[int]) -> Any:
    config, count = model.config, len(shared)
    rope = dict(config.rope_parameters)
    by_kind = {kind: rope.get(kind, rope) for kind in ("full_attention", "sliding_attention")}
    width = int(model.model.layers[0].mlp.down_proj.weight.shape[1])
    return transformers.LagunaConfig(
        **{name: getattr(config, name) for name in SHARED},
        intermediate_size=width,
        num_hidden_layers=count,
        num_attention_heads=groups * max(shared),
        num_attention_heads_per_layer=[groups * share for share in shared],
        num_key_value_heads=groups,
        head_dim=int(model.model.layers[0].self_attn.head_dim),
        layer_types=list(getattr(config, "layer_types", None) or ["full_attention"] * count),
        sliding_window=getattr(config, "sliding_window", None) or config.max_position_embeddings,
        rope_parameters={kind: {"partial_rotary_factor": 1.0, **values} for kind, values in by_kind.items()},
        gating="per-head",
        mlp_layer_types=["dense"] * count,
        num_experts=2,  # no layer has experts, but readers need their sizes
        num_experts_per_tok=1,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=width,
    )


def _open_folder(folder: Path) -> Any:
    """The model as unmodified transformers opens it; CheckpointError where it is another class, or lacks weights."""
    auto: Any = transformers.AutoModelForCausalLM
    with quiet_transformers():
        copy, info = auto.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, output_loading_info=True
        )
    wrong_keys = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if type(copy).__name__ != "LagunaForCausalLM" or wrong_keys:
        raise CheckpointError(
            f"transformers opens the folder as {type(copy).__name__}, with wrong weights {wrong_keys[:3]}; nothing was "
            "saved. Please report this with the output of `headscope show`"
        )
    return copy


def _write_servers(stock: Any, weights: dict[str, Tensor], gate: float, folder: Path) -> None:
    """Write the folder without gate and with untied embeddings; read its files again and compare the weights."""
    from huggingface_hub import save_torch_state_dict

    path = folder / SERVERS
    shutil.copytree(folder / FOLDER, path, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    config = stock.config.to_dict()
    config |= {"gating": False, "tie_word_embeddings": False, "qkv_bias": False, "decoder_sparse_step": 1}
    config |= {"mlp_only_layers": list(range(len(stock.model.layers))), "architectures": [type(stock).__name__]}
    transformers.LagunaConfig.from_dict(config).save_pretrained(path)
    save_torch_state_dict({name: values.clone() for name, values in weights.items()}, path, metadata={"format": "pt"})
    stored: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
    stored = _divide_output(stored, gate)
    state = {name: values.cpu() for name, values in stock.state_dict().items() if not name.endswith("g_proj.weight")}
    if sorted(stored) != sorted(state) or not all(torch.equal(stored[name], state[name]) for name in state):
        raise CheckpointError(f"the weights in {SERVERS} are others than those in {FOLDER}; nothing was saved")
