"""Reconstruction after a refit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from headscope.data.encoded import Batch
from headscope.engine.faithfulness.orders import Scores
from headscope.formats.base import Checkpoint
from headscope.model.discovery import eval_mode
from headscope.model.threads import threads_for_pass
from headscope.pruning.closed_form.compensate import MEASURED
from headscope.pruning.closed_form.moments import ContextTap, Place, text_batches
from headscope.pruning.closed_form.output_projections import StreamTap
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion
from headscope.pruning.ranking.scoring import error_when_gone, for_all_heads, moments_of, reached_modules, removal_order


@criterion
class OptimalBrainSurgeon(Criterion):
    """Heads whose part of the layer's output the others cannot take over stay (block optimal brain surgeon).

    The squared error of a module's output after W_O was refitted without the head (Hassibi and Stork 1993 for blocks),
    times E 1/‖h‖² over tokens, where h is the residual stream that the output has been added to: the next norm sees
    what changes relative to its size. In pre-norm models that size grows from layer to layer, and as they are errors of
    the first layers would always be the smallest. h is read on the first 128 sentences of the text. Where one module's
    cannot be told (its output goes through a norm first) errors of all are compared as they are. Relative to the energy
    of each module's output, as is often done, they chose worse in every case tried (benchmarks/pruning).
    Greedy: each head is judged with all cheaper ones gone and the rest refitted, so the score is the sum of errors once
    it goes, and scoring again in steps adds nothing.
    """

    name = "obs"
    summary = "error of the layer's output without the head, the other heads refitted (optimal brain surgeon)"
    why = "the other heads, refitted, make up for them best"
    changes = False
    refits = True

    def scores(self, context: ScoringContext) -> Scores:
        modules, corpus = list(reached_modules(context, moments_of(context))), context.corpus
        assert corpus is not None, "moments_of refuses this"
        texts = text_batches(context.checkpoint, corpus.first(MEASURED), context.batching)
        inverse = inverse_sizes(context.checkpoint, texts)
        scales = [sum(inverse.get(place, 0.0) for place in projection.places) for projection, _ in modules]
        if not all(scales):
            scales = [1.0] * len(modules)
        orders = [
            (projection, removal_order(context, projection, sums, weight=scale**0.5 * projection.weight))
            for scale, (projection, sums) in zip(scales, modules, strict=True)
        ]
        return for_all_heads(context, error_when_gone(orders))


def inverse_sizes(checkpoint: Checkpoint, texts: Iterable[Batch]) -> dict[Place, float]:
    """E 1/‖h‖² over real tokens, h [d] being the residual stream with the output of a (site, layer) added to it.

    Without places of which that cannot be told.
    """
    reader = _StreamReader(checkpoint)
    for batch in texts:
        reader.add(batch.to(checkpoint.device))
    sizes = {place: torch.cat(parts) for place, parts in reader.sizes.items() if place not in reader.untold}
    return {place: float((1 / each[each > 0]).mean()) for place, each in sizes.items() if each.any()}


class _StreamReader(ContextTap):
    """Keeps ‖h‖² [n] of every place, batch after batch, and the places of which no stream can be told."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.tap = StreamTap()
        self.called: list[Place] = []
        self.outputs: list[Tensor] = []
        self.sizes: dict[Place, list[Tensor]] = {}
        self.untold: set[Place] = set()

    def count(self, place: Place, contexts: Tensor, heads: int) -> None:
        """Note which place the next output is of."""
        self.called.append(place)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Also copies outputs, before the tap follows what they are added to: it would follow the copies."""
        modules = set(self.owners.values())
        with super().observing(), ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_hook(self._output).remove)
            stack.enter_context(self.tap.observing(modules))
            yield

    def _output(self, _: nn.Module, __: object, output: Tensor) -> None:
        self.outputs.append(output.clone())

    def add(self, batch: Batch) -> None:
        """One pass over a batch."""
        self.called, self.outputs, model = [], [], self.checkpoint.model
        with self.observing(), eval_mode(model), threads_for_pass(model, batch.positions):
            self.read(batch)
        streams = self.tap.streams()
        if len(self.called) != len(streams):  # W_O at work outside attention, or in parts
            self.untold.update(self.owners)
            return
        for place, output, stream in zip(self.called, self.outputs, streams, strict=True):
            if stream is None:
                self.untold.add(place)
            else:
                self.sizes.setdefault(place, []).append(self.rows(place, output + stream).square().sum(dim=1))
