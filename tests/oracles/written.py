"""What each head writes, and what that is worth to a logit, for one sentence: from weights by their names."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer
from headscope.model.taps import capture
from tests.oracles.speakers import Example

NAMES = {
    "bert": {Site.ENCODER_SELF: "bert.encoder.layer.{}.attention.{}"},
    "gpt2": {Site.DECODER_SELF: "transformer.h.{}.attn.{}"},
    "llama": {Site.DECODER_SELF: "model.layers.{}.self_attn.{}"},
    "t5": {
        Site.ENCODER_SELF: "encoder.block.{}.layer.0.SelfAttention.{}",
        Site.DECODER_SELF: "decoder.block.{}.layer.0.SelfAttention.{}",
        Site.CROSS: "decoder.block.{}.layer.1.EncDecAttention.{}",
    },
    "marian": {
        Site.ENCODER_SELF: "model.encoder.layers.{}.self_attn.{}",
        Site.DECODER_SELF: "model.decoder.layers.{}.self_attn.{}",
        Site.CROSS: "model.decoder.layers.{}.encoder_attn.{}",
    },
    "native": {
        Site.ENCODER_SELF: "encoder.layers.{}.self_attention.{}",
        Site.DECODER_SELF: "decoder.layers.{}.self_attention.{}",
        Site.CROSS: "decoder.layers.{}.cross_attention.{}",
    },
}
PARTS = {
    "bert": ("self.query", "self.key", "self.value", "output.dense"),
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "marian": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "t5": ("q", "k", "v", "o"),
    "native": ("query", "key", "value", "output"),
}


def matrix(kind: str, its: Checkpoint, place: SiteLayer, part: int) -> Tensor:
    """W_Q, W_K, W_V or W_O [outputs inputs] of one place."""
    family = kind.partition("-")[0]
    name = NAMES[family][place[0]]
    model = its.model
    if family == "gpt2":
        if part == 3:
            return model.get_parameter(name.format(place[1], "c_proj.weight")).detach().T
        return model.get_parameter(name.format(place[1], "c_attn.weight")).detach().T.chunk(3)[part]
    return model.get_parameter(name.format(place[1], f"{PARTS[family][part]}.weight")).detach()


def head_slice(kind: str, its: Checkpoint, place: SiteLayer, part: int, head: int) -> Tensor:
    """A head's rows of W_Q, W_K, W_V (its group's for shared ones), or its columns of W_O, mixing folded in."""
    whole = matrix(kind, its, place, part)
    heads = its.layout[place]
    if part == 3:
        blocks = whole.T.reshape(heads, -1, len(whole))  # [h k d]
        module: Any = its.model
        if kind == "native-pre":
            name = NAMES["native"][place[0]].format(place[1], "mixing")
            alpha = module.get_submodule(name).alpha.detach()  # mixed[i] = Σ_j alpha[i, j] context[j]
            return sum((alpha[i, head] * blocks[i] for i in range(heads)), torch.zeros_like(blocks[0]))
        return blocks[head]
    groups = 2 if kind == "llama" and part else heads
    return whole.reshape(groups, -1, whole.shape[1])[head * groups // heads]


def capture_example(its: Checkpoint, one: Example) -> dict[SiteLayer, dict[str, Tensor]]:
    """Weights, values (one per head) and contexts of one sentence."""
    with torch.no_grad(), capture(its.model, ("weights", "value", "context")) as found:
        one.logits(its)
    return {
        place: {name: tensor[0] for name, tensor in found[place].items()}
        for place in its.layout
        if place in found.calls
    }


def contributions(
    kind: str, its: Checkpoint, place: SiteLayer, head: int, seen: dict[str, Tensor]
) -> Iterator[tuple[float, float]]:
    """Of every query: Σ_s ‖w f(x_s)‖ and ‖Σ_s w f(x_s)‖."""
    slice_ = head_slice(kind, its, place, 3, head)
    for weights in seen["weights"][head]:
        parts = [w * (value @ slice_) for w, value in zip(weights, seen["value"][head], strict=True)]
        yield sum(part.norm().item() for part in parts), sum(parts, torch.zeros(())).norm().item()


FINAL = {
    "gpt2": "transformer.ln_f",
    "llama": "model.norm",
    "t5": "decoder.final_layer_norm",
    "native-pre": "decoder.norm",
}


def unembedding(kind: str, its: Checkpoint) -> Tensor:
    """W_U [V d]."""
    model: Any = its.model
    if kind.startswith("native"):
        weight: Tensor = model.output.weight @ model.before_output.weight
        return weight.detach()
    return model.lm_head.weight.detach()


def direct(kind: str, its: Checkpoint, one: Example, place: SiteLayer, head: int) -> float:
    """Σ over labels of LN(o_h) · (W_U[y] − mean W_U), LN written out with its scale taken from the pass."""
    model: Any = its.model
    states: list[Tensor] = []
    norm = model.get_submodule(FINAL[kind])
    hook = norm.register_forward_hook(lambda module, inputs, output: states.append(inputs[0][0].detach()))
    seen = capture_example(its, one)
    hook.remove()
    unembed, total = unembedding(kind, its), 0.0
    for place_, label in one.labels.items():
        written = seen[place]["context"][head, place_] @ head_slice(kind, its, place, 3, head)
        x = states[0][place_]
        if kind in ("llama", "t5"):
            epsilon = norm.variance_epsilon
            y = written / (x.square().mean() + epsilon).sqrt() * norm.weight.detach()
        else:
            y = (written - written.mean()) / (x.var(unbiased=False) + norm.eps).sqrt() * norm.weight.detach()
        scale = 13**-0.5 if kind == "t5" else 1.0  # a T5 scales its last states by d^-0.5
        total += scale * (y @ (unembed[label] - unembed.mean(dim=0))).item()
    return total
