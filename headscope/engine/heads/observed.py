"""From a call of `attend` to the `HeadBatch` that analyses see."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headscope.data.encoded import Batch, Side
from headscope.engine.heads.head_batch import HeadBatch
from headscope.engine.heads.rows import DenseRows, Rows
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
        text = self.batch.source if self.batch.target is None else self.batch.target
        query_side = self.batch.source if attention_site.site is Site.ENCODER_SELF else text
        key_side = text if attention_site.site is Site.DECODER_SELF else self.batch.source
        expected = (query_side.ids.shape[1], key_side.ids.shape[1])
        size = (call.query.shape[2], call.key.shape[2])
        if size != expected:
            raise CheckpointError(
                f"{attention_site.site}.{attention_site.layer} attends from {size[0]} to "
                f"{size[1]} positions where the text has {expected[0]} and {expected[1]}; "
                "it cannot be analysed token by token"
            )
        queries, keys = self._counted(query_side, key_side)
        return HeadBatch(
            site=attention_site.site,
            layer=attention_site.layer,
            rows=self._rows(call, key_side, keys),
            context=precise(call.context.detach()),
            value=call.value.detach(),
            queries=queries,
            keys=keys,
            query_side=query_side,
            key_side=key_side,
            batch=self.batch,
            of_batch=self.shared,
            of_rows=self.shared,
        )

    def _counted(self, query_side: Side, key_side: Side) -> tuple[Tensor, Tensor]:
        """Which queries [b t] and keys [b s] count; the same tensors for every layer of a site."""

        def make() -> tuple[Tensor, Tensor]:
            sides = (query_side, key_side)
            queries, keys = (side.real if self.keep_special else side.real & ~side.special for side in sides)
            return queries & keys.any(dim=-1, keepdim=True), keys

        return self.shared.get(f"counted/{id(query_side)}", key_side, make)

    def _rows(self, call: AttentionCall, key_side: Side, keys: Tensor) -> Rows:
        t = call.query.shape[2]
        name = f"{id(key_side)}/{t}"
        if call.made_weights is not None:
            visible = self.shared.get(f"visible/{name}", call.mask, lambda: _visible(call, key_side))
            return DenseRows(precise(call.made_weights.detach()), visible, keys, self.shared)
        size = (len(call.query), t, call.key.shape[2])
        visibility = self.shared.get(f"visibility/{name}", call.mask, lambda: Visibility.of(call.mask, size))
        seen = self.shared.get(f"seen/{name}", visibility, lambda: visibility.without_padding(key_side.real))
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
