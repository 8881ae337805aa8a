"""`--export ctranslate2`: a folder for CTranslate2, kept if CTranslate2 gives the model's log-probabilities.

A model is first brought into one form, `Translator`: sizes, weights under the names of a native Transformer, tokens.
Marian names its weights as fairseq does, so fairseq's key table renames them. That form fills CTranslate2's
`TransformerSpec` (its specs/transformer_spec.py). CTranslate2 has one number and one width of heads for each stack. It
scales embeddings, but has no bias and no projection between them and the first layer: those are folded into the table.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from headscope.config.commands import TranslateOptions
from headscope.errors import CheckpointError, ConfigError, flag, restate
from headscope.evaluation.model_inputs import InputTexts
from headscope.export.alignment import align
from headscope.export.base import EngineExport, EngineFile, check_difference, engine, tolerance
from headscope.formats.base import Checkpoint
from headscope.formats.fairseq.keys import key_table
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import Site
from headscope.model.forward import ModelInputs, outputs
from headscope.model.interface import quiet_transformers
from headscope.model.native.layers import position_table
from headscope.model.native.transformer import folded_weights, without_mixing
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.model.removal_plan import alignment_heads

FOLDER = "ctranslate2"
TEXTS, LONGEST = 16, 60  # texts that are translated, and subwords of a translation
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu-tanh": "GELUTanh", "silu": "SWISH", "tanh": "Tanh"}


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
        if not (checkpoint.two_sided and (checkpoint.is_native or checkpoint.model_type == "marian")):
            raise ConfigError(
                "ctranslate2 writes translation models: native, fairseq, MHR and story-of-heads ones, and Marian; "
                f"{checkpoint.path} is a {checkpoint.format} model of type {checkpoint.model_type!r}"
            )

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, *, quantize: str = "none") -> EngineFile:
        translator = translator_of(checkpoint)
        spec, path = specification(translator), folder / FOLDER
        path.mkdir()
        spec.save(str(path))
        aligned = align(path, own_heads) if (own_heads := alignment_heads(checkpoint.model)) else []
        splitters = write_splitters(checkpoint, path)
        message = "CTranslate2 does not run what was written ({why}); nothing was saved"
        with restate(CheckpointError, message, RuntimeError, ValueError):
            engine = importlib.import_module("ctranslate2").Translator(str(path), device="cpu", compute_type="float32")
            difference, largest = score_difference(engine, checkpoint, translator.tokens, data)
            limit = check_difference(difference, tolerance(torch.float32, largest), "CTranslate2")
            notes = translation_note(engine, checkpoint, translator, data)
        encoder, decoder = translator.config.sides["encoder"], translator.config.decoder
        tokens = translator.tokens
        end_note = "" if tokens.adds_end else f"; sources end with {tokens.end}, as the tokenizer gives them"
        suppression = f'`suppress_sequences=[["{tokens.pad}"]]`'
        pad_note = "" if tokens.pad is None else f"; should it generate {tokens.pad}: {suppression}"
        return EngineFile(
            export=self.name,
            file=FOLDER,
            runtime=f"CTranslate2 {importlib.metadata.version('ctranslate2')}",
            difference=difference,
            limit=limit,
            sizes=f"{encoder.most_heads} heads in the encoder, {decoder.most_heads} in the decoder",
            opens=(
                f"`{FOLDER}`: CTranslate2 (`ctranslate2.Translator`, on tokens)",
                f"its tokens are those of the vocabularies beside it{end_note}{pad_note}",
                "its scores leave out how probable an empty translation is; with `min_decoding_length=0` they are "
                "headscope's",
                f"`return_attention` is {'the mean over ' if aligned else ''}"
                f"{', '.join(map(str, aligned)) or 'the first head of the last layer (`analyze --write-alignment`)'}",
            ),
            limits=() if splitters else (f"`{FOLDER}` has no file that splits text: give tokens",),
            notes=notes,
        )


def specification(translator: Translator) -> Any:
    """The `TransformerSpec` of a model, ready to be saved; ConfigError where CTranslate2 has no such model."""
    from ctranslate2.specs import transformer_spec

    config, state, tokens = translator.config, translator.state, translator.tokens
    if reasons := misfits(config):
        raise ConfigError(f"CTranslate2 has no such model: {'; '.join(reasons)}")
    encoder = transformer_spec.TransformerEncoderSpec(**_options(config.sides["encoder"]))
    decoder = transformer_spec.TransformerDecoderSpec(**_options(config.decoder))
    _set_stack(encoder, encoder.embeddings[0], "encoder", config.sides["encoder"], state)
    _set_stack(decoder, decoder.embeddings, "decoder", config.decoder, state)
    decoder.start_from_zero_embedding = config.start == "zero"
    projection, weight = state.get("before_output.weight"), state["output.weight"].double()
    decoder.projection.weight = _array(weight if projection is None else weight @ projection.double())
    if "output.bias" in state:
        decoder.projection.bias = _array(state["output.bias"])
    spec = transformer_spec.TransformerSpec(encoder, decoder)
    for side, subwords in (("source", tokens.source), ("target", tokens.target)):
        if len(set(subwords)) < len(subwords):
            raise ConfigError(f"two ids of the {side} vocabulary have the same subword; CTranslate2 cannot list them")
    spec.register_source_vocabulary(tokens.source)
    spec.register_target_vocabulary(tokens.target)
    spec.config.unk_token, spec.config.eos_token = tokens.unknown, tokens.end
    spec.config.bos_token = spec.config.decoder_start_token = tokens.start
    spec.config.add_source_eos = tokens.adds_end
    spec.config.add_attribute("layer_norm_epsilon", config.decoder.norm_epsilon)
    spec.validate()
    spec.optimize()
    return spec


def misfits(config: TransformerConfig) -> list[str]:
    """The properties of a model that CTranslate2 cannot express."""
    reasons = []
    for side, stack in config.sides.items():
        counts = (*stack.self_heads, *stack.cross_heads)
        facts = {
            f"layers of its {side} have {', '.join(map(str, counts))} heads, and a stack has one number of them "
            "(`headscope prune rank --allocate uniform` chooses heads so)": len(set(counts)) > 1 or 0 in counts,
            f"values of its {side} have a width of their own (d_value)": stack.d_value not in (None, stack.d_head),
            f"heads of its {side} read slices of the input (head_input)": stack.head_input == "slice",
            f"its {side} has the activation {stack.activation}": stack.activation not in ACTIVATIONS,
            f"its {side} has a norm after post-norm layers": stack.norm == "post" and stack.final_norm,
        }
        reasons += [reason for reason, holds in facts.items() if holds]
    if len({stack.norm_epsilon for stack in config.sides.values()}) > 1:
        reasons.append("norms of its two stacks have different epsilons")
    return reasons


def _options(stack: StackConfig) -> dict[str, Any]:
    from ctranslate2.specs import common_spec

    return {
        "num_layers": len(stack.self_heads),
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
    positions = position_table(stack, state.get(f"{name}.positions.weight"), state[f"{name}.tokens.weight"])
    spec.position_encodings.encodings = _array(positions[stack.position_offset :])
    if stack.embedding_norm:
        _set_norm(spec.layernorm_embedding, f"{name}.norm", state)
    if stack.final_norm:
        _set_norm(spec.layer_norm, f"{side}.norm", state)
    for number, layer in enumerate(spec.layer):
        prefix = f"{side}.layers.{number}"
        _set_attention(layer.self_attention, f"{prefix}.self_attention", state, "query key value", "output")
        if stack.cross_heads:
            _set_attention(layer.attention, f"{prefix}.cross_attention", state, "query", "key value", "output")
        _set_norm(layer.ffn.layer_norm, f"{prefix}.ffn_norm", state)
        _set_linear(layer.ffn.linear_0, [f"{prefix}.ffn.inner"], state)
        _set_linear(layer.ffn.linear_1, [f"{prefix}.ffn.outer"], state)


def _table(name: str, stack: StackConfig, state: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Embeddings [V d] and their scale; a bias or projection is folded in, and then the scale too."""
    table, scale = state[f"{name}.tokens.weight"].double(), stack.d_model**0.5 if stack.scale_embedding else 1.0
    bias, projection = state.get(f"{name}.bias"), state.get(f"{name}.projection.weight")
    if bias is None and projection is None:
        return _array(table), np.float32(scale)
    table = table * scale if bias is None else table * scale + bias.double()
    return _array(table if projection is None else table @ projection.double().T), np.float32(1.0)


def _set_attention(spec: Any, name: str, state: Mapping[str, Tensor], *parts: str) -> None:
    """Set the norm of a sublayer and its linear layers, each of them the concatenation of several `parts`."""
    for linear, fused_parts in zip(spec.linear, parts, strict=True):
        _set_linear(linear, [f"{name}.{part}" for part in fused_parts.split()], state)
    _set_norm(spec.layer_norm, f"{name}_norm", state)


def _set_linear(spec: Any, names: list[str], state: Mapping[str, Tensor]) -> None:
    weights, biases = [state[f"{name}.weight"] for name in names], [state.get(f"{name}.bias") for name in names]
    spec.weight = np.concatenate([_array(weight) for weight in weights])
    if any(bias is not None for bias in biases):
        bias_parts = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        spec.bias = np.concatenate([_array(values) for values in bias_parts])


def _set_norm(spec: Any, name: str, state: Mapping[str, Tensor]) -> None:
    spec.gamma, spec.beta = _array(state[f"{name}.weight"]), _array(state[f"{name}.bias"])


def _array(values: Tensor) -> Any:
    return np.ascontiguousarray(values.detach().float().cpu().numpy())


def score_difference(
    engine: Any, checkpoint: Checkpoint, tokens: TranslatorTokens, data: InputTexts
) -> tuple[float, float]:
    """The largest difference of the tokens' log-probabilities, and the largest absolute log-probability."""
    difference, largest = 0.0, 0.0
    end = tokens.target.index(tokens.end)
    for batch in data.feeds:
        sources, targets = _ids_of_sides(checkpoint, batch)
        log_p_of_ids = outputs(checkpoint.model, batch).double().log_softmax(-1).cpu()  # [n V]
        next_ids = torch.tensor([number for ids in targets for number in (*ids[1:], end)])
        log_p = log_p_of_ids.gather(1, next_ids[:, None])[:, 0]
        target_tokens = [[tokens.target[number] for number in ids[1:]] for ids in targets]
        engine_scores = engine.score_batch([tokens.of_source(ids) for ids in sources], target_tokens)
        scores = torch.tensor([value for result in engine_scores for value in result.log_probs], dtype=torch.float64)
        difference = max(difference, float((scores - log_p).abs().max()))
        largest = max(largest, float(log_p.abs().max()))
    return difference, largest


def _ids_of_sides(checkpoint: Checkpoint, batch: ModelInputs) -> list[list[list[int]]]:
    """Ids of the source and of the target, of each sentence, without padding."""
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    names = ("source", "source_mask", "target", "target_mask") if checkpoint.is_native else names
    source, source_real, target, target_real = (batch.arguments[name].cpu() for name in names)
    sides = ((source, source_real.bool()), (target, target_real.bool()))
    return [[row[real].tolist() for row, real in zip(ids, mask, strict=True)] for ids, mask in sides]


def translation_note(engine: Any, checkpoint: Any, translator: Translator, data: InputTexts) -> tuple[str, ...]:
    """A line that counts equal greedy translations; headscope's search may have settings that the engine lacks."""
    texts, tokens = list(data.sources[:TEXTS]), translator.tokens
    if not texts:
        return ()
    longest = min(LONGEST, (translator.config.decoder.max_positions or LONGEST + 2) - 2)
    encodings = checkpoint.encode(texts, side="source", limit=checkpoint.source_length(None))
    suppression = {} if tokens.pad is None else {"suppress_sequences": [[tokens.pad]]}
    lengths = {"min_decoding_length": 1 if checkpoint.is_native else 0, "max_decoding_length": longest}
    sources = [tokens.of_source(encoding.ids) for encoding in encodings]
    results = engine.translate_batch(sources, beam_size=1, **lengths, **suppression)
    options = TranslateOptions(beam=1, lenpen=1.0, max_len_a=0, max_len_b=longest, keep_bpe=True)
    expected_texts = [translations[0].text for translations in checkpoint.translations(texts, options)]
    if checkpoint.is_native:
        special = {tokens.target[number] for number in checkpoint.target.special_ids}
    else:
        special = {*checkpoint.tokenizer.all_special_tokens}
    engine_texts = [" ".join(token for token in result.hypotheses[0] if token not in special) for result in results]
    same = sum(one == other for one, other in zip(engine_texts, expected_texts, strict=True))
    return (f"CTranslate2 translates {same} of {len(texts)} sentences the same greedily",)


MARIAN_ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}


@dataclass(frozen=True, kw_only=True)
class TranslatorTokens:
    """The tokens of both sides by id, and the special ones; `adds_end`: the engine appends the end to a source."""

    source: list[str]
    target: list[str]
    unknown: str
    end: str
    start: str
    pad: str | None
    adds_end: bool

    def of_source(self, ids: list[int]) -> list[str]:
        """Tokens of a source, without the end that the engine adds."""
        subwords = [self.source[number] for number in ids]
        return subwords[:-1] if self.adds_end and subwords[-1:] == [self.end] else subwords


@dataclass(frozen=True)
class Translator:
    """A model as the engine needs it: `state` has weights under the names of a native Transformer, without mixing."""

    config: TransformerConfig
    state: Mapping[str, Tensor]
    tokens: TranslatorTokens


def translator_of(checkpoint: Checkpoint) -> Translator:
    """A model with its mixings folded; ConfigError where a mixing cannot be, CheckpointError without vocabularies."""
    if not checkpoint.is_native:
        return Translator(_marian_config(checkpoint), _marian_state(checkpoint), _marian_tokens(checkpoint))
    native = cast(TransformerCheckpoint, checkpoint)
    return Translator(without_mixing(native.model.config), folded_weights(native.model), _native_tokens(native))


def _native_tokens(checkpoint: TransformerCheckpoint) -> TranslatorTokens:
    source, target = checkpoint.source, checkpoint.target
    if source is None or target is None:
        raise CheckpointError(f"{checkpoint.path} lacks a vocabulary, which CTranslate2 needs; give {flag.dicts}")
    if not (source.only_ends and target.only_ends):
        raise ConfigError("CTranslate2 puts an end behind a text, and this model wants other ids around it")
    ends = {source.subwords[source.end], target.subwords[target.end]}
    unknown = {side.subwords[0 if side.unknown is None else side.unknown] for side in (source, target)}
    if len(ends) > 1 or len(unknown) > 1:
        raise ConfigError(f"CTranslate2 has one end and one unknown token, and this model {sorted(ends | unknown)}")
    return TranslatorTokens(
        source=list(source.subwords),
        target=list(target.subwords),
        unknown=unknown.pop(),
        end=ends.pop(),
        start=target.subwords[target.start],
        pad=None if target.pad is None else target.subwords[target.pad],
        adds_end=True,
    )


def _marian_tokens(checkpoint: Any) -> TranslatorTokens:
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{checkpoint.path} has no tokenizer, which CTranslate2's vocabulary is made of")
    if not config.share_encoder_decoder_embeddings:
        raise ConfigError("a Marian whose sides have vocabularies of their own cannot be written for CTranslate2")
    n_subwords = len(tokenizer)
    tokens = [tokenizer.convert_ids_to_tokens(n) if n < n_subwords else f"<{n}>" for n in range(config.vocab_size)]
    for name in ("unk_token", "eos_token"):
        if (token := getattr(tokenizer, name)) not in tokens:
            why = f"that of {checkpoint.path} ({token}) is not one of its subwords"
            raise ConfigError(f"CTranslate2 needs an {name}, and {why}; name one in its tokenizer_config.json")
    return TranslatorTokens(
        source=tokens,
        target=tokens,
        unknown=tokenizer.unk_token,
        end=tokenizer.eos_token,
        start=tokens[config.decoder_start_token_id],
        pad=tokenizer.pad_token,
        adds_end=False,
    )


def _marian_config(checkpoint: Checkpoint) -> TransformerConfig:
    config: Any = checkpoint.model.config

    def stack(side: str, own: Site, *cross_sites: Site) -> StackConfig:
        layers = range(getattr(config, f"{side}_layers"))
        self_heads, *cross = (
            tuple(checkpoint.layout.get((site, n), 0) for n in layers) for site in (own, *cross_sites)
        )
        return StackConfig(
            vocabulary=config.vocab_size,
            d_model=config.d_model,
            d_ffn=getattr(config, f"{side}_ffn_dim"),
            d_head=max(entry.width for site in (own, *cross_sites) for entry in checkpoint.attention_sites.at(site)),
            self_heads=self_heads,
            cross_heads=cross[0] if cross else (),
            activation=MARIAN_ACTIVATIONS.get(config.activation_function, config.activation_function),
            positions="learned",
            max_positions=config.max_position_embeddings,
            scale_embedding=bool(config.scale_embedding),
        )

    return TransformerConfig(
        encoder=stack("encoder", Site.ENCODER_SELF),
        decoder=stack("decoder", Site.DECODER_SELF, Site.CROSS),
        output_bias=True,
    )


def _marian_state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    config: Any = checkpoint.model.config
    table = key_table({"encoder": config.encoder_layers, "decoder": config.decoder_layers})
    special_names = {"lm_head.weight": "output.weight", "final_logits_bias": "output.bias"}
    state = {}
    for key, values in checkpoint.model.state_dict().items():
        name = special_names.get(key) or table.get(key.removeprefix("model."))
        if name is not None:
            state[name] = values[0] if key == "final_logits_bias" else values
    return state


def write_splitters(checkpoint: Any, folder: Path) -> bool:
    """Write the files by which text is split into tokens; returns whether there are any."""
    if not checkpoint.is_native:
        with quiet_transformers():
            return any(Path(path).is_file() for path in checkpoint.tokenizer.save_pretrained(folder))
    splitters = {side: getattr(checkpoint, side).splitter for side in ("source", "target")}
    with_codes = {side: splitter for side, splitter in splitters.items() if splitter.codes is not None}
    for side, splitter in with_codes.items():
        name = f"{side}.{'model' if splitter.kind == 'sentencepiece' else 'codes'}"
        (folder / name).write_bytes(splitter.codes)
    return bool(with_codes)
