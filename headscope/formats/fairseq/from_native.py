"""Native Transformers in the files of fairseq: options, weights under its names, dictionaries.

fairseq and its fork MHR begin ids with `<s>`, `<pad>`, `</s>`, `<unk>`, count positions from 2 and start translations
with `</s>`. So embeddings are put in that order, sinusoids that begin at another position become a learned table, and
the decoder's input table has at `</s>` the row of the id that a model starts with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope.data.encoded import SideName
from headscope.data.vocabulary import Vocabulary
from headscope.errors import CheckpointError, flag
from headscope.formats.exports import Probe
from headscope.formats.fairseq.config import ACTIVATIONS, OFFSET
from headscope.formats.fairseq.keys import Origin, fairseq_weights, key_table, layer_counts
from headscope.formats.transformer_checkpoint import TransformerCheckpoint, probe_logits
from headscope.model.native.layers import DEFAULT_LENGTH, position_table
from headscope.model.native.transformer import Transformer, folded_weights
from headscope.model.native.transformer_config import StackConfig, TransformerConfig

VERSION = 3.0  # of fairseq's encoder and decoder, which their files hold
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
NAMES = {"gelu-tanh": "gelu_fast", "silu": "swish"}
LANGUAGES: Mapping[str, SideName] = {"encoder": "source", "decoder": "target"}
# What fairseq's tasks and trainer look up in a file's options, with their defaults.
DEFAULTS: Mapping[str, Any] = {
    **{"criterion": "label_smoothed_cross_entropy", "optimizer": "adam", "lr_scheduler": "inverse_sqrt"},
    **{"data": ".", "seed": 1, "left_pad_source": True, "upsample_primary": 1, "quant_noise_pq_block_size": 8},
    **dict.fromkeys(("left_pad_target", "load_alignments", "truncate_source", "eval_bleu", "adaptive_input"), False),
    **dict.fromkeys(("no_cross_attention", "cross_self_attention", "tie_adaptive_weights"), False),
    **dict.fromkeys(("num_batch_buckets", "adaptive_softmax_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0),
    **dict.fromkeys(("quant_noise_pq", "quant_noise_scalar"), 0),
    **dict.fromkeys(("dataset_impl", "adaptive_softmax_cutoff"), None),
    **dict.fromkeys(("encoder_layers_to_keep", "decoder_layers_to_keep"), None),
}
LM: Mapping[str, Any] = {"task": "language_modeling", "arch": "transformer_lm", "self_target": False}
LM_TASK: Mapping[str, Any] = {"future_target": False, "past_target": False, "sample_break_mode": "eos"}


@dataclass(frozen=True)
class FairseqModel:
    """The content of a file; `orders` are native ids by side in fairseq's order, `start` the first id of targets."""

    options: dict[str, Any]
    weights: dict[str, Tensor]
    orders: dict[str, list[int]]
    start: int
    notes: tuple[str, ...]
    of_fork: bool

    def renumber(self, ids: Tensor, side: str) -> Tensor:
        """fairseq's ids for native ids."""
        return torch.tensor(self.orders[side]).argsort()[ids]


def fairseq_model(checkpoint: TransformerCheckpoint) -> FairseqModel:
    """A model as fairseq opens it; CheckpointError with all reasons if fairseq cannot express it."""
    mixings = {module.mixing for *_, module in checkpoint.model.attention_modules() if module.mixing is not None}
    config = checkpoint.model.config
    mixings_used = {stack_mixing for stack in config.stacks for stack_mixing in (stack.self_mixing, stack.cross_mixing)}
    of_fork = "alpha.v1" in mixings_used and mixings_used <= {"alpha.v1", None}
    reasons = _reasons(config, foldable=all(mixing.foldable for mixing in mixings))
    vocabularies = {side: _vocabulary(checkpoint, side) for side in config.sides}
    reasons += [reason for side, vocabulary in vocabularies.items() for reason in _vocabulary_reasons(vocabulary, side)]
    if reasons:
        raise CheckpointError(f"fairseq has no such model: {'; '.join(dict.fromkeys(reasons))}")
    state = checkpoint.model.state_dict() if of_fork else folded_weights(checkpoint.model)
    orders = {side: fairseq_order(vocabulary) for side, vocabulary in vocabularies.items()}
    has_own_start = config.encoder is not None and vocabularies["decoder"].start != vocabularies["decoder"].end
    weights = {key: values.detach().cpu() for key, values in state.items()}
    for name, side in (*((f"{side}.embeddings.tokens", side) for side in config.sides), ("output", "decoder")):
        weights[f"{name}.weight"] = weights[f"{name}.weight"][orders[side]]
    if has_own_start:  # the decoder's input table says at `</s>`, where fairseq starts, what the model starts with
        order, vocabulary = orders["decoder"], vocabularies["decoder"]
        table = weights["decoder.embeddings.tokens.weight"] = weights["decoder.embeddings.tokens.weight"].clone()
        table[order.index(vocabulary.end)] = table[order.index(vocabulary.start)]
    for side, stack in config.sides.items():
        fill_weights(weights, side, stack, has_table=_has_table(stack), alphas=of_fork)
    one_table = not has_own_start and orders.get("encoder", orders["decoder"]) == orders["decoder"]
    options = _options(config, vocabularies["decoder"], tied=not has_own_start, one_table=one_table)
    notes = _notes(config, has_own_start=has_own_start, of_fork=of_fork, folds_mixing=bool(mixings) and not of_fork)
    start = vocabularies["decoder"].start
    return FairseqModel(options, fairseq_weights(weights, _origin(config, weights)), orders, start, notes, of_fork)


def fairseq_order(vocabulary: Vocabulary) -> list[int]:
    """Native ids in fairseq's order: `<s>`, `<pad>`, `</s>`, `<unk>`, then the others, the lowest first."""
    special = [_begin(vocabulary), vocabulary.pad, vocabulary.end, vocabulary.unknown]
    first = [number for number in special if number is not None]
    return first + sorted(set(range(len(vocabulary))) - set(first))


def vocabulary_files(checkpoint: TransformerCheckpoint) -> dict[str, bytes]:
    """Dictionaries (`subword count` a line; counts are not known, so 1), and the codes that split text."""
    files = {}
    for side in checkpoint.model.config.sides:
        vocabulary, language = _vocabulary(checkpoint, side), LANGUAGES[side]
        lines = "".join(f"{vocabulary.subwords[number]} 1\n" for number in fairseq_order(vocabulary)[len(SPECIAL) :])
        name = "dict.txt" if checkpoint.model.config.encoder is None else f"dict.{language}.txt"
        files[name] = lines.encode()
        if vocabulary.splitter.codes is not None:
            kind = "model" if vocabulary.splitter.kind == "sentencepiece" else "codes"
            files[f"{language}.{kind}"] = vocabulary.splitter.codes
    return files


def logits_in_our_order(model: Transformer, fairseq: FairseqModel, probe: Probe) -> Tensor:
    """Logits [2 t V] of the opened file for a probe, by native ids; fairseq starts translations with `</s>`."""
    source, target = probe.source, fairseq.renumber(probe.target, "decoder")
    if model.encoder is not None:
        source = fairseq.renumber(probe.source, "encoder")
        target = target.masked_fill(probe.target == fairseq.start, SPECIAL.index("</s>"))
    logits = probe_logits(model, Probe(source, probe.real, target))
    return logits[..., fairseq.renumber(torch.arange(logits.shape[-1]), "decoder")]


def _vocabulary(checkpoint: TransformerCheckpoint, side: str) -> Vocabulary:
    vocabulary = checkpoint.source if side == "encoder" else checkpoint.target
    if vocabulary is None:
        raise CheckpointError(f"{checkpoint.path} has no {LANGUAGES[side]} vocabulary to write fairseq's dictionary of")
    return vocabulary


def _begin(vocabulary: Vocabulary) -> int | None:
    """The id that becomes `<s>`: the start id; if that is the end id, another special id."""
    if vocabulary.start != vocabulary.end:
        return vocabulary.start
    return min(vocabulary.special - {vocabulary.pad, vocabulary.end, vocabulary.unknown}, default=None)


def _vocabulary_reasons(vocabulary: Vocabulary, side: str) -> list[str]:
    """Reasons why fairseq's dictionary cannot hold a vocabulary."""
    special = {"<s>": _begin(vocabulary), "<pad>": vocabulary.pad, "<unk>": vocabulary.unknown, "</s>": vocabulary.end}
    name = f"its {LANGUAGES[side]} vocabulary"
    if reasons := [f"{name} has no id for {subword}" for subword, number in special.items() if number is None]:
        return reasons
    subwords = [vocabulary.subwords[number] for number in fairseq_order(vocabulary)[len(SPECIAL) :]]
    odd = [text for text in subwords if not text.strip() or "\n" in text or "\r" in text or text in SPECIAL]
    if odd or len(set(subwords)) < len(subwords):
        reasons = [f"{name} has subwords that no dictionary can list ({(odd or ['two alike'])[0]!r})"]
    return reasons if vocabulary.only_ends else [*reasons, f"{name} puts other ids around texts than an end"]


def unusual_parts(config: TransformerConfig, *alike: str) -> dict[str, bool]:
    """Whether a model has each part that fairseq's Transformers and their descendants in transformers lack.

    The fields `alike` must be the same on both sides.
    """
    stacks, usual = config.stacks, {"norm_epsilon": 1e-5, "head_input": "full", "embedding_bias": False}
    reasons = {
        f"its encoder and decoder differ in {name}": len({getattr(s, name) for s in stacks}) > 1 for name in alike
    }
    for name, value in usual.items():
        reasons |= {f"its {name} is {setting}": setting != value for setting in (getattr(s, name) for s in stacks)}
    return reasons | {
        "its layers have different numbers of heads (`headscope prune remove --export masked` leaves zeros in the "
        "place of removed ones)": any(len({*s.self_heads, *s.cross_heads}) > 1 for s in stacks),
        "its decoder starts with a zero vector": config.start == "zero",
        "its heads do not fill its width (d_head, d_value)": any(
            s.most_heads * s.d_head != s.d_model or s.d_value not in (None, s.d_head) for s in stacks
        ),
    }


def _reasons(config: TransformerConfig, *, foldable: bool) -> list[str]:
    """Reasons why fairseq cannot express a model; `foldable`: its mixings can go into the output projections."""
    stacks, encoder, decoder = config.stacks, config.encoder, config.decoder
    reasons = unusual_parts(config, "activation", "scale_embedding", "embedding_norm") | {
        "its output has a bias": config.output_bias,
        "its encoder's embeddings have another width": bool(
            encoder and encoder.d_embedding not in (None, encoder.d_model)
        ),
        f"it is a language model with post-norm layers, and fairseq's are pre-norm ({flag.norm} pre)": (
            encoder is None and decoder.norm == "post"
        ),
        "its heads are mixed by what they read": not foldable,
        "it has a norm after a post-norm stack": any(s.norm == "post" and s.final_norm for s in stacks),
        "it has no norm after its encoder": bool(encoder and encoder.norm == "pre" and not encoder.final_norm),
        "only one of its stacks has positions": len({s.positions == "none" for s in stacks}) > 1,
    }
    return [reason for reason, holds in reasons.items() if holds]


def fill_weights(
    weights: dict[str, Tensor], side: str, stack: StackConfig, *, has_table: bool, alphas: bool = False
) -> None:
    """Add weights that fairseq expects: position tables, zero biases, with `alphas` the fork's identity matrices."""
    key = f"{side}.embeddings.positions.weight"
    like = weights[f"{side}.embeddings.tokens.weight"]
    if has_table:
        rows = position_table(stack, weights.get(key), like)
        used_rows = rows[stack.position_offset :]
        before = used_rows.new_zeros(OFFSET, used_rows.shape[1])
        if stack.positions == "learned" and stack.position_offset:
            before[-1] = rows[stack.position_offset - 1]  # what padding reads
        weights[key] = torch.cat([before, used_rows])
    for layer in range(stack.layers):
        for site, heads in (("self_attention", stack.self_heads), ("cross_attention", stack.cross_heads)):
            if not heads:
                continue
            name = f"{side}.layers.{layer}.{site}"
            for part in ("query", "key", "value", "output"):
                matrix = weights[f"{name}.{part}.weight"]
                weights.setdefault(f"{name}.{part}.bias", matrix.new_zeros(len(matrix)))
            if alphas:
                weights.setdefault(f"{name}.mixing.alpha", torch.eye(heads[layer], dtype=like.dtype))


def _has_table(stack: StackConfig) -> bool:
    """Whether fairseq needs a table of positions: they are learned, or sinusoids that begin at another position."""
    return stack.positions == "learned" or (stack.positions == "sinusoidal" and stack.position_offset != OFFSET)


def _origin(config: TransformerConfig, weights: Mapping[str, Tensor]) -> Origin:
    """The keys of a file and its tensors that native models lack: versions, marks of sinusoids, biases of alphas."""
    extra_tensors = dict[str, Tensor]()
    for side, stack in config.sides.items():
        extra_tensors[f"{side}.version"] = torch.tensor([VERSION])
        if stack.positions == "sinusoidal" and not _has_table(stack):
            extra_tensors[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    ours = {theirs: key for theirs, key in key_table(layer_counts(weights)).items() if key in weights}
    alphas = {theirs: weights[key] for theirs, key in ours.items() if key is not None and theirs.endswith(".alphas")}
    extra_tensors |= {f"{key}_bias": alpha.new_zeros(len(alpha), 1) for key, alpha in alphas.items()}
    return Origin(
        tuple(key for key in key_table(layer_counts(weights)) if key in extra_tensors or key in ours), extra_tensors
    )


def _options(config: TransformerConfig, target: Vocabulary, *, tied: bool, one_table: bool) -> dict[str, Any]:
    decoder, options = config.decoder, dict[str, Any](DEFAULTS)
    for side, stack in config.sides.items():
        options |= {
            f"{side}_layers": stack.layers,
            f"{side}_embed_dim": stack.d_model,
            f"{side}_ffn_embed_dim": stack.d_ffn,
            f"{side}_attention_heads": stack.d_model // stack.d_head,
            f"{side}_normalize_before": stack.norm == "pre",
            f"{side}_learned_pos": _has_table(stack),
            f"{side}_embed_path": None,
            f"{LANGUAGES[side]}_lang": LANGUAGES[side],
            f"max_{LANGUAGES[side]}_positions": stack.max_positions or DEFAULT_LENGTH,
        }
    options |= {name: getattr(decoder, name) for name in ("dropout", "attention_dropout", "activation_dropout")}
    options |= {
        "task": "translation",
        "arch": "transformer",
        "activation_fn": NAMES.get(decoder.activation, decoder.activation),
        "share_decoder_input_output_embed": config.tie_output and tied,
        "share_all_embeddings": config.share_embeddings and config.tie_output and one_table,
        "no_token_positional_embeddings": decoder.positions == "none",
        "no_scale_embedding": not decoder.scale_embedding,
        "layernorm_embedding": decoder.embedding_norm,
        "decoder_input_dim": decoder.d_embedding or decoder.d_model,
        "decoder_output_dim": config.d_output or decoder.d_model,
    }
    assert options["activation_fn"] in ACTIVATIONS
    options |= {"no_decoder_final_norm": True} if decoder.norm == "pre" and not decoder.final_norm else {}
    if config.encoder is None:
        options |= {**LM, **LM_TASK, "add_bos_token": target.start != target.end}
        options["tokens_per_sample"] = options["max_target_positions"]
    return options


def _notes(config: TransformerConfig, *, has_own_start: bool, of_fork: bool, folds_mixing: bool) -> tuple[str, ...]:
    notes = {
        "it has the matrices `alphas` of the fork MHR, which opens it; fairseq itself does not": of_fork,
        "the matrices that mix heads are folded into the output projections": folds_mixing,
        "fairseq starts translations with </s>, so the decoder reads a table of its own: the file is larger": (
            has_own_start and config.tie_output
        ),
        f"positions begin elsewhere than fairseq's, so they are a table of at least {DEFAULT_LENGTH:,} rows": any(
            stack.positions == "sinusoidal" and _has_table(stack) for stack in config.stacks
        ),
    }
    return tuple(note for note, holds in notes.items() if holds)
