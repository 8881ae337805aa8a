"""Record one forward pass as a list of steps, each one operation that a propagation rule can undo.

Linear maps, norms, sums, products and re-arrangements are recorded as torch computes them (a
`TorchFunctionMode`), RMS norms and activations as modules, and a whole softmax attention as one step, through
the taps of `attend`; factors of experts (MAE) are constants. Recording starts where a tensor enters the first block of
a stack, behind embeddings and positions. An operation without a rule is recorded by its name, and refused only
if relevance reaches it (`headscope.relevance.voita.propagation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headscope.errors import CheckpointError
from headscope.model.attention import AttentionCall, tap_contexts
from headscope.model.discovery import AttentionSite, track_calls
from headscope.model.interface import replaced_forwards, tensors_in
from headscope.model.mixing.base import Queries
from headscope.model.mixing.experts import Experts, experts_of, scale_context
from headscope.relevance.modules import activation_classes, names, norm_of_call, norms_of

Kind = Literal["root", "linear", "norm", "add", "product", "mix", "attention", "same", "move", "unknown"]


@dataclass(eq=False)
class Step:
    """One operation: its `output`, and those of its `inputs` that depend on a stack's input; messages use `name`.

    `detail` depends on the kind: (weight, bias) of a linear step, (site, call) of an attention, the function and its
    arguments of a move, …
    """

    kind: Kind
    name: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    detail: Any = None


@dataclass
class Trace:
    """The steps of one forward pass in order.

    `contexts` has the contexts [b h t k] that go to output projections, after mixing and gates, by id of the tensor.
    `roots` are the inputs of stacks by the name of their first block. `tensor_ids` are ids of tensors that depend on
    these, `overwrites` functions that changed such a tensor in place, `inside` the types of modules being called.
    """

    sentences: int = 0
    steps: list[Step] = field(default_factory=list)
    contexts: dict[int, tuple[AttentionSite, Tensor]] = field(default_factory=dict)
    roots: dict[str, Tensor] = field(default_factory=dict)
    tensor_ids: set[int] = field(default_factory=set)
    overwrites: dict[int, str] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)
    is_paused: bool = False

    def describe(self, function: str) -> str:
        """The function's name with the type of the module that calls it."""
        return f"{function} in {self.inside[-1]}" if self.inside else function

    def follows(self, value: Any) -> bool:
        """Whether a value is a tensor that depends on a stack's input."""
        return isinstance(value, Tensor) and id(value) in self.tensor_ids

    def add(self, step: Step) -> None:
        """Append a step; from then on its output counts as depending on a stack's input."""
        self.steps.append(step)
        self.tensor_ids.add(id(step.output))


Follows = Callable[[Any], bool]


MOVES = names(
    """
    view reshape transpose swapaxes permute flatten unflatten squeeze unsqueeze __getitem__ narrow select
    split chunk unbind tensor_split split_with_sizes index_select cat concat stack expand roll t movedim
    """
)
SUMS = frozenset(["add", "__add__", "__radd__"])
PRODUCTS = frozenset(["mul", "multiply", "__mul__", "__rmul__"])
QUOTIENTS = frozenset(["div", "true_divide", "__truediv__"])
SAME = names(
    """
    relu gelu silu tanh sigmoid leaky_relu elu mish relu6 hardtanh dropout clone float double half bfloat16
    type contiguous detach neg __neg__ masked_fill clamp identity sub __sub__ __rsub__
    """
)
"""Elementwise functions of one followed tensor: each element keeps its relevance. So do sums with constants, …"""

Operation = tuple[Kind, Any, tuple[Tensor, ...]]
"""The kind of a step, its `detail`, and its inputs (empty: all followed, in order)."""


def operation_of(name: str, follows: Follows, args: Any, kwargs: Any, output: Tensor) -> Operation | None:
    """The operation of a call of a torch function. Returns None if no rule is known for it."""
    if name in MOVES:
        return "move", None, ()
    if name in CASTS:
        return "same", None, args[:1]
    if name in ("layer_norm", "rms_norm"):
        norm_input = norm_of_call(name, args, kwargs)
        return None if norm_input is None else ("norm", norm_input[1], (norm_input[0],))
    if name in ("linear", "addmm", "matmul", "__matmul__"):
        return _linear(name, follows, args, kwargs)
    a, b = (*args, None, None)[:2]
    if follows(a) and follows(b):
        if name in SUMS and not kwargs and a.shape == b.shape:
            return "add", None, (a, b)
        return ("product", None, (a, b)) if name in PRODUCTS and a.shape == b.shape == output.shape else None
    tensors = [value for value in args if follows(value)]
    is_linear = name in SAME | SUMS | PRODUCTS or (name in QUOTIENTS and not follows(b))
    fits = is_linear and len(tensors) == 1 and tensors[0].shape == output.shape
    return ("same", None, tuple(tensors)) if fits else None


def _linear(name: str, follows: Follows, args: Any, kwargs: Any) -> Operation | None:
    """A product with a constant matrix, on the right ("linear") or on the left ("mix"); None if neither is constant."""
    if name == "linear":
        x, weight, bias = (*args, *kwargs.values(), None)[:3]
    elif name == "addmm" and not kwargs and len(args) == 3:
        (bias, x), weight = args[:2], args[2].t()
        if follows(args[2]):
            return None
    elif name == "addmm":
        return None
    else:
        (x, right), bias = args[:2], None
        if follows(right) and not follows(x) and x.ndim == 2 and right.ndim >= 2:
            return "mix", x, (right,)
        if follows(right) or right.ndim != 2:
            return None
        weight = right.t()
    return ("linear", (weight, bias), (x,)) if follows(x) and not (follows(weight) or follows(bias)) else None


OUT_OF_PLACE: Mapping[str, tuple[Callable[..., Any], str]] = {
    "__iadd__": (torch.add, "add"),
    "__isub__": (torch.sub, "sub"),
    "__imul__": (torch.mul, "mul"),
    "__itruediv__": (torch.div, "div"),
}
"""In-place operators, replaced by the functions that leave their operands unchanged."""

CONSTANT = frozenset(
    [f"new_{kind}" for kind in ("zeros", "ones", "empty", "full", "tensor")]
    + [f"{kind}_like" for kind in ("zeros", "ones", "empty", "full")]
)
"""Functions that read no value of their argument, only its shape and type."""

CASTS = frozenset(["to", "type_as"])
"""Functions that read only the type of their second argument."""


class _Recorder(TorchFunctionMode):
    """Adds a step to the trace for every call of a torch function on a tensor that depends on a stack's input."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        trace = self.trace
        if name in CONSTANT or not self._depends(name, args, kwargs):
            return func(*args, **kwargs)
        if name in OUT_OF_PLACE:
            func, name = OUT_OF_PLACE[name]
        output = func(*args, **kwargs)
        if (name.endswith("_") and not name.startswith("__")) or name == "__setitem__":
            trace.overwrites[id(args[0])] = trace.describe(name)
            return output
        if isinstance(output, Tensor):
            self._record(func, name, args, kwargs, output, None)
        elif isinstance(output, tuple | list):
            for index, part in enumerate(output):
                self._record(func, name, args, kwargs, part, index)
        return output

    def _depends(self, name: str, args: Any, kwargs: Any) -> bool:
        follows = self.trace.follows
        if not self.trace.tensor_ids or self.trace.is_paused:
            return False
        return follows(args[0]) if name in CASTS else any(map(follows, tensors_in((args, kwargs))))

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, output: Any, index: int | None) -> None:
        trace = self.trace
        if not isinstance(output, Tensor) or not output.is_floating_point() or id(output) in trace.tensor_ids:
            return
        inputs = tuple(filter(trace.follows, tensors_in((args, kwargs))))
        operation = operation_of(name, trace.follows, args, kwargs, output) or ("unknown", None, inputs)
        kind, detail, operation_inputs = operation
        detail = (func, args, kwargs, index) if kind == "move" else detail
        trace.add(Step(kind, trace.describe(name), operation_inputs or inputs, output, detail))


@contextmanager
def trace_model(model: nn.Module) -> Iterator[Trace]:
    """Within the block one forward pass of `model` is recorded; afterwards all hooks are removed.

    The trace keeps every tensor of the pass alive. Run the pass without gradients and in evaluation mode.
    """
    trace, norms, activations = Trace(), norms_of(model), activation_classes()
    with ExitStack() as stack:
        tracker = stack.enter_context(track_calls(model))
        current: list[AttentionSite | None] = [None]

        def record_attention(call: AttentionCall, _: Tensor) -> None:
            attention_site = current[0] = tracker.attention_site(call.module)
            if attention_site is None or not any(map(trace.follows, (call.query, call.key, call.value))):
                return
            trace.tensor_ids.discard(id(call.context))
            inputs = call.query, call.key, call.value
            trace.add(Step("attention", "attend", inputs, call.context, (attention_site, call)))

        def record_context(_: AttentionCall, context: Tensor) -> None:
            if current[0] is not None and trace.follows(context):
                trace.contexts[id(context)] = (current[0], context)

        def enter(module: nn.Module, _: Any) -> None:
            trace.inside.append(type(module).__name__)

        def leave(*_: Any) -> None:
            trace.inside.pop()

        for name in first_blocks(tracker.attention_sites.order):
            hook = _root_hook(trace, name)
            stack.callback(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True).remove)
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
            if isinstance(module, activations):
                stack.callback(module.register_forward_hook(_module_hook(trace, "same")).remove)
            elif module in norms:
                hook = _module_hook(trace, "norm", norms[module])
                stack.callback(module.register_forward_hook(hook).remove)
        stack.enter_context(replaced_forwards({experts: _mixture(trace, experts) for experts in experts_of(model)}))
        stack.enter_context(tap_contexts(record_attention, before_mixing=True, first=True))
        stack.enter_context(tap_contexts(record_context))
        stack.enter_context(_Recorder(trace))
        yield trace


def _mixture(trace: Trace, experts: Experts) -> Callable[..., Tensor]:
    """The forward function of a mixture of experts whose factors are constants: its gate gets no relevance."""

    def mix(context: Tensor, queries: Queries) -> Tensor:
        trace.is_paused = True
        try:
            factors = experts.factors(queries)
        finally:
            trace.is_paused = False
        return scale_context(context, factors)

    return mix


def first_blocks(sites: tuple[AttentionSite, ...]) -> list[str]:
    """Names of the first block of every stack that attends: `encoder.layers.0`, `transformer.h.0`.

    A block is named by the name of an attention module up to its first number; CheckpointError where there is none.
    """
    lowest: dict[str, int] = {}
    for attention_site in sites:
        parts = attention_site.name.split(".")
        position = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if position is None:
            raise CheckpointError(
                f"the attention module {attention_site.name!r} is in no numbered layer; relevance needs to know where "
                "the first layer begins, and this model cannot be explained by it"
            )
        stack, number = ".".join(parts[:position]), int(parts[position])
        lowest[stack] = min(number, lowest.get(stack, number))
    return [f"{stack}.{number}".lstrip(".") for stack, number in lowest.items()]


def _root_hook(trace: Trace, name: str) -> Callable[..., None]:
    """A hook on the first block of a stack, which records its input as a root."""

    def record_root(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering = args[0] if args else kwargs.get("hidden_states")
        if name in trace.roots or not isinstance(entering, Tensor):
            return
        trace.roots[name] = entering
        trace.sentences = len(entering)
        if not trace.follows(entering):
            trace.add(Step("root", name, (), entering))

    return record_root


def _module_hook(trace: Trace, kind: Kind, detail: Any = None) -> Callable[..., None]:
    """A hook that records the call of a module as a step."""

    def record_step(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and trace.follows(args[0]) and isinstance(output, Tensor) and output is not args[0]:
            trace.add(Step(kind, type(module).__name__, (args[0],), output, detail))

    return record_step
