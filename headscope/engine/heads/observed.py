"""From a call of `attend` to the `HeadBatch` that analyses see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headscope.data.encoded import Batch, Side
from headscope.distributed import upload
from headscope.engine.heads.head_batch import HeadBatch, sides
from headscope.engine.heads.rows import AttentionRows, DenseRows
from headscope.engine.heads.shared import SharedTensors
from headscope.engine.heads.streamed_rows import StreamedRows
from headscope.errors import CheckpointError
from headscope.heads import Site
from headscope.model.attention import AttentionCall
from headscope.model.discovery import AttentionSite
from headscope.model.streaming.statistics import ScoreBlocks
from headscope.model.streaming.visibility import Visibility


@dataclass
class ObservedBatch:
    """A batch on its way through the model; `keep_special`: special tokens count as queries and keys too."""

    batch: Batch
    keep_special: bool
    shared: SharedTensors = field(default_factory=SharedTensors)

    def heads(self, attention_site: AttentionSite, call: AttentionCall) -> HeadBatch:
        """The heads of one call; CheckpointError where its positions are not those of the text."""
        batch = self._batch_on(call.context.device)
        query_side, key_side = sides(batch, attention_site.site)
        expected = (query_side.ids.shape[1], key_side.ids.shape[1])
        size = (call.query.shape[2], call.key.shape[2])
        if size != expected:
            raise CheckpointError(
                f"{attention_site.site}.{attention_site.layer} attends from {size[0]} to "
                f"{size[1]} positions where the text has {expected[0]} and {expected[1]}; "
                "it cannot be analysed token by token"
            )
        host_queries, host_keys, queries, keys = self._counted(batch, attention_site.site)
        return HeadBatch(
            site=attention_site.site,
            layer=attention_site.layer,
            rows=self._rows(call, attention_site.site, keys),
            context=precise(call.context.detach()),
            value=call.value.detach(),
            queries=queries,
            keys=keys,
            query_side=query_side,
            key_side=key_side,
            batch=batch,
            of_batch=self.shared,
            of_rows=self.shared,
            host_queries=host_queries,
            host_keys=host_keys,
        )

    def joined(self, attention_sites: Sequence[AttentionSite], calls: Sequence[AttentionCall]) -> HeadBatch:
        """The heads of calls of one site that see the same keys, side by side."""
        first = self.heads(attention_sites[0], calls[0])
        if len(calls) == 1:
            return first
        assert isinstance(first.rows, DenseRows)
        weights = torch.cat([call.weights.detach() for call in calls], dim=1)
        contexts = torch.cat([call.context.detach().transpose(1, 2) for call in calls], dim=2)  # as they lie in memory
        return replace(
            first,
            rows=replace(first.rows, weights=precise(weights)),
            context=precise(contexts).transpose(1, 2),
            value=torch.empty(0),
            layers=tuple(attention_site.layer for attention_site in attention_sites),
        )

    def sees(self, attention_site: AttentionSite, call: AttentionCall) -> tuple[object, ...]:
        """What is the same for calls that can be joined."""
        return attention_site.site, call.query.shape, call.key.shape[2], id(call.mask), call.context.device

    def _batch_on(self, device: torch.device) -> Batch:
        """The batch where a layer is, which is not where others are if the model is spread over several devices."""
        if device == self.batch.source.ids.device:
            return self.batch
        return self.shared.get(f"batch/{device}", self.batch, lambda: self.batch.to(device))

    def _counted(self, batch: Batch, site: Site) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which queries [b t] and keys [b s] count, on the CPU and on the device: the same for all layers of a site."""

        def make() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            counted = [side.real if self.keep_special else side.real & ~side.special for side in sides(host, site)]
            queries, keys = counted[0] & counted[1].any(dim=-1, keepdim=True), counted[1]
            return queries, keys, upload(queries, device), upload(keys, device)

        host, device = batch.on_host, batch.source.ids.device
        return self.shared.get(f"counted/{site}", batch, make)

    def _rows(self, call: AttentionCall, site: Site, keys: Tensor) -> AttentionRows:
        t, device = call.query.shape[2], call.context.device
        key_side = sides(self._batch_on(device), site)[1]
        name = f"{id(key_side)}/{t}"
        if call.made_weights is not None:
            visible = self.shared.get(f"visible/{name}", call.mask, lambda: _visible(call, key_side))
            return DenseRows(precise(call.made_weights.detach()), visible, keys, self.shared)
        size, real = (len(call.query), t, call.key.shape[2]), sides(self.batch.on_host, site)[1].real
        visibility = self.shared.get(
            f"visibility/{name}", call.mask, lambda: Visibility.of(call.mask, size, device=device)
        )
        seen = self.shared.get(f"seen/{name}", visibility, lambda: visibility.without_padding(real))
        options = call.options
        scores = ScoreBlocks.of(
            call.query.detach(),
            call.key.detach(),
            visibility,
            scaling=options.scaling,
            softcap=options.softcap,
            position_bias=None if options.position_bias is None else options.position_bias.detach(),
            sinks=None if options.sinks is None else options.sinks.detach(),
        )
        return StreamedRows(scores, seen, keys, self.shared)


def precise(values: Tensor) -> Tensor:
    """At least float32: a sum of a few hundred weights in half precision has an error in the third digit."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _visible(call: AttentionCall, key_side: Side) -> Tensor:
    """Where each query may look [b t s]: what the model's mask leaves, without padding."""
    real = key_side.real[:, None, :].expand(-1, call.query.shape[2], -1)
    if call.mask is None:
        return real
    if call.mask.dtype == torch.bool:
        return call.mask[:, 0] & real
    return (call.mask[:, 0] > torch.finfo(call.mask.dtype).min / 2) & real
