"""Removal of columns in closed form, the slow way: least squares over tokens, and contexts read off by hooks."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.data.corpus import Sentence
from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer
from headscope.pruning.closed_form.output_projections import OutputProjection, output_projections
from headscope.pruning.ranking.criterion import ScoringContext
from tests.oracles import speakers

Array = Any


def refit(inputs: Array, weight: Array, removed: Sequence[int], *, damping: float, affine: bool) -> tuple[Array, Array]:
    """V [d m] with zeros in `removed` and a shift [d] that leave the least mean ‖W x − V x − shift‖² + λ‖W − V‖².

    inputs [n m], weight [d m]. What λ takes of columns that are zero is a constant.
    """
    return refit_to(inputs, inputs @ weight.T, weight, removed, damping=damping, affine=affine)


def refit_to(
    inputs: Array, targets: Array, weight: Array, removed: Sequence[int], *, damping: float, affine: bool
) -> tuple[Array, Array]:
    """V [d m] with zeros in `removed` and a shift [d]: the least mean ‖y − V x − shift‖² + λ‖W_K − V_K‖².

    inputs [n m], targets y [n d], weight [d m]; one call of lstsq with a row for every token and every weight.
    """
    tokens, columns = inputs.shape
    kept = [column for column in range(columns) if column not in removed]
    ones = np.ones((tokens, 1)) if affine else np.zeros((tokens, 0))
    ridge = np.sqrt(damping) * np.eye(len(kept))
    rows = np.concatenate([np.concatenate([inputs[:, kept], ones], 1) / np.sqrt(tokens), _padded(ridge, ones)])
    goals = np.concatenate([targets / np.sqrt(tokens), ridge @ weight[:, kept].T])
    solution = np.linalg.lstsq(rows, goals, rcond=None)[0]
    new_weight = np.zeros_like(weight)
    new_weight[:, kept] = solution[: len(kept)].T
    return new_weight, solution[len(kept) :].sum(axis=0)


def _padded(rows: Array, ones: Array) -> Array:
    return np.concatenate([rows, np.zeros((len(rows), ones.shape[1]))], 1)


def error(inputs: Array, weight: Array, other: Array, shift: Array, fisher: Array | None = None) -> float:
    """Mean over tokens of eᵀ F e, e = W x − V x − shift."""
    total = 0.0
    for x in inputs:
        e = weight @ x - other @ x - shift
        total += e @ e if fisher is None else e @ fisher @ e
    return total / len(inputs)


def best_sets(
    inputs: Array, weight: Array, blocks: Sequence[Sequence[int]], *, damping: float, affine: bool
) -> list[float]:
    """The least damped error of removing 1, 2, … blocks, by trying all sets of each size."""
    rows = inputs - inputs.mean(axis=0) if affine else inputs
    least_errors = []
    for size in range(1, len(blocks) + 1):
        errors = []
        for subset in combinations(blocks, size):
            removed = [column for block in subset for column in block]
            other, shift = refit(inputs, weight, removed, damping=damping, affine=affine)
            difference = weight - other
            errors.append(error(rows, weight, other, 0 * shift) + damping * (difference * difference).sum())
        least_errors.append(min(errors))
    return least_errors


OUTPUTS = re.compile(
    r"(attention\.output\.dense|attn\.(c_proj|o_proj|out_proj)|Attention\.o|(self|cross)_attention\.output)$"
)
CROSS = ("encoder_attn", "EncDecAttention", "cross_attention")


@dataclass
class Records:
    """Tensors at the output projection of each (site, layer): inputs [n m], gradients of its outputs [n d]."""

    inputs: dict[SiteLayer, list[Array]] = field(default_factory=dict)
    outputs: list[tuple[SiteLayer, Tensor]] = field(default_factory=list)
    gradients: dict[SiteLayer, list[Array]] = field(default_factory=dict)


def site_layer_of(name: str, checkpoint: Checkpoint) -> SiteLayer:
    """The site and layer of a module, by its name."""
    number = re.search(r"\d+", name)
    assert number is not None
    if any(part in name for part in CROSS):
        return Site.CROSS, int(number[0])
    encoder = "encoder." in name if checkpoint.two_sided else not checkpoint.decodes
    return Site.ENCODER_SELF if encoder else Site.DECODER_SELF, int(number[0])


@contextmanager
def record_passes(checkpoint: Checkpoint) -> Iterator[Records]:
    """Record the inputs and outputs of every output projection within the block."""
    records, hooks = Records(), []
    for name, part in checkpoint.model.named_modules():
        if OUTPUTS.search(name):
            site_layer = site_layer_of(name, checkpoint)

            def hook(_: Any, inputs: Any, output: Tensor, site_layer: SiteLayer = site_layer) -> None:
                records.inputs.setdefault(site_layer, []).append(inputs[0].detach().double().numpy()[0])
                if output.requires_grad:
                    output.retain_grad()
                    records.outputs.append((site_layer, output))

            hooks.append(part.register_forward_hook(hook))
    try:
        yield records
    finally:
        for handle in hooks:
            handle.remove()


def contexts(kind: str, checkpoint: Checkpoint, sentences: Iterable[Sentence]) -> dict[SiteLayer, Array]:
    """Inputs [n m] of every output projection, sentence by sentence without padding."""
    with record_passes(checkpoint) as records:
        for sentence in sentences:
            speakers.make_example(kind, sentence, hide=False).logits(checkpoint)
    return {site_layer: np.concatenate(rows) for site_layer, rows in records.inputs.items()}


def output_gradients(
    kind: str, checkpoint: Checkpoint, sentences: Iterable[Sentence]
) -> tuple[dict[SiteLayer, Array], int]:
    """d loss / d output [n d] of every output projection, and the number of predictions."""
    predictions = 0
    with record_passes(checkpoint) as records:
        for sentence in sentences:
            example = speakers.make_example(kind, sentence)
            example.loss(checkpoint).backward()
            predictions += len(example.labels)
            for site_layer, output in records.outputs:
                assert output.grad is not None
                records.gradients.setdefault(site_layer, []).append(output.grad.double().numpy()[0])
            records.outputs.clear()
    checkpoint.model.zero_grad(set_to_none=True)
    return {site_layer: np.concatenate(rows) for site_layer, rows in records.gradients.items()}, predictions


AFTER_SUM = {
    "attention.output.dense": "attention.output.LayerNorm",
    "attn.c_proj": "ln_2",
    "self_attn.o_proj": "post_attention_layernorm",
    "attn.out_proj": "attn_layer_norm",
    "_attention.output": "_attention_norm",
    "0.SelfAttention.o": "1.layer_norm",
    "1.EncDecAttention.o": "2.layer_norm",
}
"""Output projections, and the norms that read what their outputs are added to, in models of these tests."""


def residual_sums(
    kind: str, checkpoint: Checkpoint, sentences: Iterable[Sentence]
) -> dict[SiteLayer, tuple[Array, Array]]:
    """The outputs of every output projection [n d], and what the norm after their addition reads [n d]."""
    parts = dict(checkpoint.model.named_modules())
    pairs: dict[SiteLayer, tuple[list[Array], list[Array]]] = {}
    hooks: list[Any] = []
    for name in parts:
        for ending, norm in AFTER_SUM.items():
            if OUTPUTS.search(name) and name.endswith(ending):
                owner, rows = name.removesuffix(ending), pairs.setdefault(site_layer_of(name, checkpoint), ([], []))
                hooks += [
                    parts[name].register_forward_hook(
                        lambda _, __, y, rows=rows[0]: rows.append(y[0].detach().numpy())
                    ),
                    parts[owner + norm].register_forward_pre_hook(
                        lambda _, x, rows=rows[1]: rows.append(x[0][0].numpy())
                    ),
                ]
    with torch.no_grad():
        for sentence in sentences:
            speakers.make_example(kind, sentence, hide=False).logits(checkpoint)
    for hook in hooks:  # not all hooks of the model: transformers installs its own once
        hook.remove()
    return {key: (np.concatenate(outputs), np.concatenate(sums)) for key, (outputs, sums) in pairs.items()}


def streams(kind: str, checkpoint: Checkpoint, sentences: Iterable[Sentence]) -> dict[SiteLayer, Array]:
    """The residual stream [n d] before every output projection's output is added: a norm's input minus that output."""
    pairs = residual_sums(kind, checkpoint, sentences)
    return {key: sums - outputs for key, (outputs, sums) in pairs.items()}


KINDS = ("bert", "llama", "t5", "marian", "native-post")


def context_of(kind: str, *, count: int = 11, **options: Any) -> ScoringContext:
    return ScoringContext(speakers.checkpoint(kind), speakers.corpus(kind, count=count), **options)


def measure_inputs(kind: str) -> tuple[dict[SiteLayer, Any], dict[SiteLayer, OutputProjection]]:
    """Inputs [n m] of every output projection that has heads, and the projection."""
    checkpoint = speakers.checkpoint(kind)
    rows = contexts(kind, checkpoint, speakers.corpus(kind))
    projections = {projection.site_layers[0]: projection for projection in output_projections(checkpoint)}
    return {site_layer: rows[site_layer] for site_layer in projections}, projections
