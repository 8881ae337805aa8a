"""Orders of heads by the columns of `heads.csv`, random orders, and shuffled weights to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pandas as pd
import torch
from torch import nn

from headscope.config.declarations import measure_of
from headscope.engine.evidence.significance import spearman
from headscope.heads import HeadId, Site

Scores = Mapping[HeadId, float]
"""The importance of every head by one ranking; the higher, the more important."""


def scores_of(
    heads: pd.DataFrame, extra_scores: Mapping[str, Scores] | None = None
) -> tuple[dict[str, dict[HeadId, float]], dict[str, str]]:
    """The rankings in a table of heads and in `extra_scores`, and by name the reason why others are not rankings.

    A ranking is a column whose measure says which end matters (`Measure.keep`; for entropy the lowest), with a number
    for every head that is not the same for all.
    """
    ids, candidates = heads_of_rows(heads), dict[str, list[float]]()
    for column in heads.columns:
        keep = measure_of(column).keep
        if keep and pd.api.types.is_numeric_dtype(heads[column]):
            candidates[column] = (heads[column].to_numpy(dtype=float) * (1.0 if keep == "highest" else -1.0)).tolist()
    candidates |= {name: [scores[head] for head in ids] for name, scores in (extra_scores or {}).items()}
    rankings: dict[str, dict[HeadId, float]] = {}
    refusals: dict[str, str] = {}
    for name, values in candidates.items():
        if missing := int(np.isnan(values).sum()):
            refusals[name] = f"{missing} of {len(values)} heads have no number"
        elif len(set(values)) < 2:
            refusals[name] = "all heads have the same number"
        else:
            rankings[name] = dict(zip(ids, values, strict=True))
    return rankings, refusals


def heads_of_rows(heads: pd.DataFrame) -> list[HeadId]:
    """The heads of a table's rows."""
    columns = (heads["site"], heads["layer"], heads["head"])
    return [HeadId(Site(site), int(layer), int(head)) for site, layer, head in zip(*columns, strict=True)]


def order_heads(scores: Scores) -> list[HeadId]:
    """Heads, the most important first; ties in the order of site, layer and head."""
    return sorted(scores, key=lambda head: -scores[head])


def random_order(heads: Sequence[HeadId], *, seed: int) -> list[HeadId]:
    """The heads in a random order, determined by the seed."""
    return [heads[n] for n in np.random.default_rng([seed, len(heads)]).permutation(len(heads))]


def agreement(first: Scores, second: Scores) -> float:
    """Spearman's rank correlation of two rankings of the same heads, tied heads with their mean rank.

    NaN where a ranking is constant or lacks a number.
    """
    return spearman(list(first.values()), [second[head] for head in first])


@contextmanager
def shuffle_weights(model: nn.Module, *, seed: int) -> Iterator[None]:
    """Within the block the entries of each parameter are permuted at random; they are restored after it.

    Only the architecture and the scale of the weights remain: a ranking that does not change does not depend on what
    the model has learnt (Adebayo et al. 2018, §3, who draw new weights).
    """
    before = [parameter.detach().clone() for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
                parameter.copy_(parameter.flatten()[order].view_as(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, original in zip(model.parameters(), before, strict=True):
                parameter.copy_(original)
