"""Every part of an attention module that belongs to a head or a key/value group, and that a removal cuts.

These are more than the matrices of `headscope.model.projections`: rows that compute a gate (Qwen3-Next), entries of a
norm over all heads (OLMo 2), rows of projections after states that heads share (DeepSeek's MLA). By gradients a row
belongs to a head if its output reaches this head's states and no other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from headscope.errors import ConfigError, flag
from headscope.heads import Site, SiteLayer
from headscope.model.attention import AttentionCall
from headscope.model.discovery import find_attention
from headscope.model.projections import (
    Slices,
    beside_contexts,
    columns_of,
    graph_nodes,
    is_product,
    probe_gradients,
    slices_of,
    weight_of,
)

STATES = ("query", "key", "value")
SHARED = "its heads share parts of it: states are normalised or mixed across heads"
NO_WEIGHT = "it is not a plain matrix of weights, for instance one that experts choose"
NO_GRADIENT = "it is computed where no gradient reaches it"
BETWEEN = "it does not read the contexts of the heads: a norm or a mixture over heads stands between"


@dataclass(frozen=True)
class StateParts:
    """The parameters that compute one kind of states (queries, keys, values, gates), by unit: head or group.

    `rows` of matrices and `entries` of other parameters are removed with their unit. `norm_weights` belong to a norm
    over all units: it needs all its inputs, so that the matrices before it stay `whole`, and the states that are kept
    are selected after it. `own` are parameters of a single unit, by unit: modules in a list with one for each
    (StableLM's norms). `why` is the reason if the parts of units cannot be identified.
    """

    rows: tuple[Slices, ...] = ()
    entries: tuple[Slices, ...] = ()
    norm_weights: Slices | None = None
    whole: tuple[Tensor, ...] = ()
    own: tuple[tuple[Tensor, ...], ...] = ()
    why: str = ""


@dataclass(frozen=True)
class HeadParts:
    """The parts of one (site, layer) by kind of states. `output` are the columns of W_O; None if it mixes heads.

    The kind "position bias" computes each head's position bias from the layer's input (Inkling). A group can be removed
    only if nothing else needs its keys and values: `readers` are other layers that use them (Gemma 3n), and
    `makes_mask`: the mask of other heads is computed from them (Doge).
    """

    sides: Mapping[str, StateParts]
    output: Slices | None = None
    readers: tuple[SiteLayer, ...] = ()
    makes_mask: bool = False

    @property
    def unknown(self) -> tuple[str, str] | None:
        """The name of the first unidentified part and the reason; None if there is none."""
        unknown = next(((name, side.why) for name, side in self.sides.items() if side.why), None)
        return unknown or (None if self.output else ("output", BETWEEN))


def unknown_part(parts: HeadParts | None, site: Site, layer: int) -> ConfigError:
    """The error for a layer whose heads have an unidentified part, with the reason."""
    part, why = (parts.unknown if parts is not None else None) or ("output", BETWEEN)
    masks = parts is not None and parts.output is not None
    works = f"{flag.export} masked takes any" if masks else f"headscope can only mask them (evaluate {flag.mask})"
    return ConfigError(
        f"heads of {site}.{layer} cannot be removed: which part of its {part} projection belongs to which head "
        f"cannot be told ({why}); {works}"
    )


def head_parts(model: nn.Module) -> dict[SiteLayer, HeadParts]:
    """The parts of every (site, layer) of a transformers model, found by one probe with gradients."""
    parts_of: dict[SiteLayer, HeadParts] = {}

    def tap(site_layer: SiteLayer, call: AttentionCall) -> None:
        sides = {name: _side(states) for name, states in zip(STATES, (call.query, call.key, call.value), strict=True)}
        makes_mask = any(_reaches(states, call.options.mask) for states in (call.key, call.value))
        parts_of[site_layer] = HeadParts(sides | {"position bias": _position_bias(call)}, makes_mask=makes_mask)

    def receive(site_layer: SiteLayer, context: Tensor, module: nn.Module, x: Tensor) -> bool:
        gate = _gate(context, x)
        if gate is not None:
            output, sides = columns_of(module, context.shape[1], context.shape[3]), parts_of[site_layer].sides
            parts_of[site_layer] = replace(parts_of[site_layer], sides={**sides, "gate": gate}, output=output)
        return gate is not None

    probe_gradients(model, tap, receive)
    # of one module: without gradients in some calls (HRM's first cycles)
    for calls in find_attention(model).calls.values():
        site_layers = [site_layer for site in calls if (site_layer := (site.site, site.layer)) in parts_of]
        complete = next((parts_of[site_layer] for site_layer in site_layers if not parts_of[site_layer].unknown), None)
        parts_of |= {
            site_layer: complete for site_layer in site_layers if complete is not None and parts_of[site_layer].unknown
        }
    return _with_readers(parts_of)


def _side(states: Tensor) -> StateParts:
    if states.grad_fn is None:
        return StateParts(why=NO_GRADIENT)
    units = list(states[0])
    products, leaves = _sources(states.grad_fn)
    rows, sources = [], []
    for product in products:
        source = weight_of(product)
        if source is None:
            return StateParts(why=NO_WEIGHT)
        # Only back to the product itself: where layers share a matrix, its own gradient sums over all of them.
        slices = slices_of(units, GradientEdge(product, 0), *source)
        rows += [] if slices is None else [slices]
        sources += [source[0]] if slices is None else []
    entries = tuple(slices for leaf in leaves if (slices := slices_of(units, leaf, leaf, 0)) is not None)
    if rows:
        return StateParts(rows=tuple(rows), entries=entries, own=_own(units, leaves))
    if len(entries) == 1 and entries[0].weight.ndim == 1 and sources:
        return StateParts(norm_weights=entries[0], whole=tuple(sources))
    return StateParts(why=SHARED)


def _own(units: list[Tensor], leaves: list[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
    """The parameters that reach a single unit, by unit; empty if there are none, or only one unit."""
    if len(units) == 1 or not leaves:
        return ()
    noise = torch.Generator().manual_seed(0)
    weighted_sums = [(unit * torch.randn(unit.shape, generator=noise).to(unit)).sum() for unit in units]
    gradients = [torch.autograd.grad(push, leaves, retain_graph=True, allow_unused=True) for push in weighted_sums]
    readers = [
        [bool(gradient is not None and gradient.any()) for gradient in of_leaf]
        for of_leaf in zip(*gradients, strict=True)
    ]
    own = tuple(
        tuple(leaf for leaf, reads in zip(leaves, readers, strict=True) if reads[unit] and sum(reads) == 1)
        for unit in range(len(units))
    )
    return own if any(own) else ()


def _position_bias(call: AttentionCall) -> StateParts:
    """The rows of a module's own matrices that compute each head's position bias [b h t s]."""
    bias, own = call.options.position_bias, {id(parameter) for parameter in call.module.parameters()}
    if bias is None or bias.grad_fn is None:
        return StateParts()
    rows: list[Slices] = []
    n_products = 0

    def stop(node: Any) -> bool:
        nonlocal n_products
        source = weight_of(node) if is_product(node) else None
        if source is None or id(source[0]) not in own:
            return is_product(node)
        n_products += 1
        slices = slices_of(list(bias[0]), GradientEdge(node, 0), *source)
        rows.extend([] if slices is None else [slices])
        return slices is not None

    list(graph_nodes(bias.grad_fn, stop=stop))
    return StateParts(rows=tuple(rows), why="" if rows or not n_products else SHARED)


def _reaches(states: Tensor, mask: Tensor | None) -> bool:
    if mask is None or not mask.requires_grad or not states.requires_grad:
        return False
    return torch.autograd.grad(mask.sum(), states, retain_graph=True, allow_unused=True)[0] is not None


def _gate(context: Tensor, x: Tensor) -> StateParts | None:
    """The parts that compute a gate, if x [b t h·k] is a context [b h t k] times a gate. Returns None if it is not."""
    if (pair := beside_contexts(x, context)) is None:
        return None
    x, flat = pair
    if torch.equal(x, flat):
        return StateParts()
    if x.grad_fn is None or context.grad_fn is None:
        return None
    push = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    gradient: Tensor | None = torch.autograd.grad((x * push).sum(), context, retain_graph=True, allow_unused=True)[0]
    if gradient is None:
        return None
    factors = gradient.transpose(1, 2).flatten(2) / push
    if not torch.allclose(factors * flat, x, rtol=1e-4, atol=1e-6 * float(x.detach().abs().max())):
        return None
    width = context.shape[3]
    heads = [x[..., head * width : (head + 1) * width] for head in range(context.shape[1])]
    products, _ = _sources(x.grad_fn, context.grad_fn)  # of the gate, not of the context
    sources = {product: source for product in products if (source := weight_of(product)) is not None}
    rows = [slices_of(heads, GradientEdge(product, 0), *source) for product, source in sources.items()]
    if len(rows) != 1 or rows[0] is None:
        return StateParts(why=SHARED if len(sources) == len(products) else NO_WEIGHT)
    return StateParts(rows=(rows[0],))


def _sources(node: Any, end: Any = None) -> tuple[list[Any], list[Tensor]]:
    """The nearest matrix product on every path from a node of the autograd graph, and the parameters up to there.

    Paths stop at the node `end`.
    """
    nodes = list(graph_nodes(node, stop=lambda current: current is end or is_product(current)))
    leaves = [current.variable for current in nodes if hasattr(current, "variable")]
    return [current for current in nodes if is_product(current)], leaves


def _with_readers(parts_of: dict[SiteLayer, HeadParts]) -> dict[SiteLayer, HeadParts]:
    """The parts with their `readers`: layers with the same key matrix but other query matrices."""
    readers: dict[int, list[SiteLayer]] = {}
    for site_layer, parts in parts_of.items():
        for slices in parts.sides["key"].rows[:1]:
            readers.setdefault(id(slices.weight), []).append(site_layer)
    result = dict(parts_of)
    for layers in readers.values():
        queries = {id(part.weight) for at in layers for part in parts_of[at].sides["query"].rows[:1]}
        for site_layer in layers if len(queries) == len(layers) > 1 else ():  # not where the layers are one module
            other_layers = tuple(other for other in layers if other != site_layer)
            result[site_layer] = replace(result[site_layer], readers=other_layers)
    return result
