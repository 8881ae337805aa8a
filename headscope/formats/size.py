"""The size of a checkpoint: parameters, bytes, floating point operations of a pass, and its cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.forward import ModelInputs, outputs
from headscope.model.interface import through_attend
from headscope.model.native.transformer import Transformer
from headscope.model.stored_weights import parameters_by_part, written_type
from headscope.model.taps import frozen_parameters


@dataclass(frozen=True)
class Size:
    """The size of a model; `flops` of one forward pass over the text of the comparison.

    `bytes`: of the weights as written. `cache`, `cross_cache`: bytes of keys and values per token of the decoder's text
    and of the source. `read`: bytes of weights that a decoding step reads, without a table of embeddings alone.
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
    attention_parameters: int = 0


def measure_size(checkpoint: Checkpoint, feeds: Sequence[ModelInputs]) -> Size:
    """The size of a model, with the floating point operations of passes over `feeds`."""
    model = checkpoint.model
    state = model.state_dict()
    tensors = [pair for pair in (*model.named_parameters(), *model.named_buffers()) if pair[0] in state]
    self_cache, cross = cache_bytes(checkpoint)
    weights = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    rows, layer = _embedding(model, "get_input_embeddings"), _embedding(model, "get_output_embeddings")
    table, read = getattr(rows, "weight", None), weights
    if isinstance(table, Tensor) and layer is not None and getattr(layer, "weight", None) is not table:
        read -= table.numel() * table.element_size()  # a step reads only the rows of its tokens
    counts = sum((count_flops(checkpoint, batch) for batch in feeds), Counter[str]())
    return Size(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        attention_heads=sum(checkpoint.layout.values()),
        bytes=sum(
            tensor.numel() * written_type(name, tensor, checkpoint.stored_dtype).itemsize for name, tensor in tensors
        ),
        flops=counts["all"],
        cache=self_cache,
        cross_cache=cross,
        attention_flops=counts["attention"],
        output_flops=counts["output"],
        read=read,
        attention_parameters=parameters_by_part(model).get("attention", 0),
    )


def count_flops(
    checkpoint: Checkpoint, batch: ModelInputs, parts: Mapping[str, Collection[nn.Module]] = {}
) -> Counter[str]:
    """Floating point operations of the matrix products of one pass: "all", "attention", "output", and by part.

    A multiplication with its addition counts as two. `parts` are modules of the model by the name of their part.
    """
    model, output = checkpoint.model, _embedding(checkpoint.model, "get_output_embeddings")
    counts = Counter[str]()
    kinds = {"attention": checkpoint.attention_sites.calls, "output": {id(output)}}
    kinds |= {name: set(map(id, modules)) for name, modules in parts.items()}

    def count(kind: str, sign: int, *_: Any) -> None:
        counts[kind] += sign * counts["all"]

    with ExitStack() as stack, through_attend(model), frozen_parameters(model), _MatrixProducts(counts):
        for part in model.modules():
            for kind in (kind for kind, ids in kinds.items() if id(part) in ids):
                stack.enter_context(part.register_forward_pre_hook(partial(count, kind, -1)))
                stack.enter_context(part.register_forward_hook(partial(count, kind, 1)))
        outputs(model, batch)
    return counts


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


class _MatrixProducts(TorchDispatchMode):
    """Adds up operations as torch's `FlopCounterMode`, without its cost: that tries to decompose all other operations.

    Products of matrices are not computed, as only their shapes count: the next layer gets zeros.
    """

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in PRODUCTS:
            *_, left, right = args
            result = left.new_zeros((*left.shape[:-1], right.shape[-1]))
        else:
            result = func(*args, **kwargs)
        if count := flop_registry.get(func.overloadpacket):
            self.counts["all"] += count(*args, **kwargs, out_val=result)
        return result


def _embedding(model: nn.Module, getter: str) -> nn.Module | None:
    if isinstance(model, Transformer):
        return model.output if getter == "get_output_embeddings" else model.decoder.embeddings.tokens
    try:
        module: nn.Module | None = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return module


def cache_bytes(checkpoint: Checkpoint) -> tuple[int, int]:
    """Bytes of keys and values per token: of the decoder's self attention, and of cross attention."""
    width = torch.tensor([], dtype=checkpoint.dtype).element_size()
    sums = dict.fromkeys(Site, 0)
    if isinstance(checkpoint.model, Transformer):
        for site, _, _, module in checkpoint.model.attention_modules():
            sums[site] += module.heads * (module.d_head + module.d_value) * width
    else:
        for attention_site in checkpoint.attention_sites.order:  # a layer without heads caches one stand-in head
            sums[attention_site.site] += max(attention_site.groups, 1) * 2 * attention_site.width * width
    return sums[Site.DECODER_SELF], sums[Site.CROSS]
