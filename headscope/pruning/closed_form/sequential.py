"""Refit module after module, each for the inputs that it gets from earlier modules that are refitted already.

The target of a module is the intact one's output at the same token (as in ZipLM, Kurtić et al. 2023, and others), plus
what the residual stream has lost there, so that it also makes up for errors of earlier modules. Modules from the first
one that loses heads on are refitted, even if they lose none; if requested, outputs of feed-forward blocks too. Blocks
can also follow refits of all attention modules at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, SiteLayer
from headscope.model.discovery import eval_mode
from headscope.model.interface import watch_modules
from headscope.model.prefix_cache import SharedLayers
from headscope.pruning.closed_form.compensate import ModuleRefit, RefittedCopy, heads_by_module, unreached_error
from headscope.pruning.closed_form.moments import ContextTap, text_batches
from headscope.pruning.closed_form.output_projections import AllRead, OutputProjection, StreamTap, feed_forward_outputs
from headscope.pruning.closed_form.refit import SUMS, PairMoments, SolvedRefit, interpolate, refit_to_targets
from headscope.pruning.options.shared import Refit


class ModuleCall(NamedTuple):
    """One call of a module: its inputs [n m], its output [n d], and the stream [n d] to which the output is added.

    `stream` is None where it cannot be told (the output goes through a norm first).
    """

    site_layer: SiteLayer
    inputs: Tensor
    output: Tensor
    stream: Tensor | None


def module_calls(checkpoint: Checkpoint, texts: Iterable[Batch]) -> Iterator[ModuleCall]:
    """The calls of attention modules over some batches, at tokens that are no padding, in float64."""
    for batch in texts:
        yield from CallReader(checkpoint).of(batch.to(checkpoint.device))


class CallReader(ContextTap):
    """Reads the calls of all attention modules in a batch, or those of one `part`, after which the pass ends."""

    def __init__(self, checkpoint: Checkpoint, part: OutputProjection | None = None) -> None:
        self.block = part.site_layers[-1] if part is not None and not part.units else None
        site_layers = () if part is None or self.block else part.site_layers
        super().__init__(checkpoint, None if part is None else site_layers)
        self.modules = set(self.owners.values()) if part is None else {checkpoint.model.get_submodule(part.owner)}
        self.tap = StreamTap(calls=1 if self.block else len(site_layers))
        self.inputs: list[tuple[SiteLayer, Tensor]] = []
        self.outputs: list[Tensor] = []

    def count(self, site_layer: SiteLayer, contexts: Tensor, heads: int) -> None:
        """Keep the contexts of a layer, whose output follows."""
        self.inputs.append((site_layer, contexts))

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Within the block outputs are copied too, before the tap sees them, as it would follow the copies."""

        def record(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if self.block is not None:
                self.inputs.append((self.block, self.rows(self.block, inputs[0])))
            self.outputs.append(output.clone())

        contexts = super().observing() if self.block is None else nullcontext()
        with contexts, watch_modules(self.modules, record), self.tap.observing(self.modules):
            yield

    def of(self, batch: Batch) -> list[ModuleCall]:
        """The calls in one batch, in order."""
        self.inputs, self.outputs = [], []
        with self.observing(), eval_mode(self.checkpoint.model), suppress(AllRead):
            self.read(batch)
        self.counting = False
        streams = self.tap.streams()
        if len(self.inputs) != len(streams):  # W_O is also called outside attention, or on parts of its input
            nothing = torch.empty(0, 0)
            return [ModuleCall(site_layer, inputs, nothing, None) for site_layer, inputs in self.inputs]
        return [
            ModuleCall(at, inputs, self.rows(at, output), None if stream is None else self.rows(at, stream))
            for (at, inputs), output, stream in zip(self.inputs, self.outputs, streams, strict=True)
        ]


BLOCK_STRENGTH = 0.5
"""The strength of refits of blocks alone: whole refits are better on the calibration text, and worse on others."""
BLOCK_DAMPING = 0.5
"""The least damping of feed-forward blocks: with four times the columns of W_O they overfit the calibration text."""


def sequential_refits(
    checkpoint: Checkpoint,
    corpus: Corpus,
    heads: Collection[HeadId],
    options: Refit | None = None,
    *,
    at_once: Collection[ModuleRefit] = (),
    merged_copy: Checkpoint | None = None,
    residual: bool = True,
    batching: BatchingOptions | None = None,
    anchors: Sequence[Corpus] = (),
) -> list[ModuleRefit]:
    """The refits of all modules from the first one that loses heads on, in the order of the model's calls.

    - `at_once`: refits of attention modules that are made already; then only feed-forward blocks are refitted.
    - `merged_copy`: a model with merged key/value groups; all its modules are refitted to the intact outputs.
    - `residual`: a module also makes up for what the residual stream has lost.
    - `anchors`: texts beside the corpus, of equal weight each.
    """
    options = options or Refit()
    call_order = [(site.site, site.layer) for site in checkpoint.attention_sites.order]
    modules = sorted(heads_by_module(checkpoint, heads), key=lambda module: call_order.index(module[0].site_layers[0]))
    losing = (number for number, (_, module_heads) in enumerate(modules) if module_heads or merged_copy is not None)
    first = next(losing, len(modules))
    blocks: Sequence[OutputProjection] = ()
    if options.feed_forward and modules[first:]:
        blocks = feed_forward_outputs(checkpoint, next(iter(text_batches(checkpoint, corpus, batching))))
    copy = RefittedCopy(merged_copy or checkpoint, [*(projection for projection, _ in modules), *blocks])
    for module in at_once:
        copy.put(module.projection, module.refit)
    models = checkpoint, checkpoint.with_model(copy.model)
    texts = [corpus, *anchors]
    prefixes = list(zip(*(SharedLayers.for_texts(model.model, len(texts)) for model in models), strict=True))
    refits = []
    parts: list[tuple[OutputProjection, frozenset[HeadId]]] = []
    for projection, module_heads in modules[first:]:  # each followed by its blocks
        module_blocks = (
            (block, frozenset[HeadId]()) for block in blocks if block.site_layers == projection.site_layers
        )
        parts += [*([] if at_once else [(projection, module_heads)]), *module_blocks]
    for part, part_heads in parts:
        pairs = [
            _pair_moments(models, text_batches(checkpoint, text, batching), part, part_heads, residual, prefix)
            for text, prefix in zip(texts, prefixes, strict=True)
        ]
        pair = _mean(pairs)
        strength = BLOCK_STRENGTH if at_once else 1.0
        refits.append(_refit(part, pair, part_heads, options, is_merged=merged_copy is not None, strength=strength))
        copy.put(part, refits[-1].refit)
        for layers in filter(None, (pruned for _, pruned in prefixes)):
            layers.forget(part.site_layers)
    return refits


def _mean(pairs: Sequence[PairMoments]) -> PairMoments:
    """The moments of several texts with equal weights, as sums over as many tokens as the first has."""
    tokens, nonempty = pairs[0].tokens, [pair for pair in pairs if pair.tokens]
    if not tokens or len(nonempty) < 2:
        return pairs[0]
    sums = {name: sum(tokens / pair.tokens / len(nonempty) * getattr(pair, name) for pair in nonempty) for name in SUMS}
    all_streams = all(pair.streams == pair.tokens for pair in nonempty)
    return PairMoments(**sums, tokens=tokens, streams=tokens if all_streams else 0)


def _refit(
    part: OutputProjection,
    pair: PairMoments,
    heads: Collection[HeadId],
    options: Refit,
    *,
    is_merged: bool,
    strength: float,
) -> ModuleRefit:
    """The refit of one module to its targets, with its errors; ConfigError where the text does not reach it."""
    if not pair.tokens:
        raise unreached_error(part.site_layers[0])
    weight, columns = part.weight, part.columns(heads)
    is_block = not part.units
    affine = part.has_bias or (options.add_bias and not is_block)
    share = max(options.share, BLOCK_DAMPING) if is_block else options.share
    refit = refit_to_targets(weight, columns, pair, affine=affine, share=share)
    no_change = SolvedRefit(weight, weight.new_zeros(len(weight)))
    refit = interpolate(no_change, refit, strength)
    energy, error_without = pair.energy / pair.tokens or 1.0, pair.lost_energy / pair.tokens
    if is_merged or is_block:
        error_without = _error(no_change, pair)
    error, residual = _error(refit, pair) / energy, pair.streams == pair.tokens
    return ModuleRefit(part, refit, error, error_without / energy, affine, residual)


def _error(refit: SolvedRefit, pair: PairMoments) -> float:
    """E‖t − V x̃ − s‖² for the refitted V and the shift s."""
    n, weight, shift = pair.tokens, refit.weight, refit.shift
    mean_residual = (pair.target - weight @ pair.pruned) / n  # E t − V E x̃ [d]
    squares = pair.target_energy + float(((weight @ pair.products) * weight).sum())
    cross_term = float((weight.T * pair.cross).sum())
    return (squares - 2 * cross_term) / n + float(shift @ shift - 2 * shift @ mean_residual)


def _pair_moments(
    models: tuple[Checkpoint, Checkpoint],
    texts: Iterable[Batch],
    part: OutputProjection,
    heads: Collection[HeadId],
    residual: bool,
    prefixes: Sequence[SharedLayers | None],
) -> PairMoments:
    """The moments of one module over a text, from both models; `prefixes` cache the layers below it."""
    readers = [CallReader(model, part) for model in models]
    weight, columns_gone = part.weight.to(readers[0].device), part.columns(heads)
    pair = PairMoments.zero(weight.shape[1], weight.shape[0])
    for number, batch in enumerate(texts):
        on_device, calls = batch.to(models[0].device), []
        for reader, layers in zip(readers, prefixes, strict=True):
            with nullcontext() if layers is None else layers.passing(number, part.site_layers):
                calls.append(reader.of(on_device))
        for intact, pruned in zip(*calls, strict=True):
            has_streams = residual and intact.stream is not None and pruned.stream is not None
            removed_output = intact.inputs[:, columns_gone] @ weight[:, columns_gone].T
            stream_loss = intact.stream - pruned.stream if has_streams else None
            pair.add(pruned.inputs, intact.inputs @ weight.T, removed_output, stream_loss)
    return pair
