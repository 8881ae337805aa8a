"""Key/value heads merged as in Ainslie et al. 2023, §2.1, written with whole matrices and no plan."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch


def average_heads(model: Any, sets: Sequence[Sequence[Sequence[int]]], width: int) -> Any:
    """A copy in which every key/value head of a set has the mean projection of the set; `sets` by layer."""
    twin = copy.deepcopy(model)
    for layer, of_layer in zip(twin.model.layers, sets, strict=True):
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
    return twin


def greedy_counts(model: Any, texts: Sequence[torch.Tensor], *, groups: int, width: int, total: int) -> list[int]:
    """Powers of two of key/value heads by layer: the cheapest step a head saved by the loss, until `total` is left.

    Steps from which `total` cannot be reached are left out, by trying all combinations; `encoded`: [1 s] each.
    """
    layers = len(model.model.layers)
    numbers = [2**power for power in range(groups.bit_length())]

    def loss(counts: Sequence[int]) -> float:
        sets = [[list(range(start, start + groups // n)) for start in range(0, groups, groups // n)] for n in counts]
        twin, nats, tokens = average_heads(model, sets, width), 0.0, 0
        for ids in texts:
            with torch.no_grad():
                log_probabilities = twin(ids).logits[0, :-1].log_softmax(-1)
            nats -= float(log_probabilities.gather(1, ids[0, 1:, None]).sum())
            tokens += ids.shape[1] - 1
        return nats / tokens

    counts = [groups] * layers
    while sum(counts) > total:
        steps = [
            [count // (1 + (number == layer)) for number, count in enumerate(counts)]
            for layer in range(layers)
            if counts[layer] > 1
        ]
        possible = [
            step
            for step in steps
            if any(
                sum(end) == total and all(a <= b for a, b in zip(end, step, strict=True))
                for end in itertools.product(numbers, repeat=layers)
            )
        ]
        current = loss(counts)
        counts = min(possible, key=lambda step: (loss(step) - current) / (sum(counts) - sum(step)))
    return counts
