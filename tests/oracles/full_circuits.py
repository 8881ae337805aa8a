"""Circuits of heads written out in full: V × V and d × d matrices, from weights by their names (decoders.md §5)."""

import numpy as np
import torch
from torch import Tensor

from headscope.formats.base import Checkpoint
from headscope.heads import Site
from tests.oracles import head_outputs
from tests.oracles.head_outputs import FINAL, head_slice

BEFORE = {
    "gpt2": "transformer.h.{}.ln_1",
    "llama": "model.layers.{}.input_layernorm",
    "t5": "decoder.block.{}.layer.0.layer_norm",
    "native-pre": "decoder.layers.{}.self_attention_norm",
}
TABLE = {
    "gpt2": "transformer.wte",
    "llama": "model.embed_tokens",
    "t5": "shared",
    "native-pre": "decoder.embeddings.tokens",
}
CENTRED = ("gpt2", "native-pre")


def centring(kind: str, d: int) -> Tensor:
    """The matrix that subtracts the mean of a row, where the norms of a model do."""
    return torch.eye(d).double() - (1 / d if kind in CENTRED else 0)


def matrices(kind: str, checkpoint: Checkpoint, layer: int, head: int) -> dict[str, Tensor]:
    """W_Q, W_K, W_V [d k] with the norm folded in, and W_O [k d]."""
    gain = checkpoint.model.get_parameter(f"{BEFORE[kind].format(layer)}.weight").detach()
    site_layer = (Site.DECODER_SELF, layer)
    fold = centring(kind, len(gain)) @ torch.diag(gain)
    names = dict(enumerate(("q", "k", "v")))
    projections = {name: fold @ head_slice(kind, checkpoint, site_layer, part, head).T for part, name in names.items()}
    return projections | {"o": head_slice(kind, checkpoint, site_layer, 3, head)}


def embedding(kind: str, checkpoint: Checkpoint) -> Tensor:
    """W_E [V d]."""
    table = checkpoint.model.get_parameter(f"{TABLE[kind]}.weight").detach()
    return table * (table.shape[1] ** 0.5 if kind == "native-pre" else 1)


def unembedding(kind: str, checkpoint: Checkpoint) -> Tensor:
    """W_U [d V], the last norm folded in."""
    gain = checkpoint.model.get_parameter(f"{FINAL[kind]}.weight").detach()
    scale = len(gain) ** -0.5 if kind == "t5" else 1.0
    return centring(kind, len(gain)) @ torch.diag(gain) @ head_outputs.unembedding(kind, checkpoint).T * scale


def copying(kind: str, checkpoint: Checkpoint, layer: int, head: int) -> float:
    """Re Σλ / Σ|λ| of the V × V circuit."""
    weights = matrices(kind, checkpoint, layer, head)
    circuit = embedding(kind, checkpoint) @ weights["v"] @ weights["o"] @ unembedding(kind, checkpoint)
    values = np.linalg.eigvals(circuit.numpy())
    return float(values.real.sum() / np.abs(values).sum())


def composition(
    kind: str, checkpoint: Checkpoint, earlier: tuple[int, int], later: tuple[int, int], side: str
) -> dict[str, float]:
    """Score, highest score and size of the stream of one pair of heads, from d × d matrices."""
    first, second = matrices(kind, checkpoint, *earlier), matrices(kind, checkpoint, *later)
    d = len(first["v"])
    output = first["v"] @ first["o"] @ centring(kind, d)
    qk = second["q"] @ second["k"].T
    reader = {"q": qk, "k": qk.T, "v": second["v"] @ second["o"] @ centring(kind, d)}[side]
    size = output.norm() * reader.norm()
    singular = [torch.linalg.svdvals(matrix) for matrix in (output, reader)]
    highest = (singular[0] * singular[1]).square().sum().sqrt() / size
    return {
        "score": float((output @ reader).norm() / size),
        "highest": float(highest),
        "baseline": (d - (kind in CENTRED)) ** -0.5,
    }


FIRST = {
    "gpt2": ("transformer.h.0.ln_2", "transformer.h.0.mlp", ("transformer.h.0.attn.c_proj.bias",)),
    "llama": ("model.layers.0.post_attention_layernorm", "model.layers.0.mlp", ()),
    "t5": ("decoder.block.0.layer.2.layer_norm", "decoder.block.0.layer.2.DenseReluDense", ()),
    "native-pre": (
        "decoder.layers.0.ffn_norm",
        "decoder.layers.0.ffn",
        ("decoder.layers.0.self_attention.output.bias", "decoder.layers.0.cross_attention.output.bias"),
    ),
}


def after_first_layer(kind: str, checkpoint: Checkpoint) -> Tensor:
    """E' [V d]: embeddings, what the closed heads of the first layer leave (their biases), its feed-forward network."""
    norm, network, biases = FIRST[kind]
    x = embedding(kind, checkpoint) + sum(checkpoint.model.get_parameter(name).detach() for name in biases)
    with torch.no_grad():
        states: Tensor = x + checkpoint.model.get_submodule(network)(checkpoint.model.get_submodule(norm)(x))
    return states


def ov_logits(kind: str, checkpoint: Checkpoint, layer: int, head: int) -> Tensor:
    """E' W_V W_O W_U [V V] of a head, E W_V W_O W_U in the first layer."""
    weights = matrices(kind, checkpoint, layer, head)
    states = embedding(kind, checkpoint) if layer == 0 else after_first_layer(kind, checkpoint)
    return states @ weights["v"] @ weights["o"] @ unembedding(kind, checkpoint)


def directions(kind: str, checkpoint: Checkpoint, layer: int, head: int, circuit: str) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [V d] of what is read, singular values [d], and scores [V d] of what is written (`ov`) or read by keys.

    From the d × d matrix; less the mean over the vocabulary.
    """
    weights = matrices(kind, checkpoint, layer, head)
    product = weights["v"] @ weights["o"] if circuit == "ov" else weights["q"] @ weights["k"].T
    left, sizes, right = torch.linalg.svd(product)
    table = embedding(kind, checkpoint)
    write_scores = (right @ unembedding(kind, checkpoint)).T if circuit == "ov" else table @ right.T
    read_scores = table @ left
    return read_scores - read_scores.mean(dim=0), sizes, write_scores - write_scores.mean(dim=0)
