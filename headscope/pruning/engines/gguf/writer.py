"""A decoder and its vocabulary as one GGUF file: metadata, then tensors one after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.pruning.engines.gguf.layers import LlamaDecoder, context_length, tensors
from headscope.pruning.engines.gguf.rotary import ROUNDING, Rotary
from headscope.pruning.engines.gguf.vocabulary import GgufVocabulary, added_ends, special_tokens, vocabulary_of

ROW = 32  # numbers of a row that are quantised together


def write_gguf(decoder: LlamaDecoder, tokenizer: Any, path: Path, *, quantize: str = "none") -> GgufVocabulary:
    """Write the file; matrices in the type of the model, or quantised, vectors in float32.

    Returns the vocabulary as it was written.
    """
    import gguf

    writer = gguf.GGUFWriter(path, decoder.container.name)
    kind = _matrix_type(decoder, quantize)
    _write_sizes(writer, decoder)
    writer.add_file_type(_FILE_TYPES[kind.name])
    if kind is gguf.GGMLQuantizationType.Q8_0:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary = vocabulary_of(tokenizer, decoder.model.model.embed_tokens.weight.shape[0])
    _write_vocabulary(writer, vocabulary, tokenizer)
    waiting: list[Callable[[], np.ndarray[Any, Any]]] = []
    for name, values in tensors(decoder):
        stored = _type_of(values, kind)
        shape = gguf.quants.quant_shape_to_byte_shape(values.shape, stored)
        itemsize = {"F32": 4, "F16": 2}.get(stored.name, 1)
        bytes_in_all = int(np.prod(shape)) if itemsize == 1 else values.numel() * itemsize
        as_stored = tuple(shape) if itemsize == 1 else tuple(values.shape)
        dtype = np.dtype({"F32": np.float32, "F16": np.float16}.get(stored.name, np.uint8))
        writer.add_tensor_info(name, as_stored, dtype, bytes_in_all, raw_dtype=stored)
        waiting.append(lambda values=values, stored=stored: _stored(values, stored))  # type: ignore[misc]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for make in waiting:
        writer.write_tensor_data(make())
    writer.close()
    return vocabulary


_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}


def _matrix_type(decoder: LlamaDecoder, quantize: str) -> Any:
    """GGUF's type of matrices."""
    from gguf import GGMLQuantizationType as Types

    if quantize == "q8_0":
        return Types.Q8_0
    dtypes = {torch.float16: Types.F16, torch.bfloat16: Types.BF16}
    return dtypes.get(decoder.model.lm_head.weight.dtype, Types.F32)


def _type_of(values: Tensor, kind: Any) -> Any:
    """The type that one tensor is stored in: vectors in float32, rows that are not whole blocks in float16."""
    from gguf import GGMLQuantizationType as Types

    if values.ndim < 2:
        return Types.F32
    return Types.F16 if kind is Types.Q8_0 and values.shape[-1] % ROW else kind


def _stored(values: Tensor, kind: Any) -> np.ndarray[Any, Any]:
    from gguf.quants import quantize

    stored: np.ndarray[Any, Any] = quantize(np.ascontiguousarray(values.float().cpu().numpy()), kind)
    return stored


def _write_sizes(writer: Any, decoder: LlamaDecoder) -> None:
    """Sizes, numbers of heads (one, or one a layer) and rotary embeddings."""
    config, container = decoder.config, decoder.container
    layers = decoder.placed(container)
    widths = [layer.module.mlp.down_proj.weight.shape[1] for layer in layers]
    heads, groups = [layer.heads for layer in layers], [layer.groups for layer in layers]
    writer.add_block_count(len(layers))
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(widths if container.ragged else widths[0])
    writer.add_head_count(heads if container.ragged else heads[0])
    writer.add_head_count_kv(groups if container.ragged else groups[0])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(decoder.width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(decoder.model.model.embed_tokens.weight.shape[0])
    if container.gated:
        _write_no_experts(writer, container.name, layers=len(layers), width=widths[0])
    _write_rotary(writer, decoder.rotary(container))


def _write_no_experts(writer: Any, name: str, *, layers: int, width: int) -> None:
    """What a reader of mixtures of experts wants to know where no layer has any."""
    writer.add_leading_dense_block_count(layers)
    writer.add_expert_feed_forward_length(width)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(True)
    writer.add_uint32(f"{name}.expert_shared_feed_forward_length", width)


def _write_rotary(writer: Any, rotary: Rotary) -> None:
    import gguf

    writer.add_rope_freq_base(rotary.theta)
    if rotary.factor is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rotary.kind))
        writer.add_rope_scaling_factor(rotary.factor)
    if rotary.trained is not None:
        writer.add_rope_scaling_orig_ctx_len(rotary.trained)
    if abs(rotary.gain - 1) > ROUNDING:
        writer.add_rope_scaling_attn_factors(rotary.gain)


def _write_vocabulary(writer: Any, vocabulary: GgufVocabulary, tokenizer: Any) -> None:
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    if tokenizer is None:
        return
    for name, number in special_tokens(tokenizer).items():
        getattr(writer, f"add_{name}_token_id")(number)
    for name, added in added_ends(tokenizer).items():
        getattr(writer, f"add_add_{name}_token")(added)
    template = getattr(tokenizer, "chat_template", None)
    if template:
        writer.add_chat_template(template)
