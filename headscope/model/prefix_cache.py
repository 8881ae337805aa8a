"""Passes over one batch that differ in head gates only: what lies below the first change is not computed again.

A pass can be kept. The next one then takes from it the outputs of all layers before the first (site, layer)
whose gates differ; in that layer the attention gives what it gave, and its output projection's result is
moved by what the changed heads add to it, step of the gate · context · W_O[head]. All above runs as ever, with
its own gates. Where a model has no seats (see `headscope.model.layer_index`), every pass is computed in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headscope.model.attention import AttentionCall, tapped
from headscope.model.discovery import (
    CallTracker,
    DeclaresAttention,
    base_of,
    eval_mode,
    find_attention,
    probe_inputs,
    track_calls,
)
from headscope.model.interface import is_half, suppress_warnings
from headscope.model.layer_index import LayerEntry, LayerIndex, Rank, Where, index_layers

BEFORE_ALL: Rank = (-1, 0, 0)
EMBEDDINGS: Rank = (-1, 1, 0)
_ABSENT = object()


@dataclass
class CachedPrefix:
    """What a pass left behind, call by call: outputs of modules, contexts before gates, its gates and result."""

    outputs: dict[nn.Module, list[Any]] = field(default_factory=dict)
    contexts: dict[Where, list[Tensor]] = field(default_factory=dict)
    gates: dict[Where, Tensor] = field(default_factory=dict)
    value: Tensor | None = None


@dataclass
class PassPlan:
    """The pass that is on its way: its gates, and after which point what is computed is kept (None: nothing)."""

    gates: Mapping[Where, Tensor]
    keep_after: Rank | None = None
    turns: dict[Where, int] = field(default_factory=dict)
    weights: Tensor | None = None


@dataclass
class PrefixCache:
    """Runs `work` (forward passes of `model` on one batch, the same ones every time) under given gates.

    `work` must not need gradients. `instead` has, for each (site, layer), what a closed head gives in each call
    in place of its context: contexts that broadcast to [b h t k] (default: nothing). Values are asked for within
    `with rerun.entered():`, where the model is in evaluation mode and goes through `attend`.
    """

    model: nn.Module
    work: Callable[[], Tensor]
    layer_index: LayerIndex | None
    instead: Mapping[Where, list[Tensor]] = field(default_factory=dict)
    kept: CachedPrefix = field(default_factory=CachedPrefix)
    _now: PassPlan = field(default_factory=lambda: PassPlan({}), init=False, repr=False)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block passes can be run; the model is as it was after it."""
        with eval_mode(self.model), track_calls(self.model) as tracker:

            def tap(call: AttentionCall, context: Tensor) -> Tensor | None:
                return self._see(tracker, call, context)

            with tapped(tap):
                yield

    def value(self, gates: Mapping[Where, Tensor], *, keep: bool = False) -> Tensor:
        """What `work` gives under gates [h] of (site, layer)s, the same ones every time.

        With `keep` later passes start from this one.
        """
        kept = self.kept
        if kept.value is None:
            return self._wholly(gates, keep=keep)
        changed = [where for where, gate in gates.items() if not torch.equal(gate, kept.gates[where])]
        if not changed:
            return kept.value
        return (
            self._wholly(gates, keep=keep)
            if self.layer_index is None
            else self._partly(self.layer_index, gates, changed, keep)
        )

    def _wholly(self, gates: Mapping[Where, Tensor], *, keep: bool) -> Tensor:
        with self._passing(gates, BEFORE_ALL if keep else None):
            return self._finish(gates, self.work(), keep=keep)

    def _partly(
        self, layer_index: LayerIndex, gates: Mapping[Where, Tensor], changed: list[Where], keep: bool
    ) -> Tensor:
        first = min(changed, key=lambda where: layer_index.of[where].rank)
        entry, kept = layer_index.of[first], self.kept
        moved = self._moved(entry, first, gates[first])
        results = _with_moved(entry, kept, moved)
        if results is None:
            return self._wholly(gates, keep=keep)
        answers = {layer: kept.outputs[layer] for rank, layer in layer_index.layers if rank[:2] < entry.rank[:2]}
        answers |= {part: kept.outputs[part] for part in layer_index.embeddings}
        for other in layer_index.of.values():
            if entry.rank[:2] == other.rank[:2] and other.rank < entry.rank:
                answers |= {module: kept.outputs[module] for module in (other.attention, other.output)}
        answers |= {entry.output: moved, entry.attention: results}
        with self._passing(gates, entry.rank if keep else None), stored_output(answers):
            value = self.work()
        if keep:
            kept.outputs |= {entry.output: moved, entry.attention: results}
        return self._finish(gates, value, keep=keep)

    def _finish(self, gates: Mapping[Where, Tensor], value: Tensor, *, keep: bool) -> Tensor:
        if keep:
            self.kept.gates, self.kept.value = dict(gates), value
        return value

    def _moved(self, entry: LayerEntry, where: Where, gate: Tensor) -> list[Tensor]:
        """The results of an output projection under another gate, call by call."""
        step = gate - self.kept.gates[where]
        heads = step.nonzero()[:, 0]
        found = []
        for turn, result in enumerate(self.kept.outputs[entry.output]):
            context = self.kept.contexts[where][turn][:, heads]
            if where in self.instead:
                context = context - self.instead[where][turn][:, heads]
            found.append(result + entry.through(context * step[heads].to(context)[:, None, None], heads))
        return found

    def _see(self, tracker: CallTracker, call: AttentionCall, context: Tensor) -> Tensor | None:
        """Keep and gate the contexts of one call."""
        now, attention_site = self._now, tracker.attention_site(call.module)
        if attention_site is None or (attention_site.site, attention_site.layer) not in now.gates:
            return None
        where = (attention_site.site, attention_site.layer)
        turn = now.turns[where] = now.turns.get(where, -1) + 1
        if now.keep_after is not None and (
            self.layer_index is None or self.layer_index.of[where].rank > now.keep_after
        ):
            self.kept.contexts.setdefault(where, []).append(context)
            now.weights = call.weights
        gate = now.gates[where]
        if bool((gate == 1).all()):
            return None
        base = self.instead[where][turn] if where in self.instead else None
        scale = gate.to(context)[:, None, None]
        return context * scale if base is None else base + (context - base) * scale

    @contextmanager
    def _passing(self, gates: Mapping[Where, Tensor], keep_after: Rank | None) -> Iterator[None]:
        """Within the block heads are gated, and what is computed after `keep_after` is kept."""
        self._now = PassPlan(gates, keep_after)
        try:
            with ExitStack() as stack:
                if keep_after is not None:
                    self._keep(keep_after, stack)
                yield
        finally:
            self._now = PassPlan({})

    def _keep(self, after: Rank, stack: ExitStack) -> None:
        """Hooks that keep outputs; what was kept of later parts is thrown away first."""
        self.kept.value = None  # an error on the way leaves nothing that could be taken for a whole pass
        if self.layer_index is None:
            self.kept.contexts.clear()
            return
        watched = [*self.layer_index.layers, *((EMBEDDINGS, part) for part in self.layer_index.embeddings)]
        for where, entry in self.layer_index.of.items():
            watched += [(entry.rank, entry.attention), (entry.rank, entry.output)]
            if entry.rank > after:
                self.kept.contexts.pop(where, None)
        for rank, module in watched:
            if rank > after:
                self.kept.outputs[module] = []
                stack.callback(module.register_forward_hook(self._note).remove)

    def _note(self, module: nn.Module, _: Any, output: Any) -> None:
        """Keep an output, without the attention weights, which are its largest part and which no layer reads."""
        weights = self._now.weights
        self.kept.outputs[module].append(output if weights is None else _replaced(output, weights, None))


def _with_moved(entry: LayerEntry, kept: CachedPrefix, moved: list[Tensor]) -> list[Any] | None:
    """Outputs of an attention module, the projection's result in them replaced; None where it is not among them."""
    results: list[Any] = kept.outputs[entry.attention]
    if not entry.inside:
        return results
    replaced = [
        _replaced(output, old, new) for output, old, new in zip(results, kept.outputs[entry.output], moved, strict=True)
    ]
    return replaced if all(new is not old for new, old in zip(replaced, results, strict=True)) else None


def _replaced(output: Any, old: Tensor, new: Tensor | None) -> Any:
    """An output of tensors and tuples with one tensor replaced; the same object where it is not in there."""
    if isinstance(output, Tensor):
        same = output.data_ptr() == old.data_ptr() and output.shape == old.shape and output.stride() == old.stride()
        return new if same else output
    if type(output) in (tuple, list):
        parts = [_replaced(part, old, new) for part in output]
        return type(output)(parts) if any(a is not b for a, b in zip(parts, output, strict=True)) else output
    return output


@contextmanager
def stored_output(answers: Mapping[nn.Module, list[Any]]) -> Iterator[None]:
    """Within the block these modules compute nothing and give these outputs, one a call."""
    before: dict[nn.Module, Any] = {}
    try:
        for module, outputs in answers.items():
            before[module] = module.__dict__.get("forward", _ABSENT)
            module.__dict__["forward"] = _replies(outputs)
        yield
    finally:
        for module, own in before.items():
            if own is _ABSENT:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


def _replies(outputs: list[Any]) -> Callable[..., Any]:
    left = iter(outputs)
    return lambda *_, **__: next(left)


def resumable_layers(model: nn.Module) -> LayerIndex | None:
    """The seats of a model; None where it has none, or where passes that start in the middle come out different.

    Tried on a probe of a few tokens, with one head of every (site, layer) closed in turn.
    """
    layer_index = index_layers(model)
    if layer_index is None or isinstance(model, DeclaresAttention):
        return layer_index
    inputs = probe_inputs(model)
    every = {where: torch.ones(heads) for where, heads in find_attention(model).layout.items()}
    tolerance = 0.05 if is_half(next(model.parameters()).dtype) else 1e-4

    def work() -> Tensor:
        found: Tensor = base_of(model)(**inputs)[0]
        return found.float()

    partly, wholly = PrefixCache(model, work, layer_index), PrefixCache(model, work, None)
    with suppress_warnings(), torch.no_grad(), partly.entered(), wholly.entered():
        partly.value(every, keep=True)
        for where in layer_index.of:
            gate = every[where].clone()
            gate[0] = 0.0
            found, expected = (each.value({**every, where: gate}) for each in (partly, wholly))
            if not (found - expected).abs().max() <= tolerance * expected.abs().max():
                return None
    return layer_index
