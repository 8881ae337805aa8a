"""Native Transformers as Hugging Face directories that transformers loads without headscope.

The classes of transformers are ports of fairseq models. Fixed linear mixings are folded into output projections first;
transformers then computes logits from the written files. A SentencePiece model becomes a tokenizer of the `tokenizers`
library with the same ids: `Precompiled` characters, ▁ for spaces, merges or scores. Texts are normalised to NFC first,
because `tokenizers` works by graphemes; ids can differ for marks that Unicode has no composed character for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope.assets import sample
from headscope.data.vocabulary import Vocabulary
from headscope.errors import CheckpointError, flag
from headscope.formats.exports import Probe, SavedFiles
from headscope.formats.fairseq.from_native import fill_weights, unusual_parts
from headscope.formats.fairseq.keys import key_table
from headscope.formats.huggingface.companions.folder import ENDS_WITH_EOS
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.interface import quiet_transformers
from headscope.model.native.layers import DEFAULT_LENGTH
from headscope.model.native.transformer import folded_weights, without_mixing
from headscope.model.native.transformer_config import TransformerConfig


class Ids(NamedTuple):
    """The special ids that a Hugging Face config wants."""

    start: int
    end: int
    pad: int
    begin: int


@dataclass(frozen=True)
class Target:
    """A class of transformers and what it requires of a model; `prefix` replaces each stack's name in the keys.

    `shared` is the key of an embedding table that both sides share. `folds_scale`: the scale √d of embeddings is
    multiplied into the table, and divided out of the last norm where the table is the output matrix too.
    """

    name: str
    prefix: Mapping[str, str]
    output: str
    norm: tuple[str, ...]
    positions: tuple[str, ...]
    embedding_norm: bool = False
    shared: str | None = None
    bias: bool = False
    final_norm: str = "layer_norm"
    folds_scale: bool = False


_SIDES = {"encoder": "model.encoder", "decoder": "model.decoder"}
_ONE_TABLE: dict[str, Any] = dict(prefix=_SIDES, output="lm_head.weight", shared="model.shared.weight")
_BART: dict[str, Any] = _ONE_TABLE | dict(positions=("learned", "sinusoidal"), embedding_norm=True, bias=True)
_SINUSOIDS = ("sinusoidal",)
TARGETS = (
    Target("FSMTForConditionalGeneration", _SIDES, "model.decoder.output_projection.weight", ("post",), _SINUSOIDS),
    Target("M2M100ForConditionalGeneration", **_ONE_TABLE, norm=("pre",), positions=_SINUSOIDS),
    Target("BartForConditionalGeneration", **_BART, norm=("post",)),
    Target("MBartForConditionalGeneration", **_BART, norm=("pre",)),
    Target(
        "OPTForCausalLM",
        {"decoder": "model.decoder"},
        "lm_head.weight",
        norm=("pre", "post"),
        positions=("learned", "sinusoidal", "none"),
        final_norm="final_layer_norm",
        folds_scale=True,
    ),
)


UNLIMITED = tuple(target.name for target in TARGETS if "learned" not in target.positions)
"""Classes that compute sinusoids for positions of any length."""


def choose_architecture(config: TransformerConfig, ids: Ids) -> Target:
    """The class that can express a model; CheckpointError with the reason where none can."""
    stacks = config.stacks
    common = ("d_model", "norm", "activation", "positions", "position_offset", "scale_embedding", "embedding_norm")
    limits = ("max_positions",) if stacks[-1].positions == "learned" else ()
    obstacles = unusual_parts(config, *common, *limits) | {
        "its output has a projection before it (d_output)": config.d_output is not None,
        "its embeddings have another width (d_embedding)": any(s.d_embedding not in (None, s.d_model) for s in stacks),
    }
    if not (explanation := ", ".join(reason for reason, holds in obstacles.items() if holds)):
        candidates = [target for target in TARGETS if ("encoder" in target.prefix) == (config.encoder is not None)]
        reasons = {target.name: _reasons(target, config, ids) for target in candidates}
        if fitting := [target for target in candidates if not reasons[target.name]]:
            return fitting[0]
        explanation = ", ".join(f"not {name} ({' and '.join(why)})" for name, why in reasons.items())
    raise CheckpointError(
        f"no class of transformers expresses this model: {explanation}; give {flag.to} native, which holds every such "
        "model, or an engine (`headscope list engines`)"
    )


def _reasons(target: Target, config: TransformerConfig, ids: Ids) -> list[str]:
    decoder, final = config.decoder, {stack.final_norm for stack in config.stacks}
    reasons = {
        f"its norm is {decoder.norm}": decoder.norm not in target.norm,
        "it has no norm after each stack": decoder.norm == "pre" and final != {True},
        "it has a norm after a stack": decoder.norm == "post" and final != {False},
        f"embedding_norm is {decoder.embedding_norm}": decoder.embedding_norm != target.embedding_norm,
        f"its positions are {decoder.positions}": decoder.positions not in target.positions,
        "it has no layers": target.folds_scale and not decoder.layers,
        "its output has a bias": config.output_bias and not target.bias,
        f"positions begin at {decoder.position_offset} and the padding id is {ids.pad}": (
            "learned" not in target.positions and decoder.position_offset != ids.pad + 1
        ),
        "its source vocabulary is the larger one": (
            target.shared is not None and config.encoder is not None and config.encoder.vocabulary > decoder.vocabulary
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


def write_model(checkpoint: TransformerCheckpoint, folder: Path) -> str:
    """Write the model's config, weights and generation config; return the name of its class."""
    import transformers

    config = without_mixing(checkpoint.model.config)
    if not all(vocabulary.only_ends for vocabulary in (checkpoint.source, checkpoint.target) if vocabulary is not None):
        why = f"puts other ids than an end around texts (languages), which {flag.to} huggingface does not write"
        raise CheckpointError(f"{checkpoint.path} {why}")
    ids = special_ids(checkpoint)
    target = choose_architecture(config, ids)
    state = _weights(target, config, folded_weights(checkpoint.model))
    if target.folds_scale and config.decoder.scale_embedding:
        _fold_scale(target, config, state)
    with quiet_transformers():
        model: Any = getattr(transformers, target.name)(_config(target, config, ids))
        model = model.to(checkpoint.dtype)
        tied = {target.output} if _all_tied(config) else set()
        missing, left_over = model.load_state_dict(state, strict=False)
        wanting = [key for key in missing if "embed_positions" not in key and key not in tied]
        assert not left_over and not wanting, f"{target.name}: {left_over[:3]} left over, {wanting[:3]} missing"
        model.tie_weights()
        settings: dict[str, Any] = {"pad_token_id": ids.pad, "bos_token_id": ids.begin, "eos_token_id": ids.end}
        if config.encoder is not None:
            search = checkpoint.search
            settings |= {"decoder_start_token_id": ids.start, "num_beams": search.beam, "length_penalty": search.power}
            settings |= {"max_new_tokens": search.max_extra, "early_stopping": True}
        model.generation_config = transformers.GenerationConfig(**settings)
        model.save_pretrained(folder)
    return target.name


def special_ids(checkpoint: TransformerCheckpoint) -> Ids:
    """The special ids of the target vocabulary; fairseq's defaults where a fairseq file came without dictionary."""
    vocabulary = checkpoint.target
    if vocabulary is None:
        if checkpoint.format != "fairseq":
            raise CheckpointError(f"{checkpoint.path} has no vocabulary to tell special ids; give {flag.dicts}")
        return Ids(start=2, end=2, pad=1, begin=0)
    pad = vocabulary.pad if vocabulary.pad is not None else vocabulary.end
    return Ids(vocabulary.start, vocabulary.end, pad, min(vocabulary.special, default=vocabulary.start))


def _config(target: Target, config: TransformerConfig, ids: Ids) -> Any:
    """The config of the target class for a model."""
    import transformers

    decoder, encoder = config.decoder, config.encoder
    longest = max(stack.max_positions or DEFAULT_LENGTH for stack in config.stacks)
    values: dict[str, Any] = {
        "activation_function": "gelu_pytorch_tanh" if decoder.activation == "gelu-tanh" else decoder.activation,
        "max_position_embeddings": longest,
        "tie_word_embeddings": _all_tied(config),
        **{name: getattr(decoder, name) for name in ("dropout", "attention_dropout", "activation_dropout")},
        **{"pad_token_id": ids.pad, "bos_token_id": ids.begin, "eos_token_id": ids.end},
    }
    if encoder is None:
        values |= {
            "vocab_size": decoder.vocabulary,
            "hidden_size": decoder.d_model,
            "word_embed_proj_dim": decoder.d_model,
            "ffn_dim": decoder.d_ffn,
            "num_hidden_layers": decoder.layers,
            "num_attention_heads": decoder.most_heads,
            "do_layer_norm_before": decoder.norm == "pre",
            "layerdrop": 0.0,
        }
    else:
        values |= {"d_model": decoder.d_model, "decoder_start_token_id": ids.start, "forced_eos_token_id": None}
        values["scale_embedding"] = decoder.scale_embedding
        for side, stack in config.sides.items():
            values |= {f"{side}_layers": stack.layers, f"{side}_ffn_dim": stack.d_ffn, f"{side}_layerdrop": 0.0}
            values[f"{side}_attention_heads"] = stack.most_heads
        if target.shared:
            values["vocab_size"] = decoder.vocabulary
        else:
            values |= {"src_vocab_size": encoder.vocabulary, "tgt_vocab_size": decoder.vocabulary}
            values["langs"] = ["source", "target"]
    return getattr(transformers, target.name).config_class(**values)


def _all_tied(config: TransformerConfig) -> bool:
    return config.tie_output and (config.share_embeddings or config.encoder is None)


def _weights(target: Target, config: TransformerConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a class, with the entries that only it has: unused rows, a shared table, an output bias."""
    layers = max(stack.layers for stack in config.stacks)
    fairseq_keys = {ours: theirs for theirs, ours in key_table({"encoder": layers, "decoder": layers}).items()}
    full_state, weights = dict(state), dict[str, Tensor]()
    longest = max(stack.max_positions or DEFAULT_LENGTH for stack in config.stacks)
    for side, stack in config.sides.items():  # a class has one length for both of its sides
        whole_stack = replace(stack, max_positions=longest)
        fill_weights(full_state, side, whole_stack, has_table="learned" in target.positions)
    bias = full_state.pop("output.bias", full_state["output.weight"].new_zeros(config.decoder.vocabulary))
    if target.bias:
        weights["final_logits_bias"] = bias[None]
    for native_key, tensor in full_state.items():
        side, _, name = fairseq_keys[native_key].partition(".")
        name = name.replace("layer_norm.", f"{target.final_norm}.") if name.startswith("layer_norm.") else name
        weights[target.output if native_key == "output.weight" else f"{target.prefix[side]}.{name}"] = tensor
    for side in config.sides if target.shared else ():
        table = weights[name := f"{target.prefix[side]}.embed_tokens.weight"]
        weights[name] = torch.nn.functional.pad(table, (0, 0, 0, config.decoder.vocabulary - len(table)))
    if target.shared is not None:
        weights[target.shared] = weights[f"{target.prefix['encoder']}.embed_tokens.weight"]
    return weights


def _fold_scale(target: Target, config: TransformerConfig, weights: dict[str, Tensor]) -> None:
    """Multiply the embeddings by √d, and divide the last norm by it where the output matrix is the same table."""
    decoder, prefix = config.decoder, target.prefix["decoder"]
    scale = decoder.d_model**0.5
    table = weights[f"{prefix}.embed_tokens.weight"] * scale
    weights[f"{prefix}.embed_tokens.weight"] = table
    if not _all_tied(config):
        return
    weights[target.output] = table
    last = target.final_norm if decoder.norm == "pre" else f"layers.{decoder.layers - 1}.final_layer_norm"
    for part in ("weight", "bias"):
        weights[f"{prefix}.{last}.{part}"] = weights[f"{prefix}.{last}.{part}"] / scale


OWN_CODE = ("FSMT",)  # it bypasses transformers' attention interface, and overflows in double precision


def convert_checkpoint(checkpoint: TransformerCheckpoint, folder: Path, probe: Probe) -> SavedFiles:
    """Write weights, configs and, if transformers has a fitting one, a tokenizer; compute logits from the copy."""
    import transformers

    name = write_model(checkpoint, folder)
    auto: Any = transformers.AutoModelForSeq2SeqLM if checkpoint.two_sided else transformers.AutoModelForCausalLM
    own_code = name.startswith(OWN_CODE)
    inputs = {"input_ids": probe.target}
    if checkpoint.two_sided:
        inputs = {"input_ids": probe.source, "attention_mask": probe.real.long(), "decoder_input_ids": probe.target}
    with quiet_transformers(), torch.no_grad():
        model = auto.from_pretrained(folder, dtype=torch.float32 if own_code else torch.float64, local_files_only=True)
        logits = model.eval()(**inputs, use_cache=False).logits
    notes = [write_vocabulary(checkpoint, folder)]
    if any(module.mixing is not None for _, _, _, module in checkpoint.model.attention_modules()):
        notes.append("the matrices that mix heads are folded into the output projections")
    decoder = checkpoint.model.config.decoder
    if decoder.positions != "learned" and decoder.max_positions is None and name not in UNLIMITED:
        notes.append(f"{name} keeps positions in a table, which ends at {DEFAULT_LENGTH} tokens")
    if own_code:
        notes.append(
            f"transformers computes {name}'s attention in code of its own; analyse the original, not this copy"
        )
    opens = (f"transformers, without any code of its own: class {name}", *(() if own_code else ("headscope",)))
    limits = ["fairseq and headscope's own trainer: they go on from the original"]
    if checkpoint.target is None:
        limits = ["texts: there is no vocabulary, so give ids"]
    limits += ["headscope: it cannot see the heads of this class"] * own_code
    return SavedFiles(folder, "huggingface", tuple(notes), opens, tuple(limits), name, logits)


BPE, UNIGRAM = 2, 1  # sentencepiece_model.proto, TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, UNUSED = 1, 2, 3, 5  # ModelProto.SentencePiece.Type
DECOMPOSED, COMPOSED = "u\u0308", "\u00fc"
UNUSUAL = ("  two  spaces \t", "Stra\u00dfe 1\u00bd \u2122", "\u4e16\u754c \U0001f600", "aaaaaaa -----")
"""Texts, beside those of the sample, on which ids are compared before a tokenizer is kept."""


def write_vocabulary(checkpoint: TransformerCheckpoint, folder: Path) -> str:
    """Write a tokenizer if transformers has one for the vocabularies; return the note to the user."""
    source, target = checkpoint.source, checkpoint.target
    if target is None:
        return "no tokenizer: the checkpoint came without vocabularies"
    if source is None or (source.subwords, source.special_ids) == (target.subwords, target.special_ids):
        if (inner := tokenizer_of(target)) is not None:
            _write_tokenizer(inner, checkpoint, folder, split_special_tokens=True)
            return "the tokenizer gives the ids of the SentencePiece model, without SentencePiece"
        if target.unknown is not None and target.splitter.kind in ("words", "bpe"):
            from tokenizers import Tokenizer, models, pre_tokenizers

            ids = {subword: number for number, subword in enumerate(target.subwords)}
            words = Tokenizer(models.WordLevel(ids, target.subwords[target.unknown]))
            words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            _write_tokenizer(words, checkpoint, folder)
            return "the tokenizer takes text that is already split into subwords; split and join it with your BPE codes"
    for name, vocabulary in (("source", source), ("target", target)):
        if vocabulary is not None:
            (folder / f"{name}.pieces.json").write_text(
                json.dumps(vocabulary.subwords, ensure_ascii=False), encoding="utf-8"
            )
    return (
        "no tokenizer: transformers has none for these vocabularies; *.pieces.json list the subwords in the order of "
        "their ids, and a source text ends with the id of the end"
    )


def _write_tokenizer(inner: Any, checkpoint: TransformerCheckpoint, folder: Path, **more: Any) -> None:
    """Write a tokenizer that appends the end to an encoder's text, or puts the start before a language model's.

    Such language models were trained on texts with an end: `texts_end_with_eos` makes `headscope evaluate` count it.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    vocabulary, two_sided = checkpoint.target, checkpoint.two_sided
    assert vocabulary is not None
    names = {
        "unk": vocabulary.unknown,
        "pad": vocabulary.pad,
        "eos": vocabulary.end,
        "bos": min(vocabulary.special, default=vocabulary.start),
    }
    tokens = {f"{name}_token": vocabulary.subwords[number] for name, number in names.items() if number is not None}
    mark = vocabulary.subwords[vocabulary.end if two_sided else vocabulary.start]
    inner.post_processor = processors.TemplateProcessing(
        single=f"$A {mark}" if two_sided else f"{mark} $A",
        special_tokens=[(mark, vocabulary.end if two_sided else vocabulary.start)],
    )
    more |= {} if two_sided else {ENDS_WITH_EOS: True, "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **tokens, **more)
    tokenizer.save_pretrained(folder)


def tokenizer_of(vocabulary: Vocabulary) -> Any:
    """The tokenizer of a SentencePiece vocabulary; None for others, and where ids of sample texts differ."""
    if vocabulary.splitter.kind != "sentencepiece" or vocabulary.splitter.codes is None:
        return None
    import sentencepiece.sentencepiece_model_pb2

    messages: Any = sentencepiece.sentencepiece_model_pb2
    model = messages.ModelProto.FromString(vocabulary.splitter.codes)
    usual = {NORMAL, UNKNOWN, CONTROL, UNUSED}
    expressible = (
        tuple(piece.piece for piece in model.pieces) == vocabulary.subwords
        and all(piece.type in usual for piece in model.pieces)
        and model.trainer_spec.model_type in (BPE, UNIGRAM)
        and not model.trainer_spec.treat_whitespace_as_suffix
        and model.normalizer_spec.escape_whitespaces
    )
    if not expressible:
        return None
    if (tokenizer := _assemble(model, vocabulary.splitter.codes)) is None:
        return None
    texts = [line for kind in ("en", "de") for line in sample(kind).read_text(encoding="utf-8").splitlines()]
    texts += UNUSUAL
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    same_ids = all(ids.ids == vocabulary.encode(text) for text, ids in zip(texts, encodings, strict=True))
    return tokenizer if same_ids else None


def _assemble(model: Any, codes: bytes) -> Any:
    import sentencepiece
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import SpmConverter

    unigram = model.trainer_spec.model_type == UNIGRAM
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    vocabulary = pieces if unigram else {piece: number for number, (piece, _) in enumerate(pieces)}
    if (build := getattr(SpmConverter, "build_tokenizer_from_spm_proto", None)) is None:  # an earlier transformers
        return None
    tokenizer: Any = build(model, vocabulary)
    spec, processor = model.normalizer_spec, sentencepiece.SentencePieceProcessor(model_proto=codes)
    composes = spec.precompiled_charsmap and processor.normalize(DECOMPOSED).strip("▁ ") == COMPOSED
    before = [normalizers.NFC()] if composes else []
    behind = [normalizers.Replace(Regex(r"▁+\z"), "")] if spec.remove_extra_whitespaces else []
    tokenizer.normalizer = normalizers.Sequence([*before, tokenizer.normalizer, *behind])
    if unigram:  # a control piece spelled out in a text is plain text, so its first character is split off
        controls = [piece.piece for piece in model.pieces if piece.type in (UNKNOWN, CONTROL) and len(piece.piece) > 1]
        pattern = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in controls)
        split = pre_tokenizers.Split(Regex(pattern), behavior="merged_with_previous")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, split])
    return tokenizer
