"""Translation models in one form: sizes, weights under headscope's names, and the tokens of both sides.

Native Transformers have it; Marian's weights have the names that fairseq gives them, so the same table renames them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from headscope.errors import CheckpointError, ConfigError, flag
from headscope.formats.base import Checkpoint
from headscope.formats.fairseq.keys import key_table
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import Site
from headscope.model.interface import quiet_transformers
from headscope.model.native.transformer import folded_weights, without_mixing
from headscope.model.native.transformer_config import StackConfig, TransformerConfig

MARIAN_ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}


@dataclass(frozen=True, kw_only=True)
class TranslatorTokens:
    """The tokens of both sides by id, and special ones; `adds_end`: a source gets its end from the engine."""

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
    """What an engine needs of a model: `state` has weights under the names of a native Transformer, without mixing."""

    config: TransformerConfig
    state: Mapping[str, Tensor]
    tokens: TranslatorTokens


def check_translator(checkpoint: Checkpoint) -> None:
    """ConfigError for a model that is neither a native encoder-decoder nor a Marian."""
    if not (checkpoint.two_sided and (checkpoint.is_native or checkpoint.model_type == "marian")):
        raise ConfigError(
            "ctranslate2 writes translation models: native, fairseq, MHR and story-of-heads ones, and Marian; "
            f"{checkpoint.path} is a {checkpoint.format} model of type {checkpoint.model_type!r}"
        )


def translator_of(checkpoint: Checkpoint) -> Translator:
    """A model with its mixings folded; ConfigError where a mixing cannot be, CheckpointError without vocabularies."""
    check_translator(checkpoint)
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
    unknown = {own.subwords[0 if own.unknown is None else own.unknown] for own in (source, target)}
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
            why = f"that of {checkpoint.path} ({token}) is none of its subwords"
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


def write_splitters(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """What splits text into tokens, as files; their names."""
    if not checkpoint.is_native:
        with quiet_transformers():
            paths = checkpoint.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
        return [Path(path).name for path in paths if Path(path).is_file()]
    names = []
    for side in ("source", "target"):
        splitter = getattr(checkpoint, side).splitter
        if splitter.codes is not None:
            names.append(f"{side}.{'model' if splitter.kind == 'sentencepiece' else 'codes'}")
            (folder / names[-1]).write_bytes(splitter.codes)
    return names
