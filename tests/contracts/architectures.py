"""Tiny random models of the architectures that are tested in depth: one of each kind in the list.

Their sizes stand in architectures.toml: three kinds of layers where an architecture has them, and windows of 3 in texts
of 7. test_every_architecture.py goes through the whole list.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, EncoderDecoderConfig, EncoderDecoderModel

from headscope.heads import HeadId, Layout, Site, SiteLayer
from headscope.model.projections import projections
from tests.contracts.catalogue import catalogue

VOCABULARY = 97
FIRST_PLAIN = 5  # ids below stand for padding, start, end and so on
SOURCE, TARGET = 7, 5

Left = Literal["as is", "position_ids", "no"]
Task = Literal["masked", "causal", "seq2seq", "picture"]


@dataclass(frozen=True)
class Architecture:
    """One architecture: how its tiny model is built, and facts about it.

    `left` says how text padded on the left gets its positions: the model finds them itself, they are
    given, or neither is possible. `layout` is written by hand from the config. `sdpa`: whether the
    architecture has that implementation at all.
    """

    name: str
    task: Task
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


CATALOGUE = catalogue()


def _from_list(name: str, **facts: Any) -> Architecture:
    """An architecture of architectures.toml, with further facts."""
    entry = CATALOGUE[name]
    return Architecture(name, cast(Task, entry.task), entry.sizes, **facts)


def _masked(name: str, *, layers: int = 2, left: Left = "position_ids") -> Architecture:
    return _from_list(name, encoder=(layers, 3), left=left)


def _causal(name: str, *, heads: int = 3, layers: int = 2, **more: Any) -> Architecture:
    return _from_list(name, decoder=(layers, heads), **{"left": "position_ids", **more})


def _seq2seq(name: str, *, left: Left = "no") -> Architecture:
    return _from_list(name, encoder=(2, 3), decoder=(3, 5), left=left)


ARCHITECTURES = (
    _masked("bert"),
    _masked("roberta", left="as is"),
    _masked("distilbert"),
    _masked("albert", layers=3),
    _masked("modernbert", layers=5),
    _causal("gpt2"),
    _causal("gpt_neox"),
    _causal("opt", left="as is"),
    _causal("llama", heads=6),
    _causal("qwen3", heads=6),
    _causal("gemma2", heads=6, sdpa=False),
    _causal("gemma3_text", heads=6, layers=3),
    _causal("mistral", heads=6),
    _causal("phi"),
    _causal("gpt_oss", heads=6, sinks=True, sdpa=False),
    # not more layers than the encoder: `generate` of transformers 5.23 fails on such a T5
    _from_list("t5", encoder=(3, 3), decoder=(2, 3)),
    _seq2seq("bart"),
    _seq2seq("marian"),
    _seq2seq("m2m_100", left="as is"),
    _from_list("vit", encoder=(2, 3)),
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def parametrize(architectures: Sequence[Architecture]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("architecture", architectures, ids=lambda architecture: architecture.name)


every = parametrize(ARCHITECTURES)
text_only = parametrize([architecture for architecture in ARCHITECTURES if architecture.task != "picture"])


def build(architecture: Architecture, *, implementation: str = "sdpa", dtype: str = "float32") -> Any:
    """The tiny model with its task head, in evaluation mode; a copy, free to be changed."""
    if implementation == "sdpa" and not architecture.sdpa:
        implementation = "eager"
    model = copy.deepcopy(_build_cached(architecture.name))
    model.set_attn_implementation(implementation)
    return model.to(getattr(torch, dtype))


@cache
def _build_cached(name: str) -> Any:
    return sharpen(CATALOGUE[name].model())


def sharpen(model: Any) -> Any:
    """Weights large enough that heads differ: a fresh model attends almost evenly, which hides mistakes."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):  # no norm is like another
            if weight.requires_grad and weight.ndim == 1 and weight.eq(1).all():
                weight.add_(torch.linspace(-0.2, 0.2, len(weight)).roll(index % max(len(weight), 1)))
            elif weight.requires_grad:
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
    """Ids and mask; the ids of row i do not depend on the other rows."""
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), pad)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        noise = torch.Generator().manual_seed(seed + row)
        columns = slice(longest - length, None) if left else slice(length)
        ids[row, columns] = torch.randint(FIRST_PLAIN, VOCABULARY, (length,), generator=noise)
        mask[row, columns] = 1
    return ids, mask


def row_of(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One sentence of a batch, without its padding."""
    single = {}
    for name, values in inputs.items():
        mask = inputs["decoder_attention_mask" if name.startswith("decoder_") else "attention_mask"]
        single[name] = values[row, mask[row].bool()][None]
    return single


@torch.no_grad()
def silence(model: Any, heads: Iterable[HeadId]) -> Any:
    """Set the heads' slices of the output projections to zero, in place; return the model."""
    layers = projections(model)
    for head in heads:
        output = layers[head.site, head.layer].output
        assert output is not None
        output.weight.index_fill_(output.axis, output.units[head.head], 0.0)
    return model


def logits(model: nn.Module, inputs: dict[str, Tensor], **more: Any) -> Tensor:
    """The logits of one pass without gradients."""
    with torch.no_grad():
        result: Tensor = model(**inputs, **more).logits
    return result


def open_gates(layout: Layout) -> dict[SiteLayer, Tensor]:
    """Open gates for every head."""
    return {site_layer: torch.ones(heads) for site_layer, heads in layout.items()}


def closed_everywhere(layout: Layout, site: Site, heads: tuple[int, ...]) -> list[HeadId]:
    """These heads in all layers of a site (ALBERT's layers share one projection)."""
    return [HeadId(site, layer, head) for where, layer in layout if where is site for head in heads]


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal up to `tolerance` of the largest number."""
    assert actual.shape == expected.shape
    difference = (actual - expected).abs().max().item()
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
    return sharpen(EncoderDecoderModel(config).eval())
