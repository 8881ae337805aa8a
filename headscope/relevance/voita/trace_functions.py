"""Which torch functions and modules a trace recognises, and the kind of step of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Follows = Callable[[Any], bool]


@dataclass(frozen=True)
class Operation:
    """What a call computes: the kind of step, what undoing it needs, and its inputs (empty: all followed, in order)."""

    kind: Any
    detail: Any = None
    inputs: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class NormDetail:
    """The parameters of a layer norm (`centred`) or RMS norm over the last axis; `scale` None is one."""

    scale: Tensor | None
    bias: Tensor | None
    epsilon: float
    centred: bool = True


Recognise = Callable[[Follows, Any, Any, Tensor], Operation | None]


def _linear(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    x, weight, bias = (*args, *kwargs.values(), None)[:3]
    if not follows(x) or follows(weight) or follows(bias):
        return None
    return Operation("linear", (weight, bias), (x,))


def _addmm(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    if kwargs or len(args) != 3 or not follows(args[1]) or follows(args[0]) or follows(args[2]):
        return None
    return Operation("linear", (args[2].t(), args[0]), (args[1],))


def _matmul(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    left, right = args[:2]
    if follows(left) and not follows(right) and right.ndim == 2:
        return Operation("linear", (right.t(), None), (left,))
    if follows(right) and not follows(left) and left.ndim == 2 and right.ndim >= 2:
        return Operation("mix", left, (right,))
    return None


def _add(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    a, b = args[:2]
    if kwargs or not (follows(a) and follows(b)):
        return _by_constant(follows, args, kwargs, output)
    return Operation("add", None, (a, b)) if a.shape == b.shape else None


def _multiply(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    a, b = args[:2]
    if not (follows(a) and follows(b)):
        return _by_constant(follows, args, kwargs, output)
    return Operation("product", None, (a, b)) if a.shape == b.shape == output.shape else None


def _by_constant(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    """A followed tensor and constants, element by element: relevance stays where it is."""
    followed = [value for value in args if follows(value)]
    fits = len(followed) == 1 and followed[0].shape == output.shape
    return Operation("same", None, tuple(followed)) if fits else None


def _division(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    return None if follows(args[1]) else _by_constant(follows, args, kwargs, output)


def _layer_norm(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    arguments = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), args, strict=False)) | kwargs
    if len(arguments["normalized_shape"]) != 1:
        return None
    norm = NormDetail(arguments.get("weight"), arguments.get("bias"), arguments.get("eps", 1e-5))
    return Operation("norm", norm, (arguments["input"],))


def _rms_norm(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    arguments = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | kwargs
    epsilon = arguments.get("eps")
    epsilon = torch.finfo(output.dtype).eps if epsilon is None else epsilon
    if len(arguments["normalized_shape"]) != 1:
        return None
    return Operation("rms", NormDetail(arguments.get("weight"), None, epsilon, centred=False), (arguments["input"],))


def _like(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    return Operation("same", None, (args[0],))


def _move(follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    return Operation("move")


_NAMES: Mapping[Recognise, str] = {
    _linear: "linear",
    _addmm: "addmm",
    _matmul: "matmul __matmul__",
    _add: "add __add__ __radd__",
    _multiply: "mul multiply __mul__ __rmul__",
    _division: "div true_divide __truediv__",
    _layer_norm: "layer_norm",
    _rms_norm: "rms_norm",
    _by_constant: "relu gelu silu tanh sigmoid leaky_relu elu mish relu6 hardtanh dropout clone float double half "
    "bfloat16 type contiguous detach neg __neg__ masked_fill clamp identity sub __sub__ __rsub__",
    _like: "to type_as",
    _move: "view reshape transpose swapaxes permute flatten unflatten squeeze unsqueeze __getitem__ narrow select "
    "split chunk unbind tensor_split split_with_sizes index_select cat concat stack expand roll t movedim",
}
FUNCTIONS: Mapping[str, Recognise] = {name: recognise for recognise, names in _NAMES.items() for name in names.split()}

OUT_OF_PLACE: Mapping[str, tuple[Callable[..., Any], str]] = {
    "__iadd__": (torch.add, "add"),
    "__isub__": (torch.sub, "sub"),
    "__imul__": (torch.mul, "mul"),
    "__itruediv__": (torch.div, "div"),
}
"""Assignments with an operator: recorded, and done, as the function that leaves its operands alone."""

CONSTANT = frozenset(
    [f"new_{kind}" for kind in ("zeros", "ones", "empty", "full", "tensor")]
    + [f"{kind}_like" for kind in ("zeros", "ones", "empty", "full")]
)
"""Functions that read no value of their argument, only its shape and type."""

LIKE = frozenset(["to", "type_as"])
"""Functions that read nothing but the type of their second argument."""


def module_operations(module: nn.Module) -> Callable[[Any], tuple[Operation, ...]] | None:
    """Candidates for what a module computes (the first whose numbers fit). Returns None if it is recorded by function.

    RMS norms are recognised by their class name (`…RMSNorm`, `T5LayerNorm`), activations by the module of their class.
    """
    kind = type(module)
    if kind.__name__.endswith("RMSNorm") or kind.__name__ == "T5LayerNorm":
        return None if isinstance(module, nn.RMSNorm) else _rms_module
    activation = kind.__module__ in ("torch.nn.modules.activation", "transformers.activations")
    if activation and not isinstance(module, nn.MultiheadAttention | nn.Softmax):
        return lambda module: (Operation("same"),)
    return None


def _rms_module(module: Any) -> tuple[Operation, ...]:
    """With its weight as the scale, or with one added to it (Gemma)."""
    names = ("variance_epsilon", "eps", "epsilon")
    epsilon = next((float(getattr(module, name)) for name in names if hasattr(module, name)), None)
    weight = getattr(module, "weight", None)
    if epsilon is None:
        return ()
    scales = [weight] if weight is None else [weight.detach(), 1 + weight.detach()]
    return tuple(Operation("rms", NormDetail(scale, None, epsilon, centred=False)) for scale in scales)
