"""The rows and columns of each head in a weight matrix, found from gradients, not from names.

The rows of a query, key or value projection that belong to a head are those with a gradient from the head's query (or
key, or value); the output projection is the next module that receives the contexts. So fused, interleaved, grouped and
transposed projections (GPT-2's Conv1D) need no table of architectures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from headscope.heads import SiteLayer
from headscope.model.attention import AttentionCall
from headscope.model.discovery import AttentionSite, base_of, eval_mode, probe_inputs
from headscope.model.interface import is_linear
from headscope.model.stored_weights import StoredWeight, is_plain, marked_module, marked_products, readable
from headscope.model.taps import Unclipped, frozen_parameters, tapped_sites


@dataclass(frozen=True)
class Slices:
    """One projection of one attention module, cut into heads.

    `units[i]` are the indices of head (or key/value group) i along `axis` of `weight`: the axis of outputs for query,
    key and value, the axis of inputs for the output projection. An offloaded or quantised weight is loaded at every
    read, and not kept. `gate` is a constant that contexts are multiplied by before the stored matrix
    (`--export laguna`).
    """

    parameter: Tensor | StoredWeight
    axis: int
    units: tuple[Tensor, ...]
    gate: float = 1.0

    @property
    def weight(self) -> Tensor:
        """The whole matrix, multiplied by the `gate` on its inputs."""
        weight = self.parameter.load() if isinstance(self.parameter, StoredWeight) else self.parameter
        return weight if self.gate == 1 else weight * self.gate

    def matrices(self) -> Tensor:
        """The heads' slices as one tensor [h k d]: rows along the head's own axis."""
        weight = self.weight.detach()
        slices = [weight.index_select(self.axis, unit.to(weight.device)) for unit in self.units]
        return torch.stack(slices).transpose(1, 1 + self.axis)


@dataclass(frozen=True)
class Projections:
    """The projections of one (site, layer); None for one that cannot be identified (because of gates or norms)."""

    query: Slices | None
    key: Slices | None
    value: Slices | None
    output: Slices | None


def projections(model: nn.Module) -> dict[SiteLayer, Projections]:
    """The projections of every (site, layer): as a model declares them, else found by one probe with gradients.

    The model is not changed.
    """
    declares: Callable[[], dict[SiteLayer, Projections]] | None = getattr(model, "attention_projections", None)
    if declares is not None:  # a native Transformer
        return declares()
    by_site: dict[SiteLayer, Projections] = {}

    def tap(site_layer: SiteLayer, call: AttentionCall) -> None:
        by_site[site_layer] = Projections(_slices(call.query), _slices(call.key), _slices(call.value), None)

    def receive(site_layer: SiteLayer, context: Tensor, module: nn.Module, x: Tensor) -> bool:
        gate = _constant_gate(x, context) if readable(module) else None
        if gate is not None:
            output = columns_of(module, context.shape[1], context.shape[3], gate=gate)
            by_site[site_layer] = replace(by_site[site_layer], output=output)
        return gate is not None

    with marked_products(model):
        probe_gradients(model, tap, receive)
    return by_site


def probe_gradients(
    model: nn.Module,
    tap: Callable[[SiteLayer, AttentionCall], None],
    receive: Callable[[SiteLayer, Tensor, nn.Module, Tensor], bool],
) -> None:
    """Run a probe with gradients, in which `tap` gets every attention call.

    `receive` gets the context of the last call together with each following linear layer and its input, until it
    returns True: that layer is the output projection.
    """
    waiting: list[tuple[SiteLayer, Tensor]] = []

    def tap_heads(attention_site: AttentionSite, call: AttentionCall, context: Tensor) -> None:
        tap(attention_site.site_layer, call)
        waiting[:] = [(attention_site.site_layer, context)]

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if waiting and inputs and isinstance(inputs[0], Tensor) and receive(*waiting[0], module, inputs[0]):
            waiting.clear()

    with (
        ExitStack() as stack,
        eval_mode(model),
        tapped_sites(model, tap_heads),
        frozen_parameters(model, trainable=True),
        torch.enable_grad(),
        Unclipped(),
    ):
        for part in filter(is_linear, model.modules()):
            stack.enter_context(part.register_forward_pre_hook(before))
        base_of(model)(**probe_inputs(model))


def _slices(states: Tensor) -> Slices | None:
    """Rows of the projection that computed states [1 h t k]. Returns None unless each head has k rows of its own."""
    nodes = graph_nodes(states.grad_fn, stop=is_product)
    product = next(filter(is_product, nodes), None)  # the nearest
    if product is None or (source := weight_of(product)) is None:
        return None
    # gradients of the product, not of the matrix: if layers share the matrix, its gradient sums over all of them
    slices = slices_of(list(states[0]), GradientEdge(product, 0), *source)
    return slices if slices is not None and len(slices.units[0]) == states.shape[-1] else None


def slices_of(heads: list[Tensor], source: Any, weight: Tensor | StoredWeight, axis: int) -> Slices | None:
    """The entries of a weight with a gradient from each of `heads`. Returns None if heads share any (or have none).

    `source` is the weight, or the edge of its product in the graph.
    """
    noise = torch.Generator().manual_seed(0)
    units = []
    for head in heads:
        push = torch.randn(head.shape, generator=noise).to(head)
        (gradient,) = torch.autograd.grad(head, source, push, retain_graph=True, allow_unused=True)
        if gradient is None:
            return None
        along = gradient.ndim - 1 if isinstance(source, GradientEdge) else axis
        units.append(gradient.movedim(along, -1).reshape(-1, gradient.shape[along]).any(dim=0).nonzero()[:, 0])
    together = torch.cat(units)
    if {len(unit) for unit in units} != {len(units[0])} or not len(units[0]):
        return None
    return Slices(weight, axis, tuple(units)) if len(together.unique()) == len(together) else None


def graph_nodes(node: Any, *, stop: Callable[[Any], bool]) -> Iterator[Any]:
    """`node` and its ancestors in the autograd graph, breadth first, once each, but none beyond where to `stop`."""
    queue, visited_nodes = deque([node]), set()
    while queue:
        current = queue.popleft()
        if current is None or current in visited_nodes:
            continue
        visited_nodes.add(current)
        yield current
        if not stop(current):
            queue.extend(parent for parent, _ in current.next_functions)


def is_product(node: Any) -> bool:
    """Whether a node of the autograd graph is the product of a linear layer."""
    return (
        type(node).__name__ in ("AddmmBackward0", "MmBackward0", "LinearBackward0") or marked_module(node) is not None
    )


def weight_of(product: Any) -> tuple[Any, int] | None:
    """The weight matrix of a product and its axis of outputs. Returns None if the matrix is not a parameter."""
    if (module := marked_module(product)) is not None:
        return StoredWeight(module), 0 if isinstance(module, nn.Linear) else 1  # of a Conv1D
    for parent, _ in reversed(product.next_functions):
        is_transposed = parent is not None and type(parent).__name__ in ("TBackward0", "TransposeBackward0")
        leaf = parent.next_functions[0][0] if is_transposed else parent
        variable = getattr(leaf, "variable", None)
        if variable is not None and variable.ndim == 2:
            return variable, 0 if is_transposed else 1
    return None


def beside_contexts(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor] | None:
    """The input x of a linear layer and a context [b h t k], both as [b t h·k]. Returns None if x has another size.

    Positions of x may be rows and columns of a picture (SAM 3) or its first axis (MLCD, which is the same for a batch
    of one, as in probes).
    """
    flat = context.transpose(1, 2).flatten(2)
    if x.ndim < 2 or x.shape[-1] != flat.shape[-1] or x.numel() != flat.numel():
        return None
    return x.reshape(flat.shape), flat


def _constant_gate(x: Tensor, context: Tensor) -> float | None:
    """The constant by which x is a multiple of a context [b h t k]. Returns None if it is not a multiple."""
    if (pair := beside_contexts(x, context)) is None:
        return None
    x, flat = pair
    if torch.equal(x, flat):
        return 1.0
    gated_values, context_values = x.detach().double(), flat.detach().double()
    gate = float((gated_values * context_values).sum() / context_values.square().sum())
    rounding = 4 * torch.finfo(x.dtype).eps * float(gated_values.abs().max())
    return gate if gate and float((gated_values - gate * context_values).abs().max()) <= rounding else None


def columns_of(module: nn.Module, heads: int, width: int, *, gate: float = 1.0) -> Slices:
    """The columns of an output projection for each head, in the order of heads."""
    weight = module.get_parameter("weight") if is_plain(module) else StoredWeight(module)
    axis = 1 if isinstance(module, nn.Linear) else 0
    device = weight.device if isinstance(weight, Tensor) else None
    order = torch.arange(heads * width, device=device).view(heads, width)
    return Slices(weight, axis, tuple(order), gate)


class WeightOwners:
    """Finds the modules that own a weight, with their names; several if they share it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(part): (name, part) for name, part in model.named_modules()}
        self._weights: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, part in self._modules.values():
            if hasattr(part, "weight"):
                self._weights.setdefault(id(part.weight), []).append((name, part))

    def all(self, slices: Slices | None) -> list[tuple[str, nn.Module]]:
        """The names and modules of a projection; empty if no module owns its weight."""
        if slices is None:
            return []
        if isinstance(slices.parameter, StoredWeight):
            return [self._modules[id(slices.parameter.module)]]
        return self._weights.get(id(slices.parameter), [])

    def of(self, slices: Slices | None) -> tuple[str, nn.Module] | None:
        """The name and module of a projection; the last one if several share its weight."""
        return next(reversed(self.all(slices)), None)

    def modules(self) -> dict[str, nn.Module]:
        """Every module that has a weight, by its name."""
        return {name: part for name, part in self._modules.values() if hasattr(part, "weight")}


ADDED_BIAS = "headscope_added_bias"


def add_bias(module: nn.Module, values: Tensor) -> None:
    """Give a bias [d] to a linear layer whose class builds it without; `has_added_bias` tells, also in copies."""
    module.bias = nn.Parameter(values.detach().clone(), requires_grad=module.get_parameter("weight").requires_grad)
    setattr(module, ADDED_BIAS, True)


def has_added_bias(module: nn.Module) -> bool:
    """Whether `add_bias` gave this layer its bias."""
    return bool(getattr(module, ADDED_BIAS, False))
