"""fairseq's options as a `TransformerConfig`: defaults of every named architecture, flags that are refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from headscope.errors import CheckpointError, restate
from headscope.formats.fairseq.keys import layer_counts
from headscope.formats.pickles import StubType
from headscope.model.native.transformer_config import StackConfig, TransformerConfig

OFFSET = 2  # fairseq's padding index plus one, where positions begin


def _heads(count: int, **flags: Any) -> dict[str, Any]:
    return {"encoder_attention_heads": count, "decoder_attention_heads": count, **flags}


_GPT3 = {"decoder_learned_pos": True, "activation_fn": "gelu", "share_decoder_input_output_embed": True}
_GPT3_HEADS = {"small": 12, "medium": 16, "large": 16, "xl": 32, "2_7": 32, "6_7": 32, "13": 40, "175": 96}
_GPT2_HEADS = {"2_tiny": 1, "": 12, "2_small": 16, "2_medium": 20, "2_big": 25}
_EIGHT = ("transformer", "transformer_wmt_en_de", "transformer_align", "transformer_lm")
_BIG = (*("wmt_en_de_big_align", "vaswani_wmt_en_fr_big", "wmt_en_de_big", "vaswani_wmt_en_de_big"), "lm_big")
# What an architecture's name says where the file itself does not: heads, which weights do not tell, and flags.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_EIGHT, _heads(8)),
    **{f"transformer_{name}": _heads(16) for name in _BIG},
    "transformer_wmt_en_de_big_t2t": _heads(16, encoder_normalize_before=True, decoder_normalize_before=True),
    "transformer_tiny": _heads(2),
    "transformer_iwslt_de_en": _heads(4),
    **{f"transformer_lm_gpt{name}": _heads(count, activation_fn="gelu") for name, count in _GPT2_HEADS.items()},
    **{f"transformer_lm_gpt3_{name}": _heads(count, **_GPT3) for name, count in _GPT3_HEADS.items()},
}
ACTIVATIONS = {
    **{name: name for name in ("relu", "gelu", "tanh", "linear")},
    "gelu_fast": "gelu-tanh",
    "gelu_accurate": "gelu-tanh",
    "swish": "silu",
}
# Options that, when on, make a model that is not the native Transformer (or was not trained as one).
UNSUPPORTED_SETTINGS = (
    *("adaptive_softmax_cutoff", "adaptive_input", "character_embeddings", "char_inputs"),
    *("quant_noise_pq", "quant_noise_scalar", "encoder_layers_to_keep", "decoder_layers_to_keep"),
    *("no_cross_attention", "cross_self_attention"),
    *("max_relative_length", "max_relative_positions", "max_relative_position", "relative_attention", "alibi"),
    *("scale_fc", "scale_attn", "scale_heads", "scale_resids", "base_layers", "moe_freq", "encoder_moe_freq"),
    *("decoder_moe_freq", "merge_src_tgt_embed", "full_context_alignment", "use_stable_embedding"),
    *("xformers_att_config", "encoder_xformers_att_config", "decoder_xformers_att_config", "mask_layer_type"),
)


@dataclass(frozen=True)
class Settings:
    """The options of a fairseq checkpoint; `legacy`: they come from `args` of the file, else from its `cfg`."""

    path: str
    values: Mapping[str, Any] = field(repr=False)
    arch: str
    legacy: bool

    @property
    def lm(self) -> bool:
        """Whether it is a language model."""
        return self.arch.startswith("transformer_lm")

    def get(self, name: str, default: Any = None) -> Any:
        """An option, else what the architecture says, else `default`."""
        value = self.values.get(name)
        value = ARCHITECTURES.get(self.arch, {}).get(name) if value is None else value
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.get(name, default)
        if type(value) is not int or not 0 < value < 2**31:
            why = f"{format_setting(value)}; it must be a whole number above 0"
            why = f"not said, and headscope does not know arch {self.arch!r}" if value is None else why
            raise CheckpointError(f"{self.path}: {name} is {why}")
        return value

    def text(self, name: str) -> str | None:
        """A string. Returns None if there is none."""
        value = self.get(name)
        return value if isinstance(value, str) else None

    def on(self, name: str) -> bool:
        """Whether an option is on: a flag that is set, a number above 0, a text or list with something in it."""
        value = self.get(name)
        if isinstance(value, str):
            return value.strip().lower() not in ("", "0", "false", "none", "[]", "null")
        if isinstance(value, (int, float)):
            return value > 0
        return value is not None and value != [] and value != ()


def read_settings(path: str, content: Mapping[str, Any], source: str | None, target: str | None) -> Settings:
    """The options of a fairseq file: `args`, or the sections of `cfg` where there are no `args`.

    The languages are `source` and `target` if given, else those of the options, else the only pair in `lang_pairs`.
    """
    args = content.get("args")
    values: dict[str, Any] = {}
    if args is not None:
        values = section(args)
    else:
        parts = section(content.get("cfg"))
        for name in ("task", "model"):
            options = section(parts.get(name))
            for outer in ("encoder", "decoder", "quant_noise"):  # encoder.layers is encoder_layers in `args`
                options |= {f"{outer}_{key}": value for key, value in section(options.pop(outer, None)).items()}
            values |= options
        values.setdefault("arch", values.get("_name"))
        values.setdefault("task", section(parts.get("task")).get("_name"))
    arch = values.get("arch")
    if not isinstance(arch, str) or not arch.startswith("transformer"):
        raise CheckpointError(f"{path}: its arch is {format_setting(arch)}; transformer* and transformer_lm* are read")
    pairs = _split_list(values.get("lang_pairs"))
    only = pairs[0].split("-") if len(pairs) == 1 and pairs[0].count("-") == 1 else (None, None)
    main = section(values.get("langtoks")).get("main")
    marks = main if isinstance(main, (list, tuple)) and len(main) == 2 else (None, None)
    languages = {
        "source_lang": source or values.get("source_lang") or only[0],
        "target_lang": target or values.get("target_lang") or only[1],
        "encoder_langtok": marks[0],
        "decoder_langtok": marks[1],
    }
    values |= {key: value for key, value in languages.items() if value}
    return Settings(path, values, arch, args is not None)


# Tasks of many languages, which mark the language of a text with subwords around it.

MULTILINGUAL, PRETRAINED = "translation_multi_simple_epoch", "translation_from_pretrained_bart"
STYLES = {"multilingual": "__{}__", "mbart": "[{}]"}


def around_texts(settings: Settings, side: str) -> dict[str, tuple[str, ...]]:
    """Subwords around the texts of a side in tasks of many languages, by field of the vocabulary.

    Deviation: translations of a pretrained BART end with `</s>`; in fairseq the language comes once more behind it.
    """
    reading = side == "source"
    if settings.text("task") == PRETRAINED:
        mark, begin = _style(settings).format(settings.text(f"{side}_lang")), ("<s>",) * settings.on("prepend_bos")
        return {"prefix": begin, "suffix": ("</s>", mark)} if reading else {"start": (mark,), "begin": begin}
    language_setting = settings.get("encoder_langtok" if reading else "decoder_langtok")
    if settings.text("task") != MULTILINGUAL or not language_setting:
        return {}
    of_source = isinstance(language_setting, str) and language_setting.startswith("src")
    mark = _style(settings).format(settings.text("source_lang" if of_source else "target_lang"))
    if settings.on("lang_tok_replacing_bos_eos"):
        return {"suffix" if reading else "start": (mark,)}
    return {"prefix" if reading else "begin": (mark,)}


def added_subwords(settings: Settings, listing: str | None) -> tuple[str, ...]:
    """The subwords that fairseq adds to a task's dictionaries; `listing` is the content of the file `lang_dict`."""
    if settings.text("task") not in (MULTILINGUAL, PRETRAINED):
        return ()
    languages = _split_list(settings.get("langs")) if listing is None else listing.split()
    if not languages and not settings.on("lang_dict"):
        languages = sorted({part for pair in _split_list(settings.get("lang_pairs")) for part in pair.split("-")})
    style = _style(settings)
    return (*map(style.format, languages), *(["<mask>"] if style == STYLES["mbart"] else []))


def _style(settings: Settings) -> str:
    style = "mbart" if settings.text("task") == PRETRAINED else settings.text("lang_tok_style")
    return STYLES.get(style or "multilingual", STYLES["multilingual"])


def _split_list(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else ()
    return [part for part in parts if isinstance(part, str) and part]


def section(value: Any) -> dict[str, Any]:
    """The entries of a Namespace, dictionary or omegaconf record as a dictionary; an empty one for other values."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, StubType):
        state = value.state[0] if isinstance(value.state, tuple) and value.state else value.state
        value = state.get("_content", state) if isinstance(state, dict) else None
    if not isinstance(value, dict):
        return {}
    return {key: _leaf(entry) for key, entry in value.items() if isinstance(key, str)}


def _leaf(value: Any) -> Any:
    """The value inside an omegaconf node; of a member of an enumeration, the argument that it was made with."""
    if isinstance(value, StubType) and isinstance(value.state, dict) and "_val" in value.state:
        value = value.state["_val"]
    if isinstance(value, StubType) and value.state is None and len(value.args) == 1:
        value = value.args[0]
    return value


def format_setting(value: Any) -> str:
    """A value for a message: only its type where its text may be long or slow to make."""
    return repr(value)[:40] if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"


def transformer_config(settings: Settings, state: Mapping[str, Tensor]) -> TransformerConfig:
    """The config of a model by its options and upgraded weights; CheckpointError names an option that does not fit."""
    if on := [name for name in UNSUPPORTED_SETTINGS if settings.on(name)]:
        value = format_setting(settings.get(on[0]))
        raise CheckpointError(f"{settings.path}: only models without the option {on[0]} ({value}) can be opened")
    shared = not settings.lm and settings.on("share_all_embeddings")
    output = state.get("decoder.project_out_dim.weight")
    with restate(CheckpointError, f"{settings.path}: {{why}}"):
        return TransformerConfig(
            encoder=None if settings.lm else _stack(settings, state, "encoder"),
            decoder=_stack(settings, state, "decoder"),
            share_embeddings=shared,
            tie_output=shared or settings.on("share_decoder_input_output_embed"),
            d_output=None if output is None else len(output),
        )


def _stack(settings: Settings, state: Mapping[str, Tensor], side: str) -> StackConfig:
    if not (layers := layer_counts(state).get(side)):
        raise CheckpointError(f"{settings.path}: its weights are none of a {settings.arch}: no layers of the {side}")
    d_ffn, d = _shape(settings, state, f"{side}.layers.0.fc1.weight")
    vocabulary, d_embedding = _shape(settings, state, f"{side}.embed_tokens.weight")
    alpha, name = state.get(f"{side}.layers.0.self_attn.alphas"), f"{side}_attention_heads"
    # the fork of MHR has other defaults than fairseq, and its alphas say how many heads there are
    is_known = alpha is None or not alpha.ndim or settings.values.get(name) is not None
    heads = settings.number(name) if is_known or alpha is None else len(alpha)
    if d % heads:
        raise CheckpointError(f"{settings.path}: its width {d} is not divisible by {heads} {side}_attention_heads")
    pre = settings.on(f"{side}_normalize_before")
    if settings.lm and settings.get("decoder_normalize_before") is None:  # pre-norm unless a file says otherwise
        pre = settings.legacy or settings.arch != "transformer_lm" or "decoder.layer_norm.weight" in state
    none = settings.on("no_token_positional_embeddings")
    if table := settings.on(f"{side}_learned_pos") and not none:
        longest = max(_shape(settings, state, f"{side}.embed_positions.weight")[0] - OFFSET, 1)
    else:
        default = settings.get("tokens_per_sample", 1024) if settings.lm else 1024
        longest = settings.number(f"max_{'source' if side == 'encoder' else 'target'}_positions", default)
    if (activation := settings.get("activation_fn", "relu")) not in ACTIVATIONS:
        name = format_setting(activation)
        raise CheckpointError(f"{settings.path}: activation_fn is {name}; headscope has {', '.join(ACTIVATIONS)}")
    cross = side == "decoder" and not settings.lm
    return StackConfig(
        vocabulary=vocabulary,
        d_model=d,
        d_ffn=d_ffn,
        d_head=d // heads,
        self_heads=_counts(settings, state, f"{side}.layers.{{}}.self_attn", layers, d // heads),
        cross_heads=_counts(settings, state, "decoder.layers.{}.encoder_attn", layers, d // heads) if cross else (),
        d_embedding=None if d_embedding == d else d_embedding,
        norm="pre" if pre else "post",
        final_norm=pre and _final_norm(settings, state, side),
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        positions="none" if none else "learned" if table else "sinusoidal",
        position_offset=OFFSET,
        max_positions=longest,
        scale_embedding=not settings.on("no_scale_embedding"),
        embedding_norm=settings.on("layernorm_embedding"),
        self_mixing=_mixing(state, side, "self_attn"),
        cross_mixing=_mixing(state, side, "encoder_attn") if cross else None,
    )


def _shape(settings: Settings, state: Mapping[str, Tensor], key: str) -> tuple[int, int]:
    if key not in state or state[key].ndim != 2:
        raise CheckpointError(f"{settings.path}: weight {key} is {'missing' if key not in state else 'no matrix'}")
    rows, columns = state[key].shape
    return rows, columns


def _counts(settings: Settings, state: Mapping[str, Tensor], name: str, layers: int, width: int) -> tuple[int, ...]:
    """The number of heads of every layer, from the rows of its query projection: layers differ only after pruning."""
    rows = [_shape(settings, state, f"{name.format(i)}.q_proj.weight")[0] for i in range(layers)]
    if odd := [count for count in rows if count % width]:
        raise CheckpointError(f"{settings.path}: {name.format('N')}.q_proj has {odd[0]} rows; a head has {width}")
    return tuple(count // width for count in rows)


def _mixing(state: Mapping[str, Tensor], side: str, module: str) -> str | None:
    return "alpha.v1" if any(re.fullmatch(rf"{side}\.layers\.\d+\.{module}\.alphas", key) for key in state) else None


def _final_norm(settings: Settings, state: Mapping[str, Tensor], side: str) -> bool:
    """Whether a pre-norm stack ends with a norm; files of the first versions have none, whatever their options say."""
    version = state.get(f"{side}.version")
    number = float(version.reshape(-1)[0]) if version is not None and version.numel() else 1.0
    if number <= (1 if side == "encoder" else 2) and f"{side}.layer_norm.weight" not in state:
        return False
    if side == "encoder":
        return True
    lacks_norm = settings.on("no_decoder_final_norm") or settings.get("decoder_final_norm", True) is False
    return not (lacks_norm or "no_tie_adaptive_proj" in settings.values)
