"""Key/value heads merged as in Ainslie et al. 2023, §2.1, written with whole matrices and no plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch


def averaged_in_place(model: Any, sets: Sequence[Sequence[Sequence[int]]], width: int) -> Any:
    """A copy in which every key/value head of a set has the mean projection of the set; `sets` by layer."""
    copied = copy.deepcopy(model)
    for layer, of_layer in zip(copied.model.layers, sets, strict=True):
        for name in ("k_proj", "v_proj"):
            linear = getattr(layer.self_attn, name)
            with torch.no_grad():
                for values in (linear.weight, linear.bias):
                    if values is None:
                        continue
                    heads = values.reshape(-1, width, *values.shape[1:])  # [g k …], a view
                    for members in of_layer:
                        mean = sum(heads[head] for head in members) / len(members)
                        for head in members:
                            heads[head] = mean
    return copied
