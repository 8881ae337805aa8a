"""Softmax regression of attention, one head after the other, written plainly."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headscope.description.loglinear import Block, Description, Tables
from headscope.description.sample import SampleBlocks


def in_double(block: Block) -> Block:
    weights, mass = block.weights.double(), block.mass.double()
    weights = weights / weights.sum(2, keepdim=True).clamp(min=1e-9) * mass[:, :, None]
    return replace(block, weights=weights, mass=mass)


def _rows(block: Block) -> list[tuple[int, int, int, Tensor]]:
    """Sentence, line, row and seen keys of every row that counts."""
    rows = []
    for line, number in enumerate(block.sentences.tolist()):
        for row in range(block.mass.shape[1]):
            if block.visible[line, row].any():
                rows.append((number, line, row, block.visible[line, row].nonzero()[:, 0]))
    return rows


def losses(
    description: Description, blocks: Sequence[Block], features: Sequence[int], rows: Sequence[Tensor], tables: Tables
) -> tuple[Tensor, Tensor]:
    """Σ −w ln p [h] over chosen sentences, and over the others, row by row."""
    sums = [torch.zeros(description.theta.shape[1], dtype=torch.float64) for _ in range(2)]
    for block, mask in zip(blocks, rows, strict=True):
        for _, line, row, keys in _rows(block):
            parts = [description.theta[block.features[feature, line, row, keys]] for feature in features]
            logits = torch.stack(parts).sum(0)  # [s h]
            if description.pairs is not None:
                query = tables[0][block.queries[line, row]]
                for head in range(description.theta.shape[1]):
                    first, second = (part[:, head] for part in description.pairs)
                    score = (tables[1][block.keys[line, keys]] @ second) @ (query @ first)
                    logits = logits + torch.outer(score, torch.eye(description.theta.shape[1], dtype=score.dtype)[head])
            part = -(block.weights[line, row, keys] * torch.log_softmax(logits, dim=0)).sum(0)
            index = 0 if mask[line] else 1
            sums[index] = sums[index] + part
    return sums[0], sums[1]


def _padded(data: SampleBlocks, features: Sequence[int], head: int, fold: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """One-hot features [r s c], weights [r s], seen [r s] of the rows of one half of the sentences."""
    size = max(block.weights.shape[2] for block in data.blocks)
    count = sum(data.inventory.sizes)
    hot, weights, visible = [], [], []
    for block in data.blocks:
        for number, line, row, keys in _rows(block):
            if fold is None or number % 2 == fold:
                features_hot = torch.zeros(size, count, dtype=torch.float64)
                for feature in features:
                    features_hot[keys, block.features[feature, line, row, keys]] += 1
                hot.append(features_hot)
                padding = (0, size - block.weights.shape[2])
                weights.append(torch.nn.functional.pad(block.weights[line, row, :, head].double(), padding))
                visible.append(torch.zeros(size, dtype=torch.bool).index_fill(0, keys, True))
    return torch.stack(hot), torch.stack(weights), torch.stack(visible)


def _regression(data: tuple[Tensor, Tensor, Tensor], *, ridge: float) -> tuple[Tensor, float]:
    """The parameters [c] of least mean cross-entropy, and the sum of cross-entropies."""
    theta = torch.zeros(data[0].shape[-1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([theta], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = cross_entropy(theta, data) / len(data[0]) + 0.5 * ridge * theta.square().sum()
        value.backward()
        return value

    optimiser.step(closure)
    return theta.detach(), float(cross_entropy(theta.detach(), data))


def cross_entropy(theta: Tensor, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    hot, weights, visible = data
    logs = (hot @ theta).masked_fill(~visible, -1e9).log_softmax(-1)
    return -(weights * logs).sum()


def least_loss(data: SampleBlocks, features: Sequence[int]) -> Tensor:
    """Σ −w ln p [h] of all rows at the minimum, with the ridge that fits have."""
    return torch.tensor([_regression(_padded(data, features, head, None), ridge=1e-4)[1] for head in range(data.heads)])


def held_out_shares(data: SampleBlocks, features: Sequence[int]) -> list[float]:
    """(U − CE) / (U − H) of every head, each half under what was fitted to the other."""
    shares = []
    for head in range(data.heads):
        gain = room = 0.0
        for fold in range(2):
            theta, _ = _regression(_padded(data, features, head, 1 - fold), ridge=1e-4)
            held_out = _padded(data, features, head, fold)
            even = float(held_out[2].sum(-1).double().log().sum())
            gain += even - float(cross_entropy(theta, held_out))
            room += even + float(torch.special.xlogy(held_out[1], held_out[1]).sum())
        shares.append(gain / room)
    return shares
