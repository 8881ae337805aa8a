"""Arrays of story-of-heads files: one table tells arrays and weights of the `Transformer`, in both directions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headscope.model.native.transformer_config import TransformerConfig

Form = Literal["matrix", "vector", "embedding bias", "gates"]
SOURCE, TARGET = "mod/emb_inp/mat:0", "mod/emb_out/mat:0"
QKV = ("query", "key", "value")
NORM = ("weight", "scale:0"), ("bias", "bias:0")


SLOT = re.compile(r"\w*(Adam|Adagrad|Adadelta|RMSProp|Momentum|Ftrl|Average)(_\d+)?")
COUNTER = re.compile(r"(.*/)?(global_step|batch_no|learning_rate_multiplier|beta[12]_power(_\d+)?):0")


@dataclass(frozen=True)
class ArrayRule:
    """One array and the weights that it joins along their first axis; a "matrix" is stored transposed."""

    array: str
    weights: tuple[str, ...]
    form: Form = "vector"

    def pack(self, state: Mapping[str, Tensor]) -> Tensor:
        """The array of weights."""
        joined = torch.cat([state[name] for name in self.weights])
        if self.form == "matrix":
            return joined.T
        if self.form == "embedding bias":
            return joined.view(1, 1, -1)
        return joined.view(1, -1, 1, 1) if self.form == "gates" else joined

    def unpack(self, array: Tensor, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of an array; the sizes of the parts are those in `shapes`."""
        joined = array.T if self.form == "matrix" else array
        joined = joined.flatten() if self.form in ("embedding bias", "gates") else joined
        parts = torch.split(joined, [len(shapes[name]) for name in self.weights])
        return {name: part.contiguous() for name, part in zip(self.weights, parts, strict=True)}


def is_training_state(name: str, weights: Collection[str]) -> bool:
    """Whether an array is of an optimizer (`…/<weight>/Adam:0`) or a counter of steps: no result depends on it."""
    if COUNTER.fullmatch(name):
        return True
    scope, _, slot = name.removesuffix(":0").rpartition("/")
    return SLOT.fullmatch(slot) is not None and any(
        f"/{scope}".endswith(f"/{weight.removesuffix(':0')}") for weight in weights
    )


def array_rules(config: TransformerConfig, *, loss: str, combined: bool, shared: bool) -> Iterator[ArrayRule]:
    """All arrays of a model; `combined`: cross attention has one matrix for queries, keys and values."""
    encoder, decoder = config.encoder, config.decoder
    assert encoder is not None
    table = "decoder.embeddings.tokens.weight"
    yield ArrayRule(SOURCE, (table if config.share_embeddings else "encoder.embeddings.tokens.weight",))
    if not shared:
        yield ArrayRule(TARGET, (table,))
    if encoder.embedding_bias:
        yield ArrayRule("mod/emb_inp_bias:0", ("encoder.embeddings.bias",), "embedding bias")
    for side, name, stack in (("enc", "encoder", encoder), ("dec", "decoder", decoder)):
        gates = "hard-concrete.v1"
        for i in range(stack.layers):
            layer = f"{name}.layers.{i}"
            yield from _attention(f"mod/{side}_attn-{i}", f"{layer}.self_attention", True, stack.self_mixing == gates)
            if side == "dec":
                array, weight = f"mod/dec_enc_attn-{i}", f"{layer}.cross_attention"
                yield from _attention(array, weight, combined, stack.cross_mixing == gates)
            for array, part in (("conv1", "inner"), ("conv2", "outer")):
                yield from _linear(f"mod/{side}_ffn-{i}/{array}", (f"{layer}.ffn.{part}",))
            yield from _norm(f"mod/{side}_ffn-{i}/layer_norm", f"{layer}.ffn_norm")
        if stack.final_norm:
            yield from _norm(f"mod/{side}_out_norm", f"{name}.norm")
    if not config.tie_output:
        yield ArrayRule(f"{loss}/logits/W:0", ("output.weight",), "matrix")
    if config.output_bias:
        yield ArrayRule(f"{loss}/logits/b:0", ("output.bias",))


def _attention(array: str, weight: str, combined: bool, gated: bool) -> Iterator[ArrayRule]:
    if combined:
        yield from _linear(f"{array}/mem_conv", tuple(f"{weight}.{part}" for part in QKV))
    else:
        yield from _linear(f"{array}/query_conv", (f"{weight}.query",))
        yield from _linear(f"{array}/mem_conv", (f"{weight}.key", f"{weight}.value"))
    yield from _linear(f"{array}/out_conv", (f"{weight}.output",))
    yield from _norm(f"{array}/layer_norm", f"{weight}_norm")
    if gated:
        yield ArrayRule(f"{array}/gate/log_a:0", (f"{weight}.mixing.log_a",), "gates")


def _linear(array: str, modules: tuple[str, ...]) -> Iterator[ArrayRule]:
    yield ArrayRule(f"{array}/W:0", tuple(f"{module}.weight" for module in modules), "matrix")
    yield ArrayRule(f"{array}/b:0", tuple(f"{module}.bias" for module in modules))


def _norm(array: str, weight: str) -> Iterator[ArrayRule]:
    for parameter, suffix in NORM:
        yield ArrayRule(f"{array}/{suffix}", (f"{weight}.{parameter}",))
