"""`--export deci-hf`: a DeciLM of Hugging Face, with key/value heads that differ by layer and layers without attention.

DeciLM has one number of query heads for all layers, and widths of feed-forward layers that are multiples of 256. Layers
with fewer heads are filled up with heads of zeros, other widths with zeros.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import nn

from headscope.errors import ConfigError, flag, raise_first
from headscope.evaluation.model_inputs import InputTexts
from headscope.export.base import (
    FEED_FORWARD,
    DecoderLayer,
    EngineExport,
    EngineFile,
    decoder_layer,
    engine,
    padded_attention,
    padded_model,
    verify_folder,
)
from headscope.files.reading import read_object
from headscope.files.writing import write_json
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.selfcontained import stored_copy, write_folder
from headscope.model.interface import quiet_transformers

FOLDER, MODULE = "deci-hf", "modeling_decilm"
FAMILIES = ("llama", "mistral")


@engine
class DeciHf(EngineExport):
    """Llama-like decoders, each layer with its own number of key/value heads or, after the first, without attention."""

    name = "deci-hf"
    summary = "a folder in the layout of DeciLM, of Llama-like decoders"
    install = "headscope[engines]"

    def check(self, checkpoint: Checkpoint) -> None:
        model: Any = checkpoint.model
        biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
        window = getattr(model.config, "sliding_window", None)
        problems = {
            f"is of type {checkpoint.model_type!r}": checkpoint.model_type not in FAMILIES,
            "predicts no words": not hasattr(model, "lm_head"),
            f"has {', '.join(biases[:1])}": bool(biases),
            f"has a sliding_window of {window}": window is not None,
        }
        scope = f"deci-hf writes causal language models of type {' and '.join(FAMILIES)} without biases and windows; "
        raise_first(ConfigError, problems, f"{scope}{checkpoint.path}, {type(model).__name__}, ")

    def adds_bias(self, checkpoint: Checkpoint) -> bool:
        return False

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, *, quantize: str = "none") -> EngineFile:
        from headscope.formats.huggingface import modeling_decilm

        source_model: Any = stored_copy(checkpoint)
        heads, groups = sizes(source_model.model)
        layers = [decoder_layer(module) for module in source_model.model.model.layers]
        deci_model, path = _deci_model(source_model.model, layers, heads, groups), folder / FOLDER
        write_folder(source_model.with_model(deci_model), path)
        (path / f"{MODULE}.py").write_text(inspect.getsource(modeling_decilm), encoding="utf-8")
        classes = {"AutoConfig": "DeciLMConfig", "AutoModelForCausalLM": "DeciLMForCausalLM"}
        code = {"auto_map": {auto: f"{MODULE}.{name}" for auto, name in classes.items()}}
        write_json(path / "config.json", {**read_object(path / "config.json"), **code})
        with quiet_transformers():
            copy: Any = modeling_decilm.DeciLMForCausalLM.from_pretrained(path, local_files_only=True)
        n_padding = sum(heads - layer.heads for layer, count in zip(layers, groups, strict=True) if count)
        return EngineFile(
            **verify_folder(source_model, copy, data, n_padding=n_padding),
            export=self.name,
            file=FOLDER,
            sizes=f"{heads} query heads over {', '.join(map(str, groups))} key/value heads",
            opens=(
                f"`{FOLDER}`: transformers, with the modelling file beside the weights (`trust_remote_code=True`)",
                f"`{FOLDER}`: headscope, which runs no code of the folder",
                f"`{FOLDER}`: vLLM, SGLang, TensorRT-LLM (`nemotron-nas`), by what their sources say; nothing here ran "
                "them",
            ),
        )


def sizes(model: Any) -> tuple[int, list[int]]:
    """The fewest query heads for all layers, and key/value heads for each (0: no attention), that hold a model's."""
    layers, config = [decoder_layer(module) for module in model.model.layers], model.config
    upper = max(config.num_attention_heads, *(layer.heads for layer in layers))
    for heads in range(max(1, *(layer.heads for layer in layers)), upper + 1):
        fitting = [_groups(layer, heads, empty=number > 0) for number, layer in enumerate(layers)]
        if config.hidden_size % heads == 0 and None not in fitting:
            return heads, [count for count in fitting if count is not None]
    problem = f"deci-hf: no number of query heads up to {upper} divides {config.hidden_size} and holds all groups"
    raise ConfigError(f"{problem}; take another {flag.merge_kv}, or {flag.export} gguf")


def _groups(layer: DecoderLayer, heads: int, *, empty: bool) -> int | None:
    """The fewest key/value heads that hold a layer's groups if it has `heads` query heads; None if no number does."""
    if not layer.heads and empty:
        return 0
    groups = layer.padded.groups
    shared = layer.padded.heads // groups
    return next((n for n in range(groups, heads + 1) if heads % n == 0 and heads // n >= shared), None)


def _deci_model(model: Any, layers: list[DecoderLayer], heads: int, groups: list[int]) -> Any:
    """The model as a DeciLM with these numbers of heads, padded with zeros."""
    from headscope.formats.huggingface.modeling_decilm import MULTIPLE, DeciLMConfig, DeciLMForCausalLM

    hidden = model.config.hidden_size
    widths = [-(-layer.module.mlp.down_proj.weight.shape[1] // MULTIPLE) * MULTIPLE for layer in layers]
    blocks = [
        {
            "attention": {"no_op": not count, "n_heads_in_group": heads // count if count else None},
            "ffn": {"no_op": False, "ffn_mult": 3 * width / (2 * hidden)},
        }
        for count, width in zip(groups, widths, strict=True)
    ]
    values = {**model.config.to_dict(), "num_attention_heads": heads, "num_key_value_heads": None}
    values |= {"head_dim": layers[0].width, "auto_map": {}, "intermediate_size": max(widths)}
    for entry in ("narrowed", "kept_heads", "model_type", "architectures", "sliding_window"):
        values.pop(entry, None)
    with quiet_transformers():
        config: Any = DeciLMConfig(**values, block_configs=blocks)
    weights = {
        name: values.detach()
        for name, values in model.state_dict().items()
        if "self_attn" not in name and "mlp" not in name
    }
    weights |= padded_attention(layers, groups, [heads // max(count, 1) for count in groups])
    for number, (layer, count, width) in enumerate(zip(layers, groups, widths, strict=True)):
        if not count:
            del weights[f"model.layers.{number}.input_layernorm.weight"]
        for name in FEED_FORWARD.values():
            weight = getattr(layer.module.mlp, name).weight.detach()
            n_zeros = width - weight.shape[1 if name == "down_proj" else 0]
            padding = (0, n_zeros) if name == "down_proj" else (0, 0, 0, n_zeros)
            weights[f"model.layers.{number}.mlp.{name}.weight"] = nn.functional.pad(weight, padding)
    return padded_model(DeciLMForCausalLM, config, model, weights)
