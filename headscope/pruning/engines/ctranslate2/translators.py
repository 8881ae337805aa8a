"""Translation models in one form: sizes, weights under headscope's names, and the tokens of both sides.

Native Transformers have it; Marian's weights have the names that fairseq gives them, so the same table renames them.

What CTranslate2 translates is held against the model's own numbers and headscope's own translations: every token that
it chooses greedily must be the likeliest by the model's logits, of those that may come there. So where headscope's
translations differ, that is because its search follows settings that CTranslate2 has not: these are named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from headscope.data.encoded import Batch, Encoded, pad_side
from headscope.data.vocabulary import Vocabulary
from headscope.errors import CheckpointError, ConfigError
from headscope.formats.base import Checkpoint
from headscope.formats.fairseq.keys import key_table
from headscope.formats.huggingface.native_models.from_native import quiet_transformers
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.formats.translate_options import TranslateOptions, Translation
from headscope.heads import Site
from headscope.model.native.beams import SearchConfig
from headscope.model.native.shrink import folded_weights, unmixed
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.pruning.engines.base import refuse_difference
from headscope.pruning.model_inputs import InputTexts

ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}


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


@dataclass(frozen=True, kw_only=True)
class Translator:
    """What an engine needs of a model: `state` has weights under the names of a native Transformer, without mixing."""

    config: TransformerConfig
    state: Mapping[str, Tensor]
    tokens: TranslatorTokens


def check_translator(checkpoint: Checkpoint) -> None:
    """ConfigError for a model that is neither a native encoder-decoder nor a Marian."""
    if not (checkpoint.two_sided and (checkpoint.is_native or checkpoint.model_type == "marian")):
        raise ConfigError(
            "--export ctranslate2 writes translation models: native, fairseq, MHR and story-of-heads ones, and Marian; "
            f"{checkpoint.path} is a {checkpoint.format} model of type {checkpoint.model_type!r}"
        )


def translator_of(checkpoint: Checkpoint) -> Translator:
    """A model with its mixings folded; ConfigError where a mixing cannot be, CheckpointError without vocabularies."""
    check_translator(checkpoint)
    if checkpoint.is_native:
        native = cast(TransformerCheckpoint, checkpoint)
        return Translator(
            config=unmixed(native.model.config), state=folded_weights(native.model), tokens=_native_tokens(native)
        )
    return Translator(
        config=_marian_config(checkpoint), state=_marian_state(checkpoint), tokens=_marian_tokens(checkpoint)
    )


def write_splitters(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """What splits text into tokens, as files; their names."""
    if not checkpoint.is_native:
        with quiet_transformers():
            written = checkpoint.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
        return [Path(path).name for path in written if Path(path).is_file()]
    names = []
    native = cast(TransformerCheckpoint, checkpoint)
    for side in ("source", "target"):
        splitter = _vocabulary(native, side).splitter
        if splitter.codes is not None:
            names.append(f"{side}.{'model' if splitter.kind == 'sentencepiece' else 'codes'}")
            (folder / names[-1]).write_bytes(splitter.codes)
    return names


def _vocabulary(checkpoint: TransformerCheckpoint, side: str) -> Vocabulary:
    own: Vocabulary | None = getattr(checkpoint, side)
    if own is None:
        raise CheckpointError(f"{checkpoint.path} has no {side} vocabulary, which CTranslate2 needs; give --dicts")
    return own


def _native_tokens(checkpoint: TransformerCheckpoint) -> TranslatorTokens:
    source, target = _vocabulary(checkpoint, "source"), _vocabulary(checkpoint, "target")
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
    known = len(tokenizer)
    tokens = [tokenizer.convert_ids_to_tokens(n) if n < known else f"<{n}>" for n in range(config.vocab_size)]
    for name in ("unk_token", "eos_token"):
        if (token := getattr(tokenizer, name)) not in tokens:
            raise ConfigError(
                f"CTranslate2 needs an {name}, and that of {checkpoint.path} ({token}) is none of its subwords; name "
                "one in its tokenizer_config.json"
            )
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
    heads = checkpoint.layout

    def stack(side: str, site: Site, cross: bool) -> StackConfig:
        layers = range(getattr(config, f"{side}_layers"))
        widths = {
            entry.width
            for of in ((site, Site.CROSS) if cross else (site,))
            for entry in checkpoint.attention_sites.at(of)
        }
        return StackConfig(
            vocabulary=config.vocab_size,
            d_model=config.d_model,
            d_ffn=getattr(config, f"{side}_ffn_dim"),
            d_head=max(widths),
            self_heads=tuple(heads.get((site, layer), 0) for layer in layers),
            cross_heads=tuple(heads.get((Site.CROSS, layer), 0) for layer in layers) if cross else (),
            activation=ACTIVATIONS.get(config.activation_function, config.activation_function),
            positions="learned",
            max_positions=config.max_position_embeddings,
            scale_embedding=bool(config.scale_embedding),
        )

    return TransformerConfig(
        encoder=stack("encoder", Site.ENCODER_SELF, cross=False),
        decoder=stack("decoder", Site.DECODER_SELF, cross=True),
        output_bias=True,
    )


def _marian_state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Marian's weights under native names: they are fairseq's behind `model.`."""
    config: Any = checkpoint.model.config
    table = key_table({"encoder": config.encoder_layers, "decoder": config.decoder_layers})
    renamed = {"lm_head.weight": "output.weight", "final_logits_bias": "output.bias"}
    state = {}
    for key, values in checkpoint.model.state_dict().items():
        name = renamed.get(key) or table.get(key.removeprefix("model."))
        if name is not None:
            state[name] = values[0] if key == "final_logits_bias" else values
    return state


TEXTS, BEAM, LONGEST = 16, 4, 60
Pairs = list[tuple[Any, Translation]]
CHOICE = "logits of its choices are below the largest by"
PLAIN_SETTINGS = frozenset(
    [
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id"),
        *("max_length", "max_new_tokens", "num_beams", "length_penalty", "early_stopping", "bad_words_ids"),
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "min_p", "num_return_sequences"),
        *("use_cache", "cache_implementation", "renormalize_logits", "_from_model_config", "transformers_version"),
        *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
    ]
)
"""Entries of a generation_config.json that CTranslate2 is given, or that change no greedy translation."""


@dataclass(frozen=True, kw_only=True)
class Restraints:
    """How headscope's search of a checkpoint is restrained.

    `never` are the tokens that it never says, `shortest` how many come before the end at least. `others` are settings
    that CTranslate2 has not.
    """

    never: tuple[str, ...]
    shortest: int
    others: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        """What CTranslate2 is told of it; nothing where its own defaults are these."""
        shortest: dict[str, Any] = {} if self.shortest == 1 else {"min_decoding_length": self.shortest}
        return shortest | ({"suppress_sequences": [[token] for token in self.never]} if self.never else {})

    @property
    def typed(self) -> str:
        """The options as they are typed."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


def restraints_of(checkpoint: Any, tokens: TranslatorTokens) -> Restraints:
    """The restraints of a native checkpoint's search, or of a Marian's generation config."""
    if checkpoint.is_native:
        search: SearchConfig = checkpoint.search
        plain = SearchConfig()
        names = ("rule", "min_ratio", "min_extra", "unknown_penalty")
        others = [f"{name} {value}" for name in names if (value := getattr(search, name)) != getattr(plain, name)]
        return Restraints(never=() if tokens.pad is None else (tokens.pad,), shortest=1, others=tuple(others))
    config = checkpoint.model.generation_config
    words: list[list[int]] = config.bad_words_ids or []
    changed = {name: value for name, value in config.to_diff_dict().items() if name not in PLAIN_SETTINGS and value}
    others = [f"{name} {value}" for name, value in changed.items()]
    others += ["bad_words_ids of several tokens"] if any(len(word) > 1 for word in words) else []
    never = tuple(tokens.target[word[0]] for word in words if len(word) == 1)
    return Restraints(never=never, shortest=0, others=tuple(others))


def translated(
    engine: Any, checkpoint: Checkpoint, translator: Translator, data: InputTexts, *, limit: float
) -> tuple[str, ...]:
    """Lines on how many sentences are translated alike, greedily and with a beam.

    CheckpointError where a greedy choice of the engine is not the model's own (by `limit`, a share of the largest
    logit), or where most greedy translations differ and no setting says why.
    """
    texts, tokens = list(data.sources[:TEXTS]), translator.tokens
    if not texts:
        return ()
    longest = min(LONGEST, (translator.config.decoder.max_positions or LONGEST + 2) - 2)
    encoded = checkpoint.encode(texts, side="source", limit=checkpoint.reads(None))
    sources, restraints = [source_tokens(each.ids, tokens) for each in encoded], restraints_of(checkpoint, tokens)
    shared: dict[str, Any] = {"length_penalty": 1.0, "max_decoding_length": longest, "return_scores": True}
    search: Any = getattr(checkpoint, "search", None)
    lines, scores = [], search is None or search.rule == "fairseq"  # the mean of log-probabilities ranks in both
    for beam, way in ((1, "greedily"), (BEAM, f"with a beam of {BEAM}")):
        options = TranslateOptions(
            beam=beam, power=1.0, max_ratio=0, max_extra=longest, keep_pieces=True, scores=scores
        )
        ours = [translations[0] for translations in checkpoint.translations(texts, options)]
        bare = same_texts(checkpoint, tokens, engine.translate_batch(sources, beam_size=beam, **shared), ours)
        found = engine.translate_batch(sources, beam_size=beam, **shared, **restraints.options)
        pairs = max(bare, same_texts(checkpoint, tokens, found, ours), key=len)
        lines.append(_line(bare, pairs, len(texts), way, restraints, scores=scores))
        if beam == 1:
            _check_choices(checkpoint, tokens, encoded, found, restraints, longest=longest, limit=limit)
            if 2 * len(pairs) < len(texts) and not restraints.others:
                raise CheckpointError(
                    f"CTranslate2 translates {len(texts) - len(pairs)} of {len(texts)} sentences otherwise than the "
                    "model, with the same log-probabilities and the same settings; nothing was saved. Please report "
                    "this with the output of `headscope show`"
                )
    return tuple(lines)


def _line(bare: Pairs, pairs: Pairs, texts: int, way: str, restraints: Restraints, *, scores: bool) -> str:
    """How many are the same, and why others are not; `bare` are those of the engine's own defaults."""
    line = f"CTranslate2 translates {len(pairs)} of {texts} sentences the same {way}"
    if len(bare) < len(pairs):
        line += f" ({restraints.typed}; {len(bare)} without)"
    if scores and pairs:
        line += f"; their scores differ by {max(abs(a.scores[0] - b.score) for a, b in pairs):.1e}"
    if len(pairs) < texts and restraints.others:
        line += f"; headscope's search follows {', '.join(restraints.others)}, which CTranslate2 has not"
    elif 2 * len(pairs) < texts:
        line += "; its beam ranks by probabilities without what may not come, headscope's by the model's own"
    return line


def same_texts(checkpoint: Any, tokens: TranslatorTokens, found: Sequence[Any], ours: Sequence[Translation]) -> Pairs:
    """Pairs of the same text, which has no special tokens."""
    if checkpoint.is_native:
        special = {tokens.target[number] for number in checkpoint.target.special_ids}
    else:
        special = set(checkpoint.tokenizer.all_special_tokens)
    texts = [" ".join(token for token in result.hypotheses[0] if token not in special) for result in found]
    return [(theirs, mine) for theirs, text, mine in zip(found, texts, ours, strict=True) if text == mine.text]


def _check_choices(
    checkpoint: Any,
    tokens: TranslatorTokens,
    encoded: Sequence[Encoded],
    found: Sequence[Any],
    restraints: Restraints,
    *,
    longest: int,
    limit: float,
) -> None:
    """CheckpointError where a token that was chosen greedily is not the likeliest by the model's logits."""
    numbers = {token: number for number, token in enumerate(tokens.target)}
    end, never = numbers[tokens.end], [numbers[token] for token in restraints.never]
    difference, largest = 0.0, 1.0
    for sentence, result in zip(encoded, found, strict=True):
        chosen = [numbers[token] for token in result.hypotheses[0]]
        chosen += [end] if len(chosen) < longest else []
        read = Encoded([numbers[tokens.start], *chosen[:-1]], [False] * len(chosen))
        source, target = (pad_side([each]).to(checkpoint.device) for each in (sentence, read))
        with torch.no_grad():
            logits = checkpoint.logits(Batch(torch.arange(1), 0, source, target))[0].double().cpu()  # [t V]
        largest = max(largest, float(logits.masked_fill(logits.isinf(), 0.0).abs().max()))
        logits[:, never] = -torch.inf
        logits[: restraints.shortest, end] = -torch.inf
        behind = logits.amax(dim=1) - logits[torch.arange(len(chosen)), chosen]
        difference = max(difference, float(behind.max()))
    if not any(name.startswith("bad_words_ids") for name in restraints.others):
        refuse_difference(difference, 2 * limit * largest, "CTranslate2", CHOICE)


def source_tokens(ids: list[int], tokens: TranslatorTokens) -> list[str]:
    """Tokens of a source, without the end that the engine adds."""
    written = [tokens.source[number] for number in ids]
    return written[:-1] if tokens.adds_end and written[-1:] == [tokens.end] else written
