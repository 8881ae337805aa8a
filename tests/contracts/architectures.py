"""Tiny random models of every architecture that the contract tests go through.

Sizes are primes, or products of two different ones, so that a swapped axis cannot pass: heads 3 of width
5, or 6 query heads in 2 groups of width 10 (rotary embeddings want an even width), three kinds of layers
where an architecture has them, and windows of 3 in texts of 7.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
)

from headscope.heads import HeadId, Layout, Site

VOCABULARY = 97
FIRST_PLAIN = 5  # ids below stand for padding, start, end and so on
SOURCE, TARGET = 7, 5

TASKS = {
    "masked": AutoModelForMaskedLM,
    "causal": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "picture": AutoModelForImageClassification,
}

Left = Literal["as is", "position_ids", "no"]


@dataclass(frozen=True)
class Architecture:
    """One architecture: how its tiny model is built, and what is known about it.

    `left` says how text padded on the left gets its positions: the model finds them itself, they are
    given, or neither is possible. `layout` is written by hand from the config. `sdpa`: whether the
    architecture has that implementation at all.
    """

    name: str
    task: Literal["masked", "causal", "seq2seq", "picture"]
    sizes: dict[str, Any]
    encoder: tuple[int, int] | None = None  # layers, heads
    decoder: tuple[int, int] | None = None
    left: Left = "as is"
    sinks: bool = False
    sdpa: bool = True

    @property
    def layout(self) -> Layout:
        """The number of heads of every (site, layer)."""
        sites = {Site.ENCODER_SELF: self.encoder, Site.DECODER_SELF: self.decoder}
        if self.encoder and self.decoder:
            sites[Site.CROSS] = self.decoder
        return {(site, i): size[1] for site, size in sites.items() if size for i in range(size[0])}

    @property
    def generates(self) -> bool:
        """Whether `generate` works."""
        return self.task in ("causal", "seq2seq")


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {
    **_SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 61,
}
_ROTARY = {**_ENCODER, "hidden_size": 30}  # 3 heads of width 10
_GROUPED = {
    **_ENCODER,
    "hidden_size": 42,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
_TWO_SIDED = {
    **_SPECIAL,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "vocab_size": VOCABULARY,
    "d_model": 30,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 5,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 19,
    "max_position_embeddings": 61,
}
_T5 = {**_SPECIAL, "decoder_start_token_id": 0, "vocab_size": VOCABULARY, "d_model": 13, "d_kv": 5, "d_ff": 17}


def _masked(name: str, sizes: dict[str, Any], *, layers: int = 2, left: Left = "position_ids") -> Architecture:
    return Architecture(name, "masked", sizes, encoder=(layers, 3), left=left)


def _causal(name: str, sizes: dict[str, Any], *, heads: int = 3, layers: int = 2, **more: Any) -> Architecture:
    return Architecture(name, "causal", sizes, decoder=(layers, heads), **{"left": "position_ids", **more})


def _seq2seq(name: str, *, left: Left = "no", **sizes: Any) -> Architecture:
    return Architecture(name, "seq2seq", {**_TWO_SIDED, **sizes}, encoder=(2, 3), decoder=(3, 5), left=left)


ARCHITECTURES = (
    _masked("bert", _ENCODER),
    _masked("roberta", {**_ENCODER, "pad_token_id": 1, "bos_token_id": 0}, left="as is"),
    _masked(
        "distilbert",
        {**_SPECIAL, "vocab_size": VOCABULARY, "dim": 15, "n_layers": 2, "n_heads": 3, "hidden_dim": 17},
    ),
    _masked("electra", {**_ENCODER, "embedding_size": 11}),
    _masked("albert", {**_ENCODER, "embedding_size": 11, "num_hidden_layers": 3}, layers=3),
    _masked(
        "modernbert",
        {**_ROTARY, "cls_token_id": 1, "sep_token_id": 2, "num_hidden_layers": 5, "local_attention": 4},
        layers=5,
    ),
    _causal(
        "gpt2",
        {**_SPECIAL, "vocab_size": VOCABULARY, "n_embd": 15, "n_layer": 2, "n_head": 3, "n_positions": 61},
    ),
    _causal("gpt_neox", {**_ROTARY, "rotary_pct": 0.4}),
    _causal(
        "opt",
        {
            **{name: size for name, size in _ENCODER.items() if name != "intermediate_size"},
            "ffn_dim": 17,
            "word_embed_proj_dim": 15,
        },
        left="as is",
    ),
    _causal("llama", _GROUPED, heads=6),
    _causal("qwen3", _GROUPED, heads=6),
    _causal("gemma", {**_GROUPED, "num_key_value_heads": 1}, heads=6),
    _causal("gemma2", {**_GROUPED, "sliding_window": 3, "attn_logit_softcapping": 1.5}, heads=6, sdpa=False),
    _causal(
        "gemma3_text",
        {**_GROUPED, "num_hidden_layers": 3, "sliding_window": 3, "sliding_window_pattern": 2},
        heads=6,
        layers=3,
    ),
    _causal("mistral", {**_GROUPED, "sliding_window": 3}, heads=6),
    _causal("phi", {**_ROTARY, "partial_rotary_factor": 0.4}),
    _causal(
        "gpt_oss",
        {
            **_GROUPED,
            "hidden_size": 24,
            "intermediate_size": 24,
            "sliding_window": 3,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "experts_implementation": "eager",
        },
        heads=6,
        sinks=True,
        sdpa=False,
    ),
    Architecture(
        "t5",
        "seq2seq",
        {**_T5, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 3, "is_encoder_decoder": True},
        encoder=(3, 3),
        decoder=(2, 3),  # not more layers than the encoder: `generate` of transformers 5.23 fails on such a T5
    ),
    _seq2seq("bart"),
    _seq2seq("mbart"),
    _seq2seq("marian"),
    _seq2seq("m2m_100", left="as is", pad_token_id=1, bos_token_id=0),
    _seq2seq("pegasus"),
    Architecture(
        "vit",
        "picture",
        {
            **{name: _ENCODER[name] for name in ("hidden_size", "num_hidden_layers", "intermediate_size")},
            "num_attention_heads": 3,
            "image_size": 9,
            "patch_size": 3,
            "num_labels": 7,
        },
        encoder=(2, 3),
    ),
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def build(architecture: Architecture, *, implementation: str = "sdpa", dtype: str = "float32") -> Any:
    """The tiny model with its task head, in evaluation mode; a copy, free to be changed."""
    if implementation == "sdpa" and not architecture.sdpa:
        implementation = "eager"
    model = copy.deepcopy(_built(architecture.name))
    model.set_attn_implementation(implementation)
    return model.to(getattr(torch, dtype))


@cache
def _built(name: str) -> Any:
    architecture = BY_NAME[name]
    torch.manual_seed(0)
    model = TASKS[architecture.task].from_config(AutoConfig.for_model(name, **architecture.sizes))
    return sharpened(model.eval())


def sharpened(model: Any) -> Any:
    """Weights large enough that heads differ: a fresh model attends almost evenly, which hides mistakes."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad and not (weight.ndim == 1 and weight.eq(1).all()):
                weight.normal_(std=0.4, generator=noise)
    return model


def inputs_of(
    architecture: Architecture,
    *,
    lengths: Sequence[int] = (SOURCE,),
    targets: Sequence[int] = (TARGET,),
    left: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Text of these lengths as one batch (or one random picture), padded on the right or on the left."""
    if architecture.task == "picture":
        noise = torch.Generator().manual_seed(2)
        return {"pixel_values": torch.randn(len(lengths), 3, 9, 9, generator=noise).to(dtype)}
    pad = architecture.sizes["pad_token_id"]
    inputs = dict(zip(("input_ids", "attention_mask"), _text(lengths, pad, left=left, seed=3), strict=True))
    if architecture.task == "seq2seq":
        names = ("decoder_input_ids", "decoder_attention_mask")
        inputs.update(zip(names, _text(targets, pad, left=left, seed=5), strict=True))
    if left and architecture.left == "position_ids":
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return inputs


def _text(lengths: Sequence[int], pad: int, *, left: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Ids and mask; row i holds the same ids whatever the other rows are."""
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), pad)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        noise = torch.Generator().manual_seed(seed + row)
        place = slice(longest - length, None) if left else slice(length)
        ids[row, place] = torch.randint(FIRST_PLAIN, VOCABULARY, (length,), generator=noise)
        mask[row, place] = 1
    return ids, mask


def row_of(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One sentence of a batch, without its padding."""
    single = {}
    for name, values in inputs.items():
        mask = inputs["decoder_attention_mask" if name.startswith("decoder_") else "attention_mask"]
        single[name] = values[row, mask[row].bool()][None]
    return single


def silence(slices: Any, heads: Sequence[int]) -> None:
    """Set the slices of `heads` of one projection to zero, in the model itself."""
    with torch.no_grad():
        for head in heads:
            slices.weight.index_fill_(slices.axis, slices.units[head], 0.0)


def logits(model: nn.Module, inputs: dict[str, Tensor], **more: Any) -> Tensor:
    """The logits of one pass without gradients."""
    with torch.no_grad():
        found: Tensor = model(**inputs, **more).logits
    return found


def ones(layout: Layout) -> dict[tuple[Site, int], Tensor]:
    """Open gates for every head."""
    return {place: torch.ones(heads) for place, heads in layout.items()}


def closed_everywhere(layout: Layout, site: Site, heads: tuple[int, ...]) -> list[HeadId]:
    """These heads in all layers of a site (ALBERT's layers share one projection)."""
    return [HeadId(site, layer, head) for where, layer in layout if where is site for head in heads]


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal up to `tolerance` of the largest number."""
    assert found.shape == expected.shape
    difference = (found - expected).abs().max().item()
    assert difference <= tolerance * max(1.0, expected.abs().max().item()), difference


def two_berts() -> Any:
    """BERT2BERT: an encoder–decoder made of two models with vocabularies of their own."""
    sizes = BY_NAME["bert"].sizes
    encoder = AutoConfig.for_model("bert", **sizes)
    decoder = AutoConfig.for_model(
        "bert", **{**sizes, "vocab_size": 89, "num_hidden_layers": 3, "is_decoder": True, "add_cross_attention": True}
    )
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder, decoder_start_token_id=1, pad_token_id=0
    )
    return sharpened(EncoderDecoderModel(config).eval())
