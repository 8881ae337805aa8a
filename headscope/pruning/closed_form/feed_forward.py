"""The second linear layer of feed-forward blocks, for any model: what is added to the residual stream between modules.

It is no table of architectures either: after an attention module, a linear layer whose output is added to the residual
stream before anything else reads it (`residual_stream`), once a pass and for all positions. Experts, which see some of
the positions, and layers that share a matrix have none.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site
from headscope.model.discovery import eval_mode
from headscope.model.projections import WeightOwners
from headscope.model.storage.stored_weights import is_plain, matrix_of
from headscope.pruning.closed_form.output_projections import output_projections
from headscope.pruning.closed_form.residual_stream import StreamTap


@dataclass(frozen=True)
class FeedForwardOutput:
    """The last linear layer of a feed-forward block, `owner` in the model; `places` has the attention before it."""

    places: tuple[tuple[Site, int], ...]
    owner: str
    module: nn.Module
    mixing_folded: bool = False

    @property
    def weight(self) -> Tensor:
        """W [d m] in float64."""
        matrix = matrix_of(self.module)
        return (matrix if isinstance(self.module, nn.Linear) else matrix.T).cpu().double()

    @property
    def has_bias(self) -> bool:
        """Whether it has a bias."""
        return isinstance(getattr(self.module, "bias", None), Tensor)

    def columns(self, heads: Collection[HeadId]) -> Tensor:
        """No columns are those of heads."""
        return torch.empty(0, dtype=torch.long)


def feed_forward_outputs(checkpoint: Checkpoint, batch: Batch) -> list[FeedForwardOutput]:
    """Those that a pass over a batch reaches, in the order in which they are called."""
    owners = WeightOwners(checkpoint.model).named()
    attention = {owners[projection.owner]: projection.places for projection in output_projections(checkpoint)}
    names = {module: name for name, module in checkpoint.model.named_modules()}
    linear = [
        part
        for part in names
        if isinstance(part, nn.Linear | Conv1D) and is_plain(part) and part not in attention and part.weight.numel()
    ]
    calls: list[tuple[nn.Module, tuple[int, ...]]] = []

    def called(module: nn.Module, _: object, output: Tensor) -> None:
        calls.append((module, tuple(output.shape[:-1])))

    tap, batch = StreamTap(), batch.to(checkpoint.device)
    with eval_mode(checkpoint.model), torch.no_grad(), ExitStack() as stack:
        for module in (*attention, *linear):
            stack.callback(module.register_forward_hook(called).remove)
        with tap.observing(linear):
            checkpoint.forward(batch)
    streams = iter(tap.streams())
    found, place = list[FeedForwardOutput](), ()
    counts = [module for module, _ in calls]
    for module, shape in calls:
        if module in attention:
            place = attention[module]
            continue
        added = next(streams) is not None
        if added and place and counts.count(module) == 1 and torch.Size(shape).numel() == positions(batch, place[0][0]):
            found.append(FeedForwardOutput(place, names[module], module))
    return found


def positions(batch: Batch, site: Site) -> int:
    """Positions of the side of a batch that a site reads, padding too."""
    text = batch.source if batch.target is None or site is Site.ENCODER_SELF else batch.target
    return text.real.numel()
