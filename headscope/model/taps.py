"""Taps on every head: read its tensors, multiply its context by a gate, take gradients with respect to it.

`with capture(model, names) as heads: model(…)` keeps the queries, keys, values, weights or contexts of every head, for
one sentence, a test, a figure. `observing` calls a function for each attention call and keeps nothing, as analyses need
it.

`with gated(model, gates): …` multiplies contexts by gates. A gate acts between weights·V (after mixing, if the model
mixes heads) and the output projection, as in Voita et al. 2019, §5 and Michel et al. 2019, §2.3: gate one is exactly
the unmodified model, gate zero equals zeroing the head's slice of the output projection. The output projection's bias
is not gated. A *mask* (`masked`) closes heads before mixing, as the MHR fork masks heads. Without mixing both are the
same.

Gradients of one number per sentence with respect to every head's context take one backward pass. The contexts of the
lowest layers are the leaves of the graph and parameters need no gradients, so the backward pass ends at the first
attention.

Heads and gates by name, as Python gives them, become those of layers by `head_ids_of` and `gates_of`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headscope.config.option import format_value
from headscope.errors import ConfigError
from headscope.heads import HeadId, Layout, Site, SiteLayer, all_heads, describe_heads, select_heads
from headscope.model.attention import AttentionCall, repeat_groups, tap_contexts
from headscope.model.discovery import AttentionSite, find_attention, track_calls
from headscope.model.nonfinite import is_finite
from headscope.model.stored_weights import computing_dtype, is_offloaded

LAYERS = 12  # most layers that a repr lists
FIELDS = ("query", "key", "value", "weights", "context")


SiteTap = Callable[[AttentionSite, AttentionCall, Tensor], Tensor | None]


@contextmanager
def tapped_sites(model: nn.Module, tap: SiteTap, **order: bool) -> Iterator[None]:
    """Within the block `tap(attention_site, call, context)` is called for every attention call of `model` with heads.

    A context that it returns replaces the current one; `order` as in `tap_contexts`.
    """
    with track_calls(model) as tracker:

        def on_call(call: AttentionCall, context: Tensor) -> Tensor | None:
            attention_site = tracker.attention_site(call.module)
            has_heads = attention_site is not None and attention_site.heads  # a pruned layer may have none
            return tap(attention_site, call, context) if attention_site is not None and has_heads else None

        with tap_contexts(on_call, **order):
            yield


def observing(model: nn.Module, see: Callable[[AttentionSite, AttentionCall], None]) -> AbstractContextManager[None]:
    """Within the block `see(attention_site, call)` is called for every attention call of `model`."""
    return tapped_sites(model, lambda attention_site, call, _: see(attention_site, call))


@dataclass
class Captured:
    """Captured tensors: `captured["encoder-self", 2]["weights"]` of the last call, `.calls` of all of them.

    A head's name, `captured["encoder-self.2.5"]`, gives its slices: weights [b t s], context [b t k].
    """

    calls: dict[SiteLayer, list[dict[str, Tensor]]] = field(default_factory=dict)

    def __getitem__(self, attention_site: tuple[Site | str, int] | HeadId | str) -> dict[str, Tensor]:
        is_layer = isinstance(attention_site, tuple)
        head = None if is_layer else HeadId.parse(str(attention_site), self.layout)
        site_layer: Any = attention_site if head is None else (head.site, head.layer)
        by_name = {(site.value, layer): calls[-1] for (site, layer), calls in self.calls.items()}
        tensors = by_name.get(tuple(getattr(part, "value", part) for part in site_layer))
        if tensors is None or (head is not None and head.head >= self.layout[site_layer]):
            site_layer_name = ".".join(str(part) for part in site_layer) if is_layer else str(attention_site)
            names = ", ".join(f"{name}.{layer}" for name, layer in by_name) or "nothing: run the model within the block"
            raise ConfigError(f"{site_layer_name} was not captured; captured: {names}")
        return tensors if head is None else {name: tensor[:, head.head] for name, tensor in tensors.items()}

    @property
    def layout(self) -> Layout:
        """The heads of every attention that was called."""
        return {site_layer: next(iter(calls[-1].values())).shape[1] for site_layer, calls in self.calls.items()}

    def __repr__(self) -> str:
        layers = [f"{site}.{layer}" for site, layer in self.calls]
        if not layers:
            return "<Captured nothing yet: run the model within the block>"
        calls = list(self.calls.values())
        layer_names = layers if len(layers) <= LAYERS else [*layers[: LAYERS - 1], "…", layers[-1]]
        return f"<Captured {', '.join(calls[0][-1])} of {', '.join(layer_names)}; {max(map(len, calls))} calls at most>"


@contextmanager
def capture(model: nn.Module, tensors: Iterable[str] = ("weights",)) -> Iterator[Captured]:
    """Keep tensors of every head while the block runs: weights [b h t s], context, query [b h t k], …

    `tensors` names any of query, key, value, weights, context; keys and values of grouped-query attention
    are repeated to one per query head. Contexts are those before mixing and gates, weights those before
    dropout. Memory grows with every call: for a corpus use `observing`. ConfigError for an unknown name.
    """
    names = tuple(tensors)
    if unknown := [name for name in names if name not in FIELDS]:
        raise ConfigError(f"cannot capture {', '.join(map(str, unknown))}; what can be captured: {', '.join(FIELDS)}")
    capture_result = Captured()

    def see(attention_site: AttentionSite, call: AttentionCall) -> None:
        call_tensors: dict[str, Tensor] = {name: getattr(call, name) for name in names}
        for name in {"key", "value"} & set(names):
            call_tensors[name] = repeat_groups(call_tensors[name], attention_site.heads)
        capture_result.calls.setdefault(attention_site.site_layer, []).append(call_tensors)

    with observing(model, see):
        yield capture_result


Gates = Mapping[SiteLayer, Tensor]
"""Gates of every gated (site, layer): [h], or [b h] for a gate per sentence."""


def close_gates(heads: Iterable[HeadId], layout: Layout) -> dict[SiteLayer, Tensor]:
    """Gates [h] of zero for `heads` and of one for the others of their layers.

    ConfigError for a head that `layout` lacks.
    """
    gates: dict[SiteLayer, Tensor] = {}
    for head in heads:
        site_layer = (head.site, head.layer)
        if head.head >= layout.get(site_layer, 0):
            raise ConfigError(f"this model has no head {head}; it has {describe_heads(layout)}")
        gates.setdefault(site_layer, torch.ones(layout[site_layer]))[head.head] = 0.0
    return gates


def masked(model: nn.Module, heads: Iterable[HeadId]) -> AbstractContextManager[None]:
    """Within the block the context of these heads is zero, before any mixing."""
    return gated(model, heads, before_mixing=True)


def gated(
    model: nn.Module, gates: Gates | Iterable[HeadId], *, before_mixing: bool = False
) -> AbstractContextManager[None]:
    """Within the block every head's context [b h t k] is multiplied by its gate, after mixing or before it.

    `gates` maps (site, layer) to [h] or [b h]; layers that are not named are not gated. An iterable of
    heads closes these. Gradients flow into the gates. ConfigError where the size of a gate is not the number
    of heads, and for one that is NaN or infinite.
    """
    layout = find_attention(model).layout
    if isinstance(gates, Mapping):
        _check(gates, layout, computing_dtype(model))
    gate_of = gates if isinstance(gates, Mapping) else close_gates(gates, layout)

    def tap(attention_site: AttentionSite, _: AttentionCall, context: Tensor) -> Tensor | None:
        gate = gate_of.get(attention_site.site_layer)
        return None if gate is None else context * gate.to(context)[..., :, None, None]

    return tapped_sites(model, tap, before_mixing=before_mixing)


def _check(gates: Gates, layout: Layout, dtype: torch.dtype) -> None:
    """ConfigError for gates of another size than there are heads, and for those that are not finite in `dtype`."""
    for (site, layer), gate in gates.items():
        heads = layout.get((site, layer), 0)
        if gate.ndim not in (1, 2) or gate.is_complex():
            kind = "complex numbers" if gate.is_complex() else f"a tensor of shape {list(gate.shape)}"
            raise ConfigError(f"gates for {site}.{layer} are {kind}; give a number for each head [h] or [b h]")
        if gate.shape[-1] != heads:
            layer_words = f"{site}.{layer}, which has {heads} heads"
            raise ConfigError(f"{gate.shape[-1]} gates for {layer_words}; the model has {describe_heads(layout)}")
    device = next((gate.device for gate in gates.values()), None)
    numbers = [gate.detach().reshape(-1).to(device, dtype) for gate in gates.values()]
    if not numbers or is_finite(torch.cat(numbers)):  # a GPU waits once
        return
    (site, layer), gate = next(entry for entry in gates.items() if not is_finite(entry[1].detach().to(dtype)))
    rows = gate.detach().reshape(-1, gate.shape[-1])  # [b h]
    row, head = (~rows.to(dtype).isfinite()).nonzero()[0].tolist()
    raise ConfigError(
        f"the gate of {site}.{layer}.{head} is {float(rows[row, head])}; gates are finite numbers (of "
        f"{str(dtype).removeprefix('torch.')}): 1 leaves a head as it is, 0 closes it"
    )


@contextmanager
def frozen_parameters(model: nn.Module, *, trainable: bool = False) -> Iterator[None]:
    """Within the block no parameter requires gradients, or with `trainable` all do; restored afterwards.

    With `trainable` integers never do, and of offloaded modules only embeddings: a graph would keep other weights.
    """
    before = [
        (module, name, parameter.requires_grad)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    for module, name, _ in before:
        keeps_gradient = isinstance(module, nn.Embedding) or not is_offloaded(module)
        _require_gradient(module, name, trainable and keeps_gradient)
    try:
        yield
    finally:
        for module, name, flag in before:
            _require_gradient(module, name, flag)


def _require_gradient(module: nn.Module, name: str, flag: bool) -> None:
    parameter = module.get_parameter(name)
    if parameter.is_inference():  # what accelerate left in the place of an offloaded weight; it cannot be changed
        parameter = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        module.register_parameter(name, parameter)
    parameter.requires_grad_(flag and parameter.is_floating_point())


class Unclipped(TorchFunctionMode):
    """Within the block tensors with gradients are not clipped, since clipped entries have no gradient.

    For probes that find out which weight an entry depends on (OLMo's `clip_qkv`); the values are wrong meanwhile.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of torch's function; for one that clips, its first argument."""
        clips = getattr(function, "__name__", "") in _CLIPS and args and isinstance(args[0], Tensor)
        return args[0] if clips and args[0].requires_grad else function(*args, **(kwargs or {}))


_CLIPS = frozenset(["clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max", "hardtanh", "hardtanh_"])


@contextmanager
def differentiable_contexts() -> Iterator[None]:
    """Within the block gradients are on, and every `AttentionCall.context` is part of the graph.

    These are the contexts before mixing and gates; gates that are active around the block are differentiated through.
    """

    def tap(call: AttentionCall, _: Tensor) -> None:
        if not call.context.requires_grad:
            call.context.requires_grad_()

    with torch.enable_grad(), tap_contexts(tap, before_mixing=True, first=True):
        yield


def gradients_of(values: Tensor, contexts: Sequence[Tensor]) -> list[Tensor]:
    """d(Σ values)/d(context) for every context [b h t k]; zeros where values [b] do not depend on a context.

    Sentences of a batch are independent, so row i is the gradient of values[i]. Frees the graph.
    """
    if not (values.requires_grad and contexts):
        return [torch.zeros_like(context) for context in contexts]
    gradients = torch.autograd.grad(values.sum(), list(contexts), allow_unused=True)
    return [
        torch.zeros_like(context) if gradient is None else gradient
        for context, gradient in zip(contexts, gradients, strict=True)
    ]


MAX_NAMES = 8  # most heads that a signature lists by name
Heads: TypeAlias = "str | HeadId | Iterable[str | HeadId]"
"""`"encoder-self.2.5"`, with `*` for every layer or head and commas between names, a file with a name a line, a
`HeadId`, or several of these."""
GateValues: TypeAlias = "Mapping[str | HeadId, float | Tensor] | Mapping[tuple[Site | str, int], Tensor]"
"""A number for each head, by its name, or gates [h] or [b h] for each (site, layer)."""


def head_ids_of(heads: Heads, layout: Layout, *, name: str = "heads") -> list[HeadId]:
    """The selected heads of a model, without duplicates; ConfigError for a name that selects none.

    `name` is the argument's, for messages.
    """
    example = next(iter(all_heads(layout))).name({site for site, _ in layout})
    entries = [heads] if isinstance(heads, (str, HeadId)) else heads
    if isinstance(entries, (bytes, Mapping)) or not isinstance(entries, Iterable):
        is_ranking = hasattr(heads, "lowest")
        instead = "its heads, ranking.lowest(12)" if is_ranking else f"names such as {example!r}, or a list"
        raise ConfigError(f"{name}: a {type(heads).__name__} names no heads; give {instead}")
    head_ids: dict[HeadId, None] = {}
    for entry in entries:
        if not isinstance(entry, (str, HeadId)):
            raise ConfigError(f"{name}: {format_value(entry)} is no head; write it as {example!r}")
        head_ids.update(dict.fromkeys(select_heads(str(entry), layout)))
    return list(head_ids)


def gates_of(gates: Heads | GateValues, layout: Layout) -> Gates:
    """Gates [h] or [b h] by (site, layer): heads in a list are closed, heads in a mapping get its number.

    ConfigError for heads and layers that the model does not have, and for gates that are no numbers.
    """
    if not isinstance(gates, Mapping):
        return close_gates(head_ids_of(gates, layout, name="gates"), layout)
    by_layer: dict[SiteLayer, Tensor] = {}
    for key, value in gates.items():
        if isinstance(key, tuple):
            names = {(site.value, layer): (site, layer) for site, layer in layout}
            name = (getattr(key[0], "value", key[0]), *key[1:])
            if name not in names:
                layers = ", ".join(f"({site!r}, {layer})" for site, layer in names)
                raise ConfigError(f"this model has no layer {name!r}; it has {layers}")
            by_layer[names[name]] = _numbers(key, value)
            continue
        number = _numbers(key, value, single=True)
        for head in head_ids_of(key, layout, name="gates"):
            site_layer = (head.site, head.layer)
            row = by_layer.setdefault(site_layer, torch.ones(layout[site_layer]))
            by_layer[site_layer] = torch.where(torch.arange(len(row)) == head.head, number.to(row), row)
    return by_layer


def _numbers(key: Any, value: Any, *, single: bool = False) -> Tensor:
    """The gates of `key` as a tensor, with `single` a scalar; ConfigError if they are not numbers."""
    try:
        numbers = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        numbers = torch.empty(0)
    if not numbers.numel() or (single and (numbers.numel() > 1 or numbers.is_complex())):
        requirement = "a number" if single else "a number for each head, a tensor [h] or [b h]"
        raise ConfigError(f"the gate of {key!r} is {format_value(value)}; give {requirement}")
    return numbers.reshape(()) if single else numbers


def gates_name(gates: Gates) -> str:
    """Gates as a signature writes them: the heads whose gates are not one, or a digest of many gates."""
    rows = {site_layer: gate.detach().cpu() for site_layer, gate in gates.items()}
    single = {site_layer: gate for site_layer, gate in rows.items() if gate.ndim == 1}
    names = [
        f"{HeadId(*site_layer, head)}={value:g}"
        for site_layer, gate in single.items()
        for head, value in enumerate(gate.tolist())
        if value != 1
    ]
    if len(single) == len(rows) and len(names) <= MAX_NAMES:
        return ",".join(names)
    entries = sorted(f"{site}.{layer} {gate.double().tolist()}" for (site, layer), gate in rows.items())
    return f"sha1={hashlib.sha1(''.join(entries).encode()).hexdigest()[:8]}"
