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
from headscope.pruning.engines.gguf.vocabulary import GgufVocabulary, vocabulary_of

ROW = 32  # numbers of a row that are quantised together


def write_gguf(decoder: LlamaDecoder, tokenizer: Any, path: Path, *, quantize: str = "none") -> GgufVocabulary:
    """Write the file; matrices in the type of the model, or quantised (odd rows in float16), vectors in float32.

    Returns the vocabulary as it was written.
    """
    import gguf

    writer, types = gguf.GGUFWriter(path, decoder.container.name), gguf.GGMLQuantizationType
    dtypes = {torch.float16: types.F16, torch.bfloat16: types.BF16}
    kind = types.Q8_0 if quantize == "q8_0" else dtypes.get(decoder.model.lm_head.weight.dtype, types.F32)
    _write_sizes(writer, decoder)
    writer.add_file_type(_FILE_TYPES[kind.name])
    if kind is types.Q8_0:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary = vocabulary_of(tokenizer, decoder.model.model.embed_tokens.weight.shape[0])
    _write_vocabulary(writer, vocabulary, tokenizer)
    waiting: list[Callable[[], np.ndarray[Any, Any]]] = []
    for name, values in tensors(decoder):
        blocks = kind is not types.Q8_0 or values.shape[-1] % ROW == 0  # rows are whole blocks
        stored = types.F32 if values.ndim < 2 else kind if blocks else types.F16
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
    if container.gated:  # a reader of mixtures of experts wants to know that no layer has any
        writer.add_leading_dense_block_count(len(layers))
        writer.add_expert_feed_forward_length(widths[0])
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_weights_norm(True)
        writer.add_uint32(f"{container.name}.expert_shared_feed_forward_length", widths[0])
    _write_rotary(writer, decoder.rotary(container))


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
    for name in ("bos", "eos", "unk", "sep", "pad", "mask"):
        if (number := getattr(tokenizer, f"{name}_token_id", None)) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    ids, bos, eos = tokenizer("a")["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id
    writer.add_add_bos_token(bos is not None and ids[:1] == [bos])  # whether it puts them around a text
    writer.add_add_eos_token(eos is not None and ids[-1:] == [eos])
    if template := getattr(tokenizer, "chat_template", None):
        writer.add_chat_template(template)
