"""`--export ctranslate2`: a folder for CTranslate2, which translates with it before it is kept.

The model becomes a specification of CTranslate2 (specs/transformer_spec.py), which writes itself. Each stack has one
number of heads, and a width of heads of its own. What stands between ids and the first layer (scale, bias, projection)
is folded into one table where CTranslate2 has no place for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.errors import CheckpointError, ConfigError, one_line
from headscope.formats.base import Checkpoint
from headscope.model.forward import ModelInputs, outputs
from headscope.model.native.layers import position_table
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.model.removal_plan import alignment_heads
from headscope.pruning.engines.alignment import align
from headscope.pruning.engines.base import (
    FULL,
    QUANTITY,
    EngineExport,
    EngineFile,
    EngineOptions,
    EngineRun,
    engine,
    refuse_difference,
)
from headscope.pruning.engines.ctranslate2.translators import (
    Translator,
    TranslatorTokens,
    check_translator,
    source_tokens,
    translated,
    translator_of,
    write_splitters,
)
from headscope.pruning.model_inputs import InputTexts

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu-tanh": "GELUTanh", "silu": "SWISH", "tanh": "Tanh"}


def specification(translator: Translator) -> Any:
    """The `TransformerSpec` of a model, ready to be saved; ConfigError where CTranslate2 has no such model."""
    from ctranslate2.specs import transformer_spec

    config, state = translator.config, translator.state
    assert config.encoder is not None
    if reasons := misfits(config):
        raise ConfigError(f"CTranslate2 has no such model: {'; '.join(reasons)}")
    encoder = transformer_spec.TransformerEncoderSpec(**_options(config.encoder, len(config.encoder.self_heads)))
    decoder = transformer_spec.TransformerDecoderSpec(**_options(config.decoder, len(config.decoder.self_heads)))
    _set_stack(encoder, encoder.embeddings[0], "encoder", config.encoder, state)
    _set_stack(decoder, decoder.embeddings, "decoder", config.decoder, state)
    decoder.start_from_zero_embedding = config.start == "zero"
    before, weight = state.get("before_output.weight"), state["output.weight"].double()
    decoder.projection.weight = _array(weight if before is None else weight @ before.double())
    if "output.bias" in state:
        decoder.projection.bias = _array(state["output.bias"])
    spec = transformer_spec.TransformerSpec(encoder, decoder)
    _set_tokens(spec, translator)
    spec.config.add_attribute("layer_norm_epsilon", config.decoder.norm_epsilon)
    spec.validate()
    spec.optimize()
    return spec


def misfits(config: TransformerConfig) -> list[str]:
    """What of a model CTranslate2 cannot say."""
    assert config.encoder is not None
    stacks = {"encoder": config.encoder, "decoder": config.decoder}
    reasons = []
    for side, stack in stacks.items():
        counts = (*stack.self_heads, *stack.cross_heads)
        if len(set(counts)) > 1 or 0 in counts:
            reasons.append(
                f"layers of its {side} have {', '.join(map(str, counts))} heads, and a stack has one number of them "
                "(`headscope prune rank --allocate uniform` chooses heads so)"
            )
        facts = {
            f"values of its {side} have a width of their own (d_value)": stack.d_value not in (None, stack.d_head),
            f"heads of its {side} read slices of the input (head_input)": stack.head_input == "slice",
            f"its {side} has the activation {stack.activation}": stack.activation not in ACTIVATIONS,
            f"its {side} has a norm after post-norm layers": stack.norm == "post" and stack.final_norm,
        }
        reasons += [reason for reason, holds in facts.items() if holds]
    if config.encoder.norm_epsilon != config.decoder.norm_epsilon:
        reasons.append("norms of its two stacks have different epsilons")
    return reasons


def _options(stack: StackConfig, layers: int) -> dict[str, Any]:
    from ctranslate2.specs import common_spec

    return {
        "num_layers": layers,
        "num_heads": stack.most_heads,
        "head_dim": stack.d_head,
        "pre_norm": stack.norm == "pre",
        "no_final_norm": not stack.final_norm,
        "activation": common_spec.Activation[ACTIVATIONS[stack.activation]],
        "layernorm_embedding": stack.embedding_norm,
    }


def _set_stack(spec: Any, embeddings: Any, side: str, stack: StackConfig, state: Mapping[str, Tensor]) -> None:
    name = f"{side}.embeddings"
    embeddings.weight, spec.scale_embeddings = _table(name, stack, state)
    spec.position_encodings.encodings = _positions(name, stack, state)
    if stack.embedding_norm:
        _set_norm(spec.layernorm_embedding, f"{name}.norm", state)
    if stack.final_norm:
        _set_norm(spec.layer_norm, f"{side}.norm", state)
    for number, layer in enumerate(spec.layer):
        place = f"{side}.layers.{number}"
        _set_attention(layer.self_attention, f"{place}.self_attention", state, parts=("query key value", "output"))
        if stack.cross_heads:
            cross = ("query", "key value", "output")
            _set_attention(layer.attention, f"{place}.cross_attention", state, parts=cross)
        _set_norm(layer.ffn.layer_norm, f"{place}.ffn_norm", state)
        _set_linear(layer.ffn.linear_0, [f"{place}.ffn.inner"], state)
        _set_linear(layer.ffn.linear_1, [f"{place}.ffn.outer"], state)


def _table(name: str, stack: StackConfig, state: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Embeddings [V d] and what they are multiplied by; bias and projection are part of the table."""
    table, scale = state[f"{name}.tokens.weight"].double(), stack.d_model**0.5 if stack.scale_embedding else 1.0
    bias, projection = state.get(f"{name}.bias"), state.get(f"{name}.projection.weight")
    if bias is None and projection is None:
        return _array(table), np.float32(scale)
    table = table * scale if bias is None else table * scale + bias.double()
    return _array(table if projection is None else table @ projection.double().T), np.float32(1.0)


def _positions(name: str, stack: StackConfig, state: Mapping[str, Tensor]) -> Any:
    """Rows from the first position of a text on."""
    table = position_table(stack, state.get(f"{name}.positions.weight"), state[f"{name}.tokens.weight"])
    return _array(table[stack.position_offset :])


def _set_attention(spec: Any, name: str, state: Mapping[str, Tensor], *, parts: tuple[str, ...]) -> None:
    """Matrices that read the same input are one, in the order of query, key and value; the norm of the sublayer."""
    for linear, fused in zip(spec.linear, parts, strict=True):
        _set_linear(linear, [f"{name}.{part}" for part in fused.split()], state)
    _set_norm(spec.layer_norm, f"{name}_norm", state)


def _set_linear(spec: Any, names: list[str], state: Mapping[str, Tensor]) -> None:
    spec.weight = np.concatenate([_array(state[f"{name}.weight"]) for name in names])
    biases = [state.get(f"{name}.bias") for name in names]
    if any(bias is not None for bias in biases):
        weights = [state[f"{name}.weight"] for name in names]
        filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        spec.bias = np.concatenate([_array(values) for values in filled])


def _set_norm(spec: Any, name: str, state: Mapping[str, Tensor]) -> None:
    spec.gamma, spec.beta = _array(state[f"{name}.weight"]), _array(state[f"{name}.bias"])


def _array(values: Tensor) -> Any:
    return np.ascontiguousarray(values.detach().float().cpu().numpy())


def _set_tokens(spec: Any, translator: Translator) -> None:
    tokens = translator.tokens
    for side, own in (("source", tokens.source), ("target", tokens.target)):
        if len(set(own)) < len(own):
            raise ConfigError(f"two ids of the {side} vocabulary have the same subword; CTranslate2 cannot list them")
    spec.register_source_vocabulary(tokens.source)
    spec.register_target_vocabulary(tokens.target)
    spec.config.unk_token, spec.config.eos_token = tokens.unknown, tokens.end
    spec.config.bos_token = spec.config.decoder_start_token = tokens.start
    spec.config.add_source_eos = tokens.adds_end


FOLDER = "ctranslate2"
TIMED = 32  # tokens that each translation has where it is timed


@engine
class CTranslate2(EngineExport):
    """Translation models whose stacks have one number of heads each."""

    name = "ctranslate2"
    summary = "a folder for CTranslate2, of translation models"
    install = "headscope[engines]"
    packages = ("ctranslate2",)
    endings = ("bin",)
    allocation = "uniform"

    def check(self, checkpoint: Checkpoint) -> None:
        check_translator(checkpoint)

    def fits(self, checkpoint: Checkpoint) -> None:
        specification(translator_of(checkpoint))

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, options: EngineOptions) -> EngineFile:
        translator = translator_of(checkpoint)
        spec = specification(translator)
        path = folder / FOLDER
        path.mkdir()
        spec.save(str(path))
        aligned = align(path, named) if (named := alignment_heads(checkpoint.model)) else []
        splitters = write_splitters(checkpoint, path)
        with _running():
            engine = _opened(path)
            difference, largest = scored(engine, checkpoint, translator.tokens, data)
            limit = FULL * max(1.0, largest)
            refuse_difference(difference, limit, "CTranslate2", QUANTITY)
            notes = translated(engine, checkpoint, translator, data, limit=FULL)
        encoder, decoder = translator.config.encoder, translator.config.decoder
        assert encoder is not None
        return EngineFile(
            export=self.name,
            file=FOLDER,
            runtime=f"CTranslate2 {importlib.metadata.version('ctranslate2')}",
            difference=difference,
            limit=limit,
            sizes=f"{encoder.most_heads} heads in the encoder, {decoder.most_heads} in the decoder",
            opens=(
                f"`{FOLDER}`: CTranslate2 (`ctranslate2.Translator`, on tokens)",
                *_usage(translator.tokens),
                f"`return_attention` is {'the mean over ' if aligned else ''}"
                f"{', '.join(map(str, aligned)) or 'the first head of the last layer (`analyze --write-alignment`)'}",
            ),
            limits=() if splitters else (f"`{FOLDER}` has no file that splits text: give tokens",),
            notes=notes,
        )

    @contextmanager
    def running(self, file: EngineFile, checkpoint: Checkpoint, data: InputTexts, folder: Path) -> Iterator[EngineRun]:
        translator = translator_of(checkpoint)
        ids, _ = _sides(checkpoint, data.feeds[len(data.feeds) // 2])
        sources = [source_tokens(each, translator.tokens) for each in ids]
        steps = min(TIMED, (translator.config.decoder.max_positions or TIMED + 2) - 2)
        length = {"min_decoding_length": steps, "max_decoding_length": steps}
        engine = _opened(folder / file.file, threads=torch.get_num_threads())

        def work() -> int:
            return sum(len(each.hypotheses[0]) for each in engine.translate_batch(sources, beam_size=1, **length))

        with _running():
            yield EngineRun(what=f"greedy, {steps} tokens each", sentences=len(sources), work=work)


def _usage(tokens: TranslatorTokens) -> tuple[str, ...]:
    end = "" if tokens.adds_end else f"; sources end with {tokens.end}, as the tokenizer gives them"
    never = "" if tokens.pad is None else f'; should it say {tokens.pad}: `suppress_sequences=[["{tokens.pad}"]]`'
    return (
        f"its tokens are those of the vocabularies beside it{end}{never}",
        "its scores leave out how probable an empty translation is; with `min_decoding_length=0` they are headscope's",
    )


@contextmanager
def _running() -> Iterator[None]:
    """CheckpointError for what CTranslate2 raises."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        detail = one_line(error)[:200]
        raise CheckpointError(f"CTranslate2 does not run what was written ({detail}); nothing was saved") from error


def _opened(path: Path, *, threads: int = 1) -> Any:
    engine = importlib.import_module("ctranslate2")
    return engine.Translator(str(path), device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads)


def scored(engine: Any, checkpoint: Checkpoint, tokens: TranslatorTokens, data: InputTexts) -> tuple[float, float]:
    """The largest difference of log-probabilities of whole texts, and the largest of them."""
    difference, largest = 0.0, 0.0
    end = tokens.target.index(tokens.end)
    for batch in data.feeds:
        sources, targets = _sides(checkpoint, batch)
        logits = outputs(checkpoint.model, batch).double().log_softmax(-1).cpu()
        following = torch.tensor([number for ids in targets for number in (*ids[1:], end)])
        wanted = logits.gather(1, following[:, None])[:, 0]
        found = engine.score_batch(
            [source_tokens(ids, tokens) for ids in sources], [[tokens.target[n] for n in ids[1:]] for ids in targets]
        )
        scores = torch.tensor([value for result in found for value in result.log_probs], dtype=torch.float64)
        difference = max(difference, float((scores - wanted).abs().max()))
        largest = max(largest, float(wanted.abs().max()))
    return difference, largest


def _sides(checkpoint: Checkpoint, batch: ModelInputs) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of a batch without padding: sources, and what the decoder reads."""
    names = ("source", "source_mask", "target", "target_mask")
    if not checkpoint.is_native:
        names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    values = [batch.arguments[name].cpu() for name in names]
    return _rows(values[0], values[1]), _rows(values[2], values[3])


def _rows(ids: Tensor, real: Tensor) -> list[list[int]]:
    return [row[mask.bool()].tolist() for row, mask in zip(ids, real, strict=True)]
