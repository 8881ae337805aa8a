"""Passes over one batch that differ in head gates only: layers below the first changed gate are not recomputed.

A pass can be cached. The next one then reuses the outputs of all layers before the first (site, layer) whose gates
differ. In that layer the attention output is reused, and the output of its output projection is shifted by
Δgate · context · W_O[head] of the changed heads. All later layers are computed with their own gates. Models without a
layer index (`index_layers`) compute every pass in full.

`SharedLayers` caches outputs of layers on a text, for copies of a model that are altered in a few layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headscope.heads import SITES, SiteLayer
from headscope.model.attention import AttentionCall, is_half
from headscope.model.discovery import AttentionSite, base_of, eval_mode, find_attention, probe_inputs
from headscope.model.interface import replaced_forwards, suppress_warnings, watch_modules
from headscope.model.projections import Slices, WeightOwners, projections
from headscope.model.stored_weights import computing_dtype
from headscope.model.taps import tapped_sites

Rank = tuple[int, int, int]
"""The position in the order of a forward pass: numbers of the stack, the layer, and the attention within the layer."""

END = 9  # in a rank: the end of a layer, after all its attention


@dataclass(frozen=True)
class LayerEntry:
    """The attention module of one (site, layer), its output projection, and the heads' slices of that projection."""

    rank: Rank
    attention: nn.Module
    output: nn.Module
    slices: Slices

    def project(self, context: Tensor, heads: Tensor) -> Tensor:
        """The sum over `heads` [h] of contexts [b h t k] · W_O[head]: [b t d]."""
        units = torch.cat([self.slices.units[head] for head in heads.tolist()])
        matrix = self.slices.weight.detach().to(context.dtype)
        weight = matrix.index_select(self.slices.axis, units.to(matrix.device))  # [d h·k] or [h·k d]
        return context.transpose(1, 2).flatten(2) @ (weight.T if self.slices.axis else weight)


@dataclass(frozen=True)
class LayerIndex:
    """The entry `of` each (site, layer) that has heads, and all layers of all stacks with their ranks."""

    of: dict[SiteLayer, LayerEntry]
    layers: tuple[tuple[Rank, nn.Module], ...]

    @property
    def modules(self) -> list[tuple[Rank, nn.Module]]:
        """All layers, attention modules and output projections, with their ranks."""
        parts = [(entry.rank, part) for entry in self.of.values() for part in (entry.attention, entry.output)]
        return [*self.layers, *parts]

    def above(self, changed_site_layers: Iterable[SiteLayer]) -> float:
        """The share of layers that a pass recomputes if its gates differ from the cached pass's in `changed_places`."""
        first = min(self.of[site_layer].rank[:2] for site_layer in changed_site_layers)
        return sum(rank[:2] >= first for rank, _ in self.layers) / len(self.layers)


def index_layers(model: nn.Module) -> LayerIndex | None:
    """The layer index of a model. Returns None for an unsupported structure.

    Supported: the attention of each site lies in one stack, the outermost ModuleList, in the order of its layers, and
    layers share no modules.
    """
    attention_sites = find_attention(model)
    rows = {attention_site.site_layer: _row(model, attention_site.name) for attention_site in attention_sites.order}
    stacks = list(dict.fromkeys(path for path, _ in rows.values()))  # the encoder before the decoder
    numbers: dict[tuple[str, int], set[int]] = {}
    for (_, layer), row in sorted(rows.items(), key=lambda entry: entry[1]):
        numbers.setdefault(row, set()).add(layer)
    shares_modules = any(len(calls) != 1 for calls in attention_sites.calls.values())
    mixes_layers = any(len(layers) > 1 for layers in numbers.values())
    rises = all(min(one) < min(other) for (at, one), (to, other) in pairwise(numbers.items()) if at[0] == to[0])
    divides_sites = len({(site, path) for (site, _), (path, _) in rows.items()}) > len({site for site, _ in rows})
    if "" in stacks or shares_modules or mixes_layers or not rises or divides_sites:
        return None
    projections_of, owners = projections(model), WeightOwners(model)
    layer_index: dict[SiteLayer, LayerEntry] = {}
    for attention_site in attention_sites.order:
        if not attention_site.heads:
            continue
        output = projections_of[attention_site.site_layer].output
        owner = owners.all(output)
        if output is None or len(owner) != 1:
            return None
        path, number = rows[attention_site.site_layer]
        rank = stacks.index(path), number, SITES.index(attention_site.site)
        layer_index[attention_site.site_layer] = LayerEntry(
            rank, model.get_submodule(attention_site.name), owner[0][1], output
        )
    layers = [
        ((number, row, END), layer)
        for number, path in enumerate(stacks)
        for row, layer in enumerate(model.get_submodule(path).children())
    ]
    return LayerIndex(layer_index, tuple(layers))


def _row(model: nn.Module, name: str) -> tuple[str, int]:
    """The name of the outermost ModuleList around a module, and the number of its entry; "" if there is none."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        if isinstance(model.get_submodule(path := ".".join(parts[:length])), nn.ModuleList):
            return path, int(parts[length])
    return "", 0


BEFORE_ALL: Rank = (-1, 0, 0)


@dataclass
class PrefixCache:
    """Runs `work` (always the same forward passes of `model` on one batch) under given gates.

    `work` must not need gradients. `instead` has, for each (site, layer) and call, the contexts of closed heads, which
    broadcast to [b h t k] (default: zero). `value` is called within `with cache.activate():`, where the model is in
    evaluation mode and computes attention with `attend`. `contexts` are those of the cached pass before gates, one list
    entry for each call, like the cached outputs of modules.
    """

    model: nn.Module
    work: Callable[[], Tensor]
    layer_index: LayerIndex | None
    instead: Mapping[SiteLayer, list[Tensor]] = field(default_factory=dict)
    contexts: dict[SiteLayer, list[Tensor]] = field(default_factory=dict, init=False)
    _outputs: dict[nn.Module, list[Any]] = field(default_factory=dict, init=False, repr=False)
    _cached_pass: tuple[Mapping[SiteLayer, Tensor], Tensor] | None = field(default=None, init=False, repr=False)
    """Gates and result of the cached pass."""
    _gates: Mapping[SiteLayer, Tensor] = field(default_factory=dict, init=False, repr=False)
    _turns: Counter[SiteLayer] = field(default_factory=Counter, init=False, repr=False)
    """Calls so far in the current pass."""
    _start: Rank | None = field(default=None, init=False, repr=False)
    """The rank after which the current pass is cached; None if it is not cached."""
    _weights: Tensor | None = field(default=None, init=False, repr=False)
    """Attention weights of the last call in a pass that is cached; they are taken out of the cached outputs."""

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Within the block `value` may be called; the model is restored afterwards."""
        with eval_mode(self.model), tapped_sites(self.model, self._gate_contexts):
            yield

    def value(self, gates: Mapping[SiteLayer, Tensor], *, keep: bool = False) -> Tensor:
        """The result of `work` under gates [h] of the same (site, layer) pairs as in every call.

        With `keep` this pass is cached and later ones reuse it.
        """
        start, outputs = BEFORE_ALL, dict[nn.Module, list[Any]]()
        if self._cached_pass is not None:
            before, value = self._cached_pass
            steps = {
                site_layer: gate - before[site_layer]
                for site_layer, gate in gates.items()
                if not torch.equal(gate, before[site_layer])
            }
            if not steps:
                return value
            if self.layer_index is not None:
                start, outputs = self._resume(self.layer_index, steps)
        self._gates, self._start = gates, start if keep else None
        self._turns.clear()
        try:
            with stored_outputs(outputs), self._recording(start, outputs) if keep else nullcontext():
                value = self.work()
        finally:
            self._gates, self._weights = {}, None
        if keep:
            self._cached_pass = dict(gates), value
        return value

    def _resume(
        self, layer_index: LayerIndex, steps: Mapping[SiteLayer, Tensor]
    ) -> tuple[Rank, dict[nn.Module, list[Any]]]:
        """The rank from which on a pass with gates changed by `steps` is computed, and the outputs before that."""
        first = min(steps, key=lambda site_layer: layer_index.of[site_layer].rank)
        entry, heads = layer_index.of[first], steps[first].nonzero()[:, 0]
        before, new_outputs = self._outputs[entry.output], []
        for turn, output in enumerate(before):
            context = self.contexts[first][turn][:, heads]
            if first in self.instead:
                context = context - self.instead[first][turn][:, heads]
            new_outputs.append(output + entry.project(context * steps[first][heads].to(context)[:, None, None], heads))
        results = self._outputs[entry.attention]
        if any(part is entry.output for part in entry.attention.modules()):  # it is beside the module in BERT
            results = [_replace_tensor(*outputs) for outputs in zip(results, before, new_outputs, strict=True)]
            if any(new is old for new, old in zip(results, self._outputs[entry.attention], strict=True)):
                return BEFORE_ALL, {}
        earlier = {module: self._outputs[module] for rank, module in layer_index.modules if rank < entry.rank}
        return entry.rank, {**earlier, entry.output: new_outputs, entry.attention: results}

    def _recording(self, start: Rank, outputs: Mapping[nn.Module, list[Any]]) -> AbstractContextManager[None]:
        """Within the block contexts and outputs of modules after `start` replace the cached ones."""
        self._cached_pass = None  # after an error there is no cached pass
        entries = {} if self.layer_index is None else self.layer_index.of
        ranks = {site_layer: entry.rank for site_layer, entry in entries.items()}
        self.contexts = {
            site_layer: calls
            for site_layer, calls in self.contexts.items()
            if site_layer in ranks and ranks[site_layer] <= start
        }
        ranked_modules = [] if self.layer_index is None else self.layer_index.modules
        later = [module for rank, module in ranked_modules if rank > start]
        self._outputs |= {**outputs, **{module: [] for module in later}}

        def record(module: nn.Module, _: Any, output: Any) -> None:  # without attention weights: large and not needed
            weights = self._weights
            self._outputs[module].append(output if weights is None else _replace_tensor(output, weights, None))

        return watch_modules(later, record)

    def _gate_contexts(self, attention_site: AttentionSite, call: AttentionCall, context: Tensor) -> Tensor | None:
        site_layer = attention_site.site_layer
        if (gate := self._gates.get(site_layer)) is None:
            return None
        turn = self._turns[site_layer]
        self._turns[site_layer] += 1
        if self._start is not None and (self.layer_index is None or self.layer_index.of[site_layer].rank > self._start):
            self.contexts.setdefault(site_layer, []).append(context)
            self._weights = call.made_weights
        if bool((gate == 1).all()):
            return None
        base = self.instead[site_layer][turn] if site_layer in self.instead else None
        scale = gate.to(context)[:, None, None]
        return context * scale if base is None else base + (context - base) * scale


def _replace_tensor(output: Any, old: Tensor, new: Tensor | None) -> Any:
    """An output (tensors in tuples or lists) with one tensor replaced; the same object if the tensor is not in it."""
    if isinstance(output, Tensor):
        is_old = output.data_ptr() == old.data_ptr() and output.shape == old.shape and output.stride() == old.stride()
        return new if is_old else output
    if type(output) in (tuple, list):
        parts = [_replace_tensor(part, old, new) for part in output]
        return type(output)(parts) if any(a is not b for a, b in zip(parts, output, strict=True)) else output
    return output


def stored_outputs(outputs: Mapping[nn.Module, list[Any]]) -> AbstractContextManager[None]:
    """Within the block these modules return the given outputs, one for each call, instead of computing them."""
    return replaced_forwards(
        {module: partial(lambda stored, *_, **__: next(stored), iter(calls)) for module, calls in outputs.items()}
    )


def resumable_layers(model: nn.Module) -> LayerIndex | None:
    """The layer index of a model. Returns None without one, or if partial passes give other results than full ones.

    They are compared on a probe of a few tokens, with one head of every (site, layer) closed in turn.
    """
    layer_index = index_layers(model)
    if layer_index is None or hasattr(model, "declared_attention"):
        return layer_index
    inputs = probe_inputs(model)
    all_open = {site_layer: torch.ones(heads) for site_layer, heads in find_attention(model).layout.items()}
    tolerance = 0.05 if is_half(computing_dtype(model)) else 1e-4

    def work() -> Tensor:
        output: Tensor = base_of(model)(**inputs)[0]
        return output.float()

    partly, wholly = PrefixCache(model, work, layer_index), PrefixCache(model, work, None)
    with suppress_warnings(), torch.no_grad(), partly.activate(), wholly.activate():
        partly.value(all_open, keep=True)
        for site_layer in layer_index.of:
            gate = all_open[site_layer].clone()
            gate[0] = 0.0
            expected = wholly.value({**all_open, site_layer: gate})
            try:
                output = partly.value({**all_open, site_layer: gate})
            except Exception:  # a layer reads what a layer below would have left for it (keys and values in Gemma3n)
                return None
            if not (output - expected).abs().max() <= tolerance * expected.abs().max():
                return None
    return layer_index


@dataclass
class SharedLayers:
    """Outputs of layers on the batches of one text, for copies of a model with altered later layers.

    `outputs` has a list entry for each call, by batch and layer, up to `max_bytes` in all.
    """

    layer_index: LayerIndex
    outputs: dict[int, dict[nn.Module, list[Any]]] = field(default_factory=dict)
    max_bytes: int = 1 << 31

    @classmethod
    def of(cls, model: nn.Module) -> SharedLayers | None:
        """An empty cache for a model. Returns None if the model has no usable layer index."""
        return cls.for_texts(model, 1)[0]

    @classmethod
    def for_texts(cls, model: nn.Module, count: int) -> list[SharedLayers | None]:
        """As `of`, one cache for each of several texts; the model is probed once."""
        layer_index = resumable_layers(model)
        return [None if layer_index is None else cls(layer_index) for _ in range(count)]

    def below(self, site_layers: Collection[SiteLayer]) -> list[nn.Module]:
        """The layers before the first of `site_layers`; all layers if there are none."""
        first = min((self.layer_index.of[site_layer].rank[:2] for site_layer in site_layers), default=None)
        return [layer for rank, layer in self.layer_index.layers if first is None or rank[:2] < first]

    def forget(self, site_layers: Collection[SiteLayer]) -> None:
        """Drop the outputs of the layers at `site_layers` and after them, because the model has changed there."""
        stay = self.below(site_layers)
        for outputs in self.outputs.values():
            for layer in outputs.keys() - stay:
                del outputs[layer]

    @contextmanager
    def passing(self, batch: int, site_layers: Collection[SiteLayer]) -> Iterator[None]:
        """Within the block a copy altered at `site_layers` can be run on a batch without recomputing earlier layers."""
        outputs = self.outputs.setdefault(batch, {})
        below = self.below(site_layers)
        missing = [layer for layer in below if layer not in outputs]
        size = sum(part.nbytes for part in tree_leaves(self.outputs) if isinstance(part, Tensor))
        new_layers = missing if size < self.max_bytes else []
        keep = watch_modules(new_layers, lambda layer, _, output: outputs.setdefault(layer, []).append(output))
        with stored_outputs({layer: outputs[layer] for layer in below if layer in outputs}), keep:
            yield
