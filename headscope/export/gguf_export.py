"""`--export gguf`: one file for llama.cpp and programs built on it, kept if llama.cpp gives the model's predictions.

Log-probabilities are compared at the steps of the model's greedy continuations of a few texts. How BPE splits text
before merging is stored as one of llama.cpp's names of regular expressions (its src/llama-vocab.cpp).
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headscope.errors import CheckpointError, flag
from headscope.evaluation.model_inputs import InputTexts, cut_prompts
from headscope.export import llama_cpp
from headscope.export.base import QUANTITY, STEPS, EngineExport, EngineFile, check_difference, engine, tolerance
from headscope.export.gguf_layers import LlamaDecoder, check_family, context_length, tensors
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.selfcontained import stored_copy
from headscope.model.forward import ModelInputs, outputs

FILE = "model.gguf"
TOP, TEXTS, LONGEST = 1000, 8, 48
"""Most likely tokens that are compared, texts that are split into tokens, and tokens of a continued text."""
QUANTIZED = 0.1
"""Limit of the difference by quantization, as a share of the log-probabilities' range; random models: 0.01 to 0.07."""


@engine
class Gguf(EngineExport):
    """Llama-like decoders, each layer with its own number of heads where llama.cpp has an architecture that can."""

    name = "gguf"
    summary = "one file for llama.cpp, of Llama-like decoders"
    install = "headscope[engines]"
    packages = ("gguf", "xllamacpp")
    quantizations: ClassVar = {"q8_0": "matrices in 8 bits"}
    endings = ("gguf",)

    def check(self, checkpoint: Checkpoint) -> None:
        check_family(checkpoint)

    def adds_bias(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.model_type != "qwen3"

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, *, quantize: str = "none") -> EngineFile:
        decoder, path = LlamaDecoder(stored_copy(checkpoint)), folder / FILE
        tokenizer, quantity = getattr(checkpoint, "tokenizer", None), QUANTITY
        vocabulary = write_gguf(decoder, tokenizer, path)
        texts = list(data.sources[:TEXTS]) if vocabulary.splits_text else []
        pairs = continuations(checkpoint, data, context_length(decoder.config))
        comparison, ids = compare(path, vocabulary, pairs, texts)
        limit = tolerance(decoder.model.lm_head.weight.dtype, comparison.largest)
        check_difference(comparison.difference, limit, "llama.cpp")
        notes = [comparison.greedy]
        if quantize != "none":  # after what the file holds was proved
            write_gguf(decoder, tokenizer, path, quantize=quantize)
            before, quantity = comparison.difference, "log-probabilities moved by quantization by"
            comparison, _ = compare(path, vocabulary, pairs)
            limit = QUANTIZED * comparison.range
            if not comparison.difference <= limit:
                raise CheckpointError(
                    f"quantization moves log-probabilities by {comparison.difference:.1e}, tolerance {limit:.1e} (a "
                    f"tenth of their range); nothing was saved. Leave out {flag.quantize}"
                )
            notes = [
                f"before quantization log-probabilities differed by {before:.1e}",
                f"quantised, {comparison.greedy}",
            ]
        if texts:
            expected_ids = [checkpoint.tokenizer(text)["input_ids"] for text in texts]  # type: ignore[attr-defined]
            same = sum(a == b for a, b in zip(ids, expected_ids, strict=True))
            notes.append(f"llama.cpp splits {same} of {len(texts)} sentences into the same tokens")
        name, varies, limits = decoder.container.name, decoder.container.per_layer_heads, list[str]()
        if not vocabulary.splits_text:
            limits = [f"`{FILE}` lists its tokens, but llama.cpp cannot split text as this tokenizer does: give it ids"]
        if (length := context_length(decoder.config)) < decoder.config.max_position_embeddings:
            limits.append(f"`{FILE}` has a context of {length} tokens, the sliding window: it is exact within it")
        return EngineFile(
            export=self.name,
            file=FILE,
            runtime=f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')})",
            quantity=quantity,
            difference=comparison.difference,
            limit=limit,
            sizes=f"architecture {name}" + (f", {quantize} matrices" if quantize != "none" else ""),
            opens=(
                f"`{FILE}`: llama.cpp and programs built on it (llama-cli, llama-server)",
                *([f"its architecture is {name}, in which every layer may have another number of heads"] * varies),
            ),
            limits=tuple(limits),
            notes=tuple(notes),
        )


class LogitComparison(NamedTuple):
    """Log-probabilities of llama.cpp against the model's, and a line on greedy choices.

    `difference`, `largest` absolute value and `range` (largest minus smallest of a step) are maxima over all steps.
    """

    difference: float
    largest: float
    range: float
    greedy: str


def compare(
    path: Path, vocabulary: GgufVocabulary, pairs: Sequence[tuple[list[int], Tensor]], texts: Sequence[str] = ()
) -> tuple[LogitComparison, list[list[int]]]:
    """Compare llama.cpp's predictions after prompts with log-probabilities [V]; returns also its ids of `texts`."""
    top, prompt_ids = min(TOP, len(vocabulary.tokens)), [prompt for prompt, _ in pairs]
    answers, ids_of_texts = llama_cpp.ask(path, prompt_ids, list(texts), top=top, forced_token=vocabulary.letter)
    difference, largest, spread, same, steps = 0.0, 0.0, 0.0, 0, 0
    for log_p_of_id, (_, row) in zip(answers, pairs, strict=True):
        spread = max(spread, float(row.max() - row.min()))
        if not all(map(math.isfinite, log_p_of_id.values())):
            raise CheckpointError(
                "llama.cpp computes NaN or infinite numbers: it rounds to the type of matrices before it multiplies; "
                "nothing was saved. Save the model in bfloat16 or float32 first"
            )
        if log_p_of_id:
            ids, values = torch.tensor(list(log_p_of_id)), torch.tensor(list(log_p_of_id.values()), dtype=torch.float64)
            difference = max(difference, float((values - row[ids]).abs().max()))
            largest = max(largest, float(row[ids].abs().max()))
            same += int(ids[values.argmax()]) == int(row.argmax())
            steps += 1
    if not steps:
        raise CheckpointError("llama.cpp gives no log-probabilities to compare; give the model a tokenizer")
    greedy = f"the likeliest token is the same in llama.cpp at {same} of {steps} steps"
    return LogitComparison(difference, largest, spread, greedy), ids_of_texts


def continuations(checkpoint: Checkpoint, data: InputTexts, context: int) -> list[tuple[list[int], Tensor]]:
    """Prompts, which are texts followed by 0, 1, … greedy tokens, and log-probabilities [V] of the token after each.

    One position of llama.cpp's `context` is left for that token.
    """
    room = min(LONGEST, context) - 1
    steps, pairs = min(STEPS, room), list[tuple[list[int], Tensor]]()
    for prompt in cut_prompts(data, room - steps + 1):
        for _ in range(steps):
            ids = torch.tensor([prompt], device=checkpoint.device)
            row = outputs(checkpoint.model, ModelInputs({"input_ids": ids}, None))[0, -1]
            pairs.append((prompt, row.double().log_softmax(-1).cpu()))
            prompt = [*prompt, int(row.argmax())]
    return pairs


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
SPLITS = {
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}": "llama-bpe",
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}": "qwen2",
    rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}
"""Regular expressions by which tokenizers split text, and llama.cpp's names of them."""


@dataclass(frozen=True, kw_only=True)
class GgufVocabulary:
    """Tokens in the order of their ids, with llama.cpp's types and, for SentencePiece-like BPE, scores.

    `kind` and `split` are its names of the tokenizer and of the regular expression; `merges` are those of BPE over
    bytes; `space_prefix`: text gets a space in front. `splits_text`: llama.cpp can split text into these tokens.
    """

    tokens: list[str]
    types: list[int]
    kind: str = "llama"
    split: str = "default"
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    space_prefix: bool | None = None
    splits_text: bool = True

    @property
    def letter(self) -> int | None:
        """The id of a token of English letters, so of whole characters; None where there is none."""
        plain = (number for number, token in enumerate(self.tokens) if re.fullmatch("[A-Za-z]+", token))
        return next((number for number in plain if self.types[number] == NORMAL), None)


def vocabulary_of(tokenizer: Any, size: int) -> GgufVocabulary:
    """The vocabulary of a tokenizer for a model of `size` embeddings; numbered tokens where there is no tokenizer."""
    backend, ids = getattr(tokenizer, "backend_tokenizer", None), {} if tokenizer is None else tokenizer.get_vocab()
    parts: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    model: dict[str, Any] = parts.get("model") or {}
    by_id = {number: token for token, number in ids.items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(size)]
    types = [NORMAL if number in by_id else UNUSED for number in range(size)]
    if model.get("type") != "BPE":  # tokens alone: llama.cpp can turn ids into text, but not split text
        return GgufVocabulary(tokens=tokens, types=types, scores=[0.0] * size, splits_text=False)
    special = {token["id"]: bool(token["special"]) for token in parts.get("added_tokens", [])}
    for number, is_special in {**special, **dict.fromkeys(tokenizer.all_special_ids, True)}.items():
        if number < size:
            types[number] = CONTROL if is_special else USER_DEFINED
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if not model.get("byte_fallback"):
        split = _split_name(parts)
        merge_lines = [" ".join(part.replace(" ", chr(ord(" ") + 256)) for part in merge) for merge in merges]
        rules: dict[str, Any] = {"split": split or "default", "merges": merge_lines, "splits_text": bool(split)}
        return GgufVocabulary(tokens=tokens, types=types, kind="gpt2", **rules)
    # SentencePiece-like: llama.cpp merges the pair whose result has the highest score, transformers the lowest rank
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    pairs = zip(tokens, types, strict=True)
    types = [BYTE if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else kind for token, kind in pairs]
    if tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = UNKNOWN
    scores, prefix = [-float(ranks.get(token, len(merges))) for token in tokens], _space_prefix(parts)
    return GgufVocabulary(
        tokens=tokens, types=types, scores=scores, space_prefix=bool(prefix), splits_text=prefix is not None
    )


def _space_prefix(parts: dict[str, Any]) -> bool | None:
    """Whether text gets a space in front before spaces become ▁; None where it has another preparation."""
    steps = _steps(parts.get("normalizer")) + _steps(parts.get("pre_tokenizer"))
    prefix, replaces_spaces = False, False
    for step in steps:
        if step["type"] == "Prepend" and step["prepend"] == "▁":
            prefix = True
        elif step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "▁":
            replaces_spaces = True
        elif step["type"] == "Metaspace" and not step.get("split", True):
            prefix, replaces_spaces = step.get("prepend_scheme", "always") != "never", True
        else:
            return None
    return prefix if replaces_spaces else None


def _split_name(parts: dict[str, Any]) -> str:
    """llama.cpp's name of how a BPE tokenizer splits text before merging; "" where it has none."""
    steps = _steps(parts.get("pre_tokenizer"))
    last = steps[-1] if steps else {"type": ""}
    is_plain = parts.get("normalizer") in (None, {"type": "NFC"}) and last["type"] == "ByteLevel"
    if not is_plain or last.get("add_prefix_space"):
        return ""
    if last.get("use_regex", True):
        is_smollm = steps[:-1] == [{"type": "Digits", "individual_digits": True}]
        return "gpt-2" if len(steps) == 1 else "smollm" * is_smollm
    if len(steps) == 2 and steps[0]["type"] == "Split" and steps[0].get("behavior") == "Isolated":
        return SPLITS.get(steps[0]["pattern"].get("Regex", ""), "")
    return ""


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences flattened."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part.get("normalizers", part.get("pretokenizers", [])) for step in _steps(inner)]
    return [part]


BLOCK = 32  # numbers of a row that are quantised together


def write_gguf(decoder: LlamaDecoder, tokenizer: Any, path: Path, *, quantize: str = "none") -> GgufVocabulary:
    """Write the file and return its vocabulary; matrices in the model's type or quantised, vectors in float32.

    Matrices whose rows are no whole blocks are in float16 instead of quantised.
    """
    import gguf
    from gguf.quants import quantize as quantize_array

    writer = gguf.GGUFWriter(path, decoder.container.name, use_temp_file=True)
    types = gguf.GGMLQuantizationType
    dtypes = {torch.float16: types.F16, torch.bfloat16: types.BF16}
    kind = types.Q8_0 if quantize == "q8_0" else dtypes.get(decoder.model.lm_head.weight.dtype, types.F32)
    _write_sizes(writer, decoder)
    writer.add_file_type(_FILE_TYPES[kind.name])
    if kind is types.Q8_0:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary = vocabulary_of(tokenizer, decoder.model.model.embed_tokens.weight.shape[0])
    _write_vocabulary(writer, vocabulary, tokenizer)
    for name, values in tensors(decoder):
        fits = kind is not types.Q8_0 or values.shape[-1] % BLOCK == 0  # rows are whole blocks
        matrix_type = kind if fits else types.F16
        tensor_type = types.F32 if values.ndim < 2 else matrix_type
        array = quantize_array(np.ascontiguousarray(values.float().cpu().numpy()), tensor_type)
        writer.add_tensor(name, array, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return vocabulary


_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}


def _write_sizes(writer: Any, decoder: LlamaDecoder) -> None:
    import gguf

    config, container, layers = decoder.config, decoder.container, decoder.layers
    widths = [layer.module.mlp.down_proj.weight.shape[1] for layer in layers]
    heads, groups = [layer.heads for layer in layers], [layer.groups for layer in layers]
    writer.add_block_count(len(layers))
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(widths if container.per_layer_heads else widths[0])
    writer.add_head_count(heads if container.per_layer_heads else heads[0])
    writer.add_head_count_kv(groups if container.per_layer_heads else groups[0])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(decoder.width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(decoder.model.model.embed_tokens.weight.shape[0])
    if container.gated:  # the architecture is a mixture of experts; no layer of this model has experts
        writer.add_leading_dense_block_count(len(layers))
        writer.add_expert_feed_forward_length(widths[0])
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_weights_norm(True)
        writer.add_uint32(f"{container.name}.expert_shared_feed_forward_length", widths[0])
    rotary = decoder.rotary
    writer.add_rope_freq_base(rotary.theta)
    if rotary.factor is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rotary.kind))
        writer.add_rope_scaling_factor(rotary.factor)
    if rotary.original_context is not None:
        writer.add_rope_scaling_orig_ctx_len(rotary.original_context)
    if abs(rotary.gain - 1) > 2e-6:  # more than the rounding of transformers, which computes it in float32
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
    writer.add_add_bos_token(bos is not None and ids[:1] == [bos])  # whether the tokenizer adds them around a text
    writer.add_add_eos_token(eos is not None and ids[-1:] == [eos])
    if template := getattr(tokenizer, "chat_template", None):
        writer.add_chat_template(template)
