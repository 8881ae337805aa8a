"""What layers put out on a text, so that a model altered in a few places computes only the layers from there on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from headscope.model.interface import watch_modules
from headscope.model.prefix_cache import LayerIndex, SiteLayer, resumable_layers, stored_output


@dataclass
class SharedLayers:
    """What layers below whatever is altered put out on the batches of one text, an entry a call, up to `most` bytes."""

    layer_index: LayerIndex
    outputs: dict[int, dict[nn.Module, list[Any]]] = field(default_factory=dict)
    most: int = 1 << 31

    @classmethod
    def of(cls, model: nn.Module) -> SharedLayers | None:
        """None where the layers of a model cannot be told apart."""
        layer_index = resumable_layers(model)
        return None if layer_index is None else cls(layer_index)

    def below(self, places: Collection[SiteLayer]) -> list[nn.Module]:
        """The layers that are computed before those that have an attention of `places`; all where there are none."""
        first = min((self.layer_index.of[place].rank[:2] for place in places), default=None)
        return [layer for rank, layer in self.layer_index.layers if first is None or rank[:2] < first]

    def forget(self, places: Collection[SiteLayer]) -> None:
        """The model itself has changed in `places`: what it put out there and above is dropped."""
        stay = self.below(places)
        for outputs in self.outputs.values():
            for layer in outputs.keys() - stay:
                del outputs[layer]

    @contextmanager
    def passing(self, batch: int, places: Collection[SiteLayer]) -> Iterator[None]:
        """Within the block a copy that is altered in `places` passes over a batch: layers below are not recomputed."""
        outputs = self.outputs.setdefault(batch, {})
        below = self.below(places)
        missing = [layer for layer in below if layer not in outputs]
        new_layers = missing if self.size < self.most else []
        keep = watch_modules(new_layers, lambda layer, _, output: outputs.setdefault(layer, []).append(output))
        with stored_output({layer: outputs[layer] for layer in below if layer in outputs}), keep:
            yield

    @property
    def size(self) -> int:
        """Bytes of what is kept."""
        tensors = (output for batch in self.outputs.values() for calls in batch.values() for output in calls)
        return sum(part.nbytes for part in tree_leaves(list(tensors)) if isinstance(part, torch.Tensor))
