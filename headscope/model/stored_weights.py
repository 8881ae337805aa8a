"""The weights of a model as they are stored: offloaded and quantised ones, their types, their number and sha256.

accelerate keeps the weights of an offloaded module in the memory of the CPU or on disk until the module runs;
bitsandbytes and torchao store weights in 4 or 8 bits. `StoredWeight.load` returns such a weight as a matrix, on the
device where its module runs, and keeps nothing, so that reading a model layer by layer takes the memory of one layer.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headscope.model.interface import is_linear, watch_modules

PACKING = "support_avx512bf16_for_cpu"  # whether bitsandbytes packs 4-bit weights, which no gradient goes through
HALF = 2  # bytes of the smallest type that a plain matrix is stored in
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class StoredWeight:
    """The weight matrix of a module that is offloaded or quantised."""

    module: nn.Module

    def load(self) -> Tensor:
        """The matrix [out in], or [in out] of a Conv1D; in float32 if it is quantised."""
        with in_place(self.module):
            weight: Any = self.module.get_parameter("weight")
            match quantised_by(self.module):
                case "bitsandbytes":
                    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

                    weight = dequantize_bnb_weight(weight, state=getattr(self.module, "state", None)).float()
                case "torchao":
                    weight = weight.dequantize().float()
            return weight.detach()


def written_type(name: str, tensor: Tensor, stored_dtype_of: Callable[[str], torch.dtype | None]) -> torch.dtype:
    """The type to write a tensor of a model in: the file's narrower type if the tensor was widened on loading."""
    stored_dtype = stored_dtype_of(name) if tensor.is_floating_point() else None
    narrower = stored_dtype is not None and torch.promote_types(tensor.dtype, stored_dtype) == tensor.dtype
    return stored_dtype if stored_dtype is not None and narrower else tensor.dtype


def copy_sharing_weights(model: M) -> M:
    """A copy of a model whose weights lie in the memory of the model's, each until it is replaced in one of them."""
    shared = {id(weight): nn.Parameter(weight.detach(), weight.requires_grad) for weight in model.parameters()}
    return copy.deepcopy(model, memo=shared)


def round_weights(model: nn.Module, stored_dtype_of: Callable[[str], torch.dtype | None]) -> set[torch.dtype]:
    """Round a model's weights to the types that they are written in; return the types of weights that changed.

    Other models that share a weight keep it as it is.
    """
    changed_types = set()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            dtype = written_type(name, weight, stored_dtype_of)
            if weight.is_meta:
                continue  # an offloaded weight, which nothing has changed
            narrow_weight = weight.to(dtype).to(weight.dtype)
            if not torch.equal(narrow_weight, weight):
                weight.data = narrow_weight
                changed_types.add(dtype)
    return changed_types


def rounding_note(types: Iterable[torch.dtype]) -> str:
    """A remark on rounded weights."""
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
    return f"weights that changed are rounded to {names}, as the checkpoint stores them"


def is_packing(model: nn.Module) -> bool:
    """Whether a model on the CPU has 4-bit weights that are packed when they run, without gradients."""
    return any(
        getattr(module, PACKING, False) and module.get_parameter("weight").device.type == "cpu"
        for module in model.modules()
    )


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps a module's own weights elsewhere until it runs."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ()))) and any(
        values.is_meta for values in module.parameters(recurse=False)
    )


def in_place(module: nn.Module) -> AbstractContextManager[None]:
    """Within the block a module's own weights are on the device where it runs; tensors read there stay valid."""
    if not is_offloaded(module):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def quantised_by(module: nn.Module) -> str | None:
    """The quantisation of a linear layer's weight matrix. Returns None for a plain matrix."""
    weight: Any = getattr(module, "weight", None)
    kind = type(weight).__name__
    if kind in ("Params4bit", "Int8Params"):
        return "bitsandbytes"
    if isinstance(weight, Tensor) and "torchao" in type(weight).__module__:
        return "torchao"
    if not is_linear(module) and any(hasattr(module, name) for name in ("qweight", "w_packed")):
        return type(module).__name__
    if is_linear(module):
        plain = isinstance(weight, Tensor) and weight.is_floating_point() and weight.element_size() >= HALF
        return None if plain else type(module).__name__
    return None


def is_plain(module: nn.Module) -> bool:
    """Whether a module's weight is neither offloaded nor quantised."""
    return not is_offloaded(module) and quantised_by(module) is None


def readable(module: nn.Module) -> bool:
    """Whether `matrix_of` can read the weight matrix of a linear layer."""
    return quantised_by(module) in (None, "bitsandbytes", "torchao")


def matrix_of(module: nn.Module) -> Tensor:
    """The weight matrix of a module, loaded and dequantised if necessary."""
    if is_plain(module):
        return module.get_parameter("weight").detach()
    return StoredWeight(module).load()


def why_not_changed(model: nn.Module) -> str | None:
    """Why the weights of a model can be read and not changed. Returns None if they can be."""
    for module in model.modules():
        if (method := quantised_by(module)) is not None:
            return f"its weights are quantised ({method})"
    return "parts of it are offloaded" if any(is_offloaded(module) for module in model.modules()) else None


def execution_device(model: nn.Module) -> torch.device:
    """The device of a model's inputs: where accelerate runs its first module, else that of its first weight."""
    for module in model.modules():
        device = getattr(vars(module).get("_hf_hook"), "execution_device", None)  # getattr on modules is slow
        if device is not None:
            return torch.device(device)
    return next(model.parameters()).device


def computing_dtype(model: nn.Module) -> torch.dtype:
    """The type of the weights that are not quantised."""
    types = (parameter.dtype for parameter in model.parameters())
    return next((dtype for dtype in types if dtype.is_floating_point and dtype.itemsize >= HALF), torch.float32)


def without_saved_tensors() -> AbstractContextManager[None]:
    """Within the block autograd graphs are recorded without the tensors that a backward pass would need."""

    def unpack(_: None) -> Tensor:
        raise RuntimeError("this graph was recorded for its structure; it has no tensors for a backward pass")

    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, unpack)


class Marked(torch.autograd.Function):
    """The identity, whose node in the autograd graph names the `module` that computed the values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, module: nn.Module) -> Tensor:
        """Values as they are."""
        ctx.module = module
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Gradients as they are."""
        return gradients[0], None


def marked_products(model: nn.Module) -> AbstractContextManager[None]:
    """Within the block autograd graphs start at the outputs of offloaded or quantised linear layers (`Marked`)."""
    linear = filter(is_linear, model.modules())
    return watch_modules(
        [module for module in linear if readable(module) and not is_plain(module)],
        lambda module, _, output: Marked.apply(output.detach().requires_grad_(), module),  # type: ignore[no-untyped-call]
    )


def marked_module(node: Any) -> nn.Module | None:
    """The module of a `Marked` node of the autograd graph; None for other nodes."""
    return getattr(node, "module", None) if type(node).__name__ == "MarkedBackward" else None


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Parameters by kind of part: embeddings, attention, normalisation, feed-forward and other; then all."""
    parts: Counter[str] = Counter()
    attention = {
        id(module)
        for module in model.modules()
        if "attention" in type(module).__name__.lower() or "attn" in type(module).__name__.lower()
    }
    counted_ids: set[int] = set()
    inside: set[str] = set()
    for name, module in model.named_modules():
        if id(module) in attention:
            inside.add(name)
        is_inside = any(name == outer or name.startswith(f"{outer}.") for outer in inside)
        kind = "attention" if is_inside else "feed-forward and other"
        if isinstance(module, nn.Embedding) or "embedding" in type(module).__name__.lower():
            kind = "embeddings"
        elif "norm" in type(module).__name__.lower():
            kind = "normalisation"
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in counted_ids:
                counted_ids.add(id(parameter))
                parts[kind] += parameter.numel()
    return {**dict(sorted(parts.items())), "total": sum(parts.values())}


def weights_digest(model: nn.Module) -> str:
    """sha256 over the class of a model and the names, types, shapes and bytes of its parameters and buffers."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
