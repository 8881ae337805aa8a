"""Measure a model without whole layers, to compare with the removal of heads.

The influence of a layer is 1 − E cos(x, y) over tokens, with its input x [d] and its output y [d] (Men et al. 2024);
layers of least influence are skipped. headscope does not write models without layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attribution.residual_stream import seen_states
from headscope.data.corpus import Corpus
from headscope.evaluation.before_after import QualityTask, value_after
from headscope.formats.base import Checkpoint
from headscope.formats.size import count_flops
from headscope.heads import Site
from headscope.model.discovery import eval_mode
from headscope.model.forward import ModelInputs
from headscope.model.interface import watch_modules
from headscope.model.prefix_cache import LayerIndex, index_layers
from headscope.model.stored_weights import copy_sharing_weights
from headscope.model.streaming import streaming
from headscope.pruning.closed_form.anchors import cap_corpus
from headscope.pruning.closed_form.moments import text_batches

SUBWORDS = 1000
"""Subwords on which the influence of layers is measured: three times as many order the first layers nearly the same."""
Layer = tuple[int, int]
"""The number of a stack (the encoder before the decoder), and the number of the layer in it."""


@dataclass(frozen=True)
class WholeLayers:
    """The metric on both texts without some layers; their names, parameters, and shares of FLOPs and of the cache."""

    layers: tuple[str, ...]
    parameters: int
    flops: float
    cache: float
    quality: float
    elsewhere: float | None


def measure_whole_layers(
    checkpoint: Checkpoint, corpus: Corpus, parameters: int, questions: Sequence[QualityTask], feed: ModelInputs
) -> WholeLayers | None:
    """Quality without the layers of least influence on a text that have at least `parameters` parameters together.

    FLOPs are those of a pass over `feed`. None where layers cannot be found or skipped, where an encoder or decoder
    would have none left, and for metrics of translations, whose search keeps states of every layer.
    """
    layer_index = index_layers(checkpoint.model)
    if layer_index is None or any(question.metric.reads == "translations" for question in questions):
        return None
    modules = {rank[:2]: layer for rank, layer in layer_index.layers}
    influence = layer_influence(checkpoint, cap_corpus(checkpoint, corpus, positions=SUBWORDS), layer_index)
    skipped, n_parameters = list[Layer](), 0
    for layer in sorted(influence, key=influence.__getitem__):
        remaining = [other for other in modules if other[0] == layer[0] and other not in skipped]
        if n_parameters < parameters and len(remaining) > 1:
            skipped.append(layer)
            n_parameters += sum(weights.numel() for weights in modules[layer].parameters())
    if not skipped or n_parameters < parameters:
        return None
    with_cache = {entry.rank[:2] for (site, _), entry in layer_index.of.items() if site is Site.DECODER_SELF}
    smaller = checkpoint.with_model(skip_layers(checkpoint.model, layer_index, skipped))
    quality, *other_values = [value_after(smaller, question) for question in questions]
    stacks = ("encoder", "decoder") if len({stack for stack, _ in modules}) > 1 else ("",)
    counts = count_flops(checkpoint, feed, {"layers": [modules[layer] for layer in skipped]})
    return WholeLayers(
        layers=tuple(f"{stacks[stack]} {number}".strip() for stack, number in sorted(skipped)),
        parameters=n_parameters,
        flops=counts["layers"] / counts["all"],
        cache=len(with_cache.intersection(skipped)) / max(len(with_cache), 1),
        quality=quality,
        elsewhere=next(iter(other_values), None),
    )


def layer_influence(checkpoint: Checkpoint, corpus: Corpus, layer_index: LayerIndex) -> dict[Layer, float]:
    """1 − E cos of the input and output [b t d] of every layer, over tokens; of layers that only return states."""
    total, tokens = defaultdict[Layer, float](float), defaultdict[Layer, float](float)
    sites = {entry.rank[:2]: site for (site, _), entry in layer_index.of.items()}
    inputs = dict[nn.Module, Tensor]()
    modules = {rank[:2]: module for rank, module in layer_index.layers if rank[:2] in sites}

    def compare(layer: Layer, _: Any, output: Any) -> None:
        x, side = inputs.pop(modules[layer], None), batch.sides(sites[layer])[0]
        y, *further_outputs = output if isinstance(output, tuple) else (output,)
        returns_more = not isinstance(y, Tensor) or any(part is not None for part in further_outputs)
        if x is None or returns_more or x.shape[:-1] != side.real.shape:
            return
        cosine = torch.cosine_similarity(x.double(), y.double(), dim=-1).cpu()  # [b t]
        total[layer] += float((1 - cosine)[side.real].sum())
        tokens[layer] += int(side.real.sum())

    recorded_inputs = seen_states(modules.values(), lambda module, states: inputs.update({module: states}))
    with torch.no_grad(), eval_mode(checkpoint.model), streaming(), recorded_inputs, watch_modules(modules, compare):
        for batch in text_batches(checkpoint, corpus, None):
            checkpoint.forward(batch.to(checkpoint.device))
    return {layer: total[layer] / tokens[layer] for layer in tokens}


def skip_layers(model: nn.Module, layer_index: LayerIndex, layers: Collection[Layer]) -> nn.Module:
    """A model with the same weights in which some layers return their input."""
    names = {id(module): name for name, module in model.named_modules()}
    smaller = copy_sharing_weights(model)

    def return_input(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
        states = args[0] if args else options["hidden_states"]
        return (states, *output[1:]) if isinstance(output, tuple) else states

    for rank, module in layer_index.layers:
        if rank[:2] in layers:
            smaller.get_submodule(names[id(module)]).register_forward_hook(return_input, with_kwargs=True)
    return smaller
