"""Whole layers in the place of heads: what a model is without those that turn its residual stream least.

The influence of a layer is 1 − E cos(x, y) over tokens, x [d] being what it reads and y [d] what it puts out (Men et
al. 2024). Layers are passed over only to compare; headscope takes none out.
"""

from __future__ import annotations

import copy
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
from headscope.formats.size import flops
from headscope.heads import Site
from headscope.model.discovery import eval_mode
from headscope.model.forward import ModelInputs
from headscope.model.interface import watch_modules
from headscope.model.prefix_cache import LayerIndex, index_layers
from headscope.model.streaming import streaming
from headscope.pruning.closed_form.damage import MAX_SENTENCES
from headscope.pruning.closed_form.moments import text_batches

Layer = tuple[int, int]
"""The number of a stack (the encoder's before the decoder's), and that of the layer in it."""


@dataclass(frozen=True)
class WholeLayers:
    """The metric on both texts without some layers: their names, parameters, and shares of FLOPs and of the cache."""

    layers: tuple[str, ...]
    parameters: int
    flops: float
    cache: float
    quality: float
    elsewhere: float | None


def measure_whole_layers(
    checkpoint: Checkpoint, corpus: Corpus, parameters: int, questions: Sequence[QualityTask], feed: ModelInputs
) -> WholeLayers | None:
    """Quality without the layers of least influence on a text that have at least so many `parameters` together.

    Their FLOPs are those of a pass over `feed`, and what could be saved in time.
    None where layers cannot be told or passed over, where none of an encoder's or decoder's would be left, and where
    searches for translations are asked for, which keep states of every layer.
    """
    layer_index = index_layers(checkpoint.model)
    if layer_index is None or any(question.metric.reads == "translations" for question in questions):
        return None
    modules = {rank[:2]: layer for rank, layer in layer_index.layers}
    influence = layer_influence(checkpoint, corpus.first(MAX_SENTENCES), layer_index)
    layers_gone, n_parameters = list[Layer](), 0
    for layer in sorted(influence, key=influence.__getitem__):
        layers_left = [other for other in modules if other[0] == layer[0] and other not in layers_gone]
        if n_parameters < parameters and len(layers_left) > 1:
            layers_gone.append(layer)
            n_parameters += sum(weights.numel() for weights in modules[layer].parameters())
    if not layers_gone or n_parameters < parameters:
        return None
    with_cache = {entry.rank[:2] for (site, _), entry in layer_index.of.items() if site is Site.DECODER_SELF}
    copy_without = checkpoint.with_model(passing_over(checkpoint.model, layer_index, layers_gone))
    quality, *other_changes = [value_after(copy_without, question) for question in questions]
    stacks = ("encoder", "decoder") if len({stack for stack, _ in modules}) > 1 else ("",)
    names = tuple(f"{stacks[stack]} {row}".strip() for stack, row in sorted(layers_gone))
    share = len(with_cache.intersection(layers_gone)) / max(len(with_cache), 1)
    counts = flops(checkpoint, feed, {"layers": [modules[layer] for layer in layers_gone]})
    return WholeLayers(
        names, n_parameters, counts["layers"] / counts["all"], share, quality, next(iter(other_changes), None)
    )


def layer_influence(checkpoint: Checkpoint, corpus: Corpus, layer_index: LayerIndex) -> dict[Layer, float]:
    """1 − E cos of what every layer reads and puts out [b t d], over real tokens; of layers that give states alone."""
    turning, tokens = defaultdict[Layer, float](float), defaultdict[Layer, float](float)
    texts = {entry.rank[:2]: site for (site, _), entry in layer_index.of.items()}
    inputs = dict[nn.Module, Tensor]()
    modules = {rank[:2]: module for rank, module in layer_index.layers if rank[:2] in texts}

    def compare(layer: Layer, _: Any, output: Any) -> None:
        before, side = inputs.pop(modules[layer], None), batch.sides(texts[layer])[0]
        after, *more = output if isinstance(output, tuple) else (output,)
        gives_more = not isinstance(after, Tensor) or any(part is not None for part in more)  # for layers above to read
        if before is None or gives_more or before.shape[:-1] != side.real.shape:
            return
        cosine = torch.cosine_similarity(before.double(), after.double(), dim=-1).cpu()  # [b t]
        turning[layer] += float((1 - cosine)[side.real].sum())
        tokens[layer] += int(side.real.sum())

    reading = seen_states(modules.values(), lambda module, states: inputs.update({module: states}))
    with torch.no_grad(), eval_mode(checkpoint.model), streaming(), reading, watch_modules(modules, compare):
        for batch in text_batches(checkpoint, corpus, None):
            checkpoint.forward(batch.to(checkpoint.device))
    return {layer: turning[layer] / tokens[layer] for layer in tokens}


def passing_over(model: nn.Module, layer_index: LayerIndex, layers: Collection[Layer]) -> nn.Module:
    """A model with the same weights in which some layers put out the states that they read."""
    names = {id(module): name for name, module in model.named_modules()}
    copy_without = copy.deepcopy(model, {id(weights): weights for weights in model.parameters()})

    def pass_over(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
        states = args[0] if args else options["hidden_states"]
        return (states, *output[1:]) if isinstance(output, tuple) else states

    for rank, module in layer_index.layers:
        if rank[:2] in layers:
            copy_without.get_submodule(names[id(module)]).register_forward_hook(pass_over, with_kwargs=True)
    return copy_without
