"""Output of each head and its direct effect on a logit, for one sentence: from weights by their names."""

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


def matrix(kind: str, checkpoint: Checkpoint, site_layer: SiteLayer, part: int) -> Tensor:
    """W_Q, W_K, W_V or W_O [outputs inputs] of one place."""
    family = kind.partition("-")[0]
    name = NAMES[family][site_layer[0]]
    model = checkpoint.model
    if family == "gpt2":
        if part == 3:
            return model.get_parameter(name.format(site_layer[1], "c_proj.weight")).detach().T
        return model.get_parameter(name.format(site_layer[1], "c_attn.weight")).detach().T.chunk(3)[part]
    return model.get_parameter(name.format(site_layer[1], f"{PARTS[family][part]}.weight")).detach()


def head_slice(kind: str, checkpoint: Checkpoint, site_layer: SiteLayer, part: int, head: int) -> Tensor:
    """A head's rows of W_Q, W_K, W_V (its group's for shared ones), or its columns of W_O, mixing folded in."""
    weight = matrix(kind, checkpoint, site_layer, part)
    heads = checkpoint.layout[site_layer]
    if part == 3:
        blocks = weight.T.reshape(heads, -1, len(weight))  # [h k d]
        module: Any = checkpoint.model
        if kind == "native-pre":
            name = NAMES["native"][site_layer[0]].format(site_layer[1], "mixing")
            alpha = module.get_submodule(name).alpha.detach()  # mixed[i] = Σ_j alpha[i, j] context[j]
            return sum((alpha[i, head] * blocks[i] for i in range(heads)), torch.zeros_like(blocks[0]))
        return blocks[head]
    groups = 2 if kind == "llama" and part else heads
    return weight.reshape(groups, -1, weight.shape[1])[head * groups // heads]


def capture_example(checkpoint: Checkpoint, example: Example) -> dict[SiteLayer, dict[str, Tensor]]:
    """Weights, values (one per head) and contexts of one sentence."""
    with torch.no_grad(), capture(checkpoint.model, ("weights", "value", "context")) as record:
        example.logits(checkpoint)
    return {
        site_layer: {name: tensor[0] for name, tensor in record[site_layer].items()}
        for site_layer in checkpoint.layout
        if site_layer in record.calls
    }


def contributions(
    kind: str, checkpoint: Checkpoint, site_layer: SiteLayer, head: int, tensors: dict[str, Tensor]
) -> Iterator[tuple[float, float]]:
    """Of every query: Σ_s ‖w f(x_s)‖ and ‖Σ_s w f(x_s)‖."""
    slice_ = head_slice(kind, checkpoint, site_layer, 3, head)
    for weights in tensors["weights"][head]:
        parts = [w * (value @ slice_) for w, value in zip(weights, tensors["value"][head], strict=True)]
        yield sum(part.norm().item() for part in parts), sum(parts, torch.zeros(())).norm().item()


FINAL = {
    "gpt2": "transformer.ln_f",
    "llama": "model.norm",
    "t5": "decoder.final_layer_norm",
    "native-pre": "decoder.norm",
}


def unembedding(kind: str, checkpoint: Checkpoint) -> Tensor:
    """W_U [V d]."""
    model: Any = checkpoint.model
    if kind.startswith("native"):
        weight: Tensor = model.output.weight @ model.before_output.weight
        return weight.detach()
    return model.lm_head.weight.detach()


def direct(kind: str, checkpoint: Checkpoint, example: Example, site_layer: SiteLayer, head: int) -> float:
    """Σ over labels of LN(o_h) · (W_U[y] − mean W_U), LN written out with its scale taken from the pass."""
    model: Any = checkpoint.model
    states: list[Tensor] = []
    norm = model.get_submodule(FINAL[kind])
    hook = norm.register_forward_hook(lambda module, inputs, output: states.append(inputs[0][0].detach()))
    tensors = capture_example(checkpoint, example)
    hook.remove()
    w_u, total = unembedding(kind, checkpoint), 0.0
    for position, label in example.labels.items():
        vector = tensors[site_layer]["context"][head, position] @ head_slice(kind, checkpoint, site_layer, 3, head)
        x = states[0][position]
        if kind in ("llama", "t5"):
            epsilon = norm.variance_epsilon
            y = vector / (x.square().mean() + epsilon).sqrt() * norm.weight.detach()
        else:
            y = (vector - vector.mean()) / (x.var(unbiased=False) + norm.eps).sqrt() * norm.weight.detach()
        scale = 13**-0.5 if kind == "t5" else 1.0  # a T5 scales its last states by d^-0.5
        total += scale * (y @ (w_u[label] - w_u.mean(dim=0))).item()
    return total
