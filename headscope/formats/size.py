"""How large a checkpoint is: parameters, bytes, floating point operations of a pass, and its cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.forward import ModelInputs, outputs
from headscope.model.interface import through_attend
from headscope.model.native.transformer import Transformer
from headscope.model.taps import frozen_parameters


@dataclass(frozen=True)
class Size:
    """How large a model is. `flops` are those of one forward pass over the text that was compared on.

    `cache` are bytes of keys and values for each token of the decoder's own text, `cross_cache` for each token
    of the source. `attention_flops` and `output_flops` are those within attention modules and the output layer,
    `read` the bytes of weights that a step of decoding reads: all but rows of an embedding that is no output layer.
    """

    parameters: int
    attention_heads: int
    bytes: int
    flops: int
    cache: int
    cross_cache: int
    attention_flops: int = 0
    output_flops: int = 0
    read: int = 0


def size(checkpoint: Checkpoint, feeds: Sequence[ModelInputs]) -> Size:
    """Count what a model has, and what it does with `feeds`."""
    model = checkpoint.model
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    own, cross = _cache(checkpoint)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    rows, layer = _embedding(model, "get_input_embeddings"), _embedding(model, "get_output_embeddings")
    table, read = getattr(rows, "weight", None), weights
    if isinstance(table, Tensor) and layer is not None and getattr(layer, "weight", None) is not table:
        read -= table.numel() * table.element_size()  # of which a step reads rows only
    counts = sum((flops(checkpoint, batch) for batch in feeds), Counter[str]())
    return Size(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        attention_heads=sum(checkpoint.layout.values()),
        bytes=weights,
        flops=counts["all"],
        cache=own,
        cross_cache=cross,
        attention_flops=counts["attention"],
        output_flops=counts["output"],
        read=read,
    )


def flops(checkpoint: Checkpoint, batch: ModelInputs) -> Counter[str]:
    """Floating point operations of the matrix products of one forward pass, two for a multiplication and addition.

    Those of "all", within "attention" modules, and of the "output" layer.
    """
    model = checkpoint.model
    output, counter = _embedding(model, "get_output_embeddings"), FlopCounterMode(display=False)
    with through_attend(model), frozen_parameters(model), counter:  # the counter follows gradients of what modules get
        outputs(model, batch)
    by_module, found = counter.get_flop_counts(), Counter(all=int(counter.get_total_flops()))
    for name, part in model.named_modules():
        kind = "attention" if id(part) in checkpoint.attention_sites.calls else "output" if part is output else ""
        if kind:
            found[kind] += sum(by_module.get(f"{type(model).__name__}.{name}", {}).values())
    return found


def _embedding(model: nn.Module, getter: str) -> nn.Module | None:
    """The input embedding or the output layer of a model; None where it has no such."""
    if isinstance(model, Transformer):
        return model.output if getter == "get_output_embeddings" else None
    try:
        found: nn.Module | None = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found


def _cache(checkpoint: Checkpoint) -> tuple[int, int]:
    """Bytes of keys and values per token: of self attention in the decoder, of attention to the encoder."""
    width = torch.tensor([], dtype=checkpoint.dtype).element_size()
    sums = dict.fromkeys(Site, 0)
    if isinstance(checkpoint.model, Transformer):
        for site, _, _, module in checkpoint.model.attention_modules():
            sums[site] += module.heads * (module.d_head + module.d_value) * width
    else:
        for attention_site in checkpoint.attention_sites.order:  # a layer without heads keeps one stand-in in the cache
            sums[attention_site.site] += max(attention_site.groups, 1) * 2 * attention_site.width * width
    return sums[Site.DECODER_SELF], sums[Site.CROSS]
