"""The static embeddings of tokens that a model's sides begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headscope.description.tokens import Numbers
from headscope.formats.base import Checkpoint
from headscope.heads import Site

WIDEST = 512


class StaticEmbeddings:
    """Rows of the table of one side, each of length 1, of at most `WIDEST` dimensions."""

    def __init__(self, table: Tensor | None) -> None:
        self.table = table

    def __call__(self, ids: Numbers) -> Tensor:
        """Embeddings [v p] of ids [v]; p is 0 where there is no table."""
        if self.table is None:
            return torch.zeros(len(ids), 0)
        rows: Tensor = self.table[torch.from_numpy(ids).to(self.table.device)].float().cpu()
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-6)
        if rows.shape[1] > WIDEST:
            rows = rows @ torch.linalg.svd(rows, full_matrices=False)[2][:WIDEST].T
        return rows


def static_embeddings(checkpoint: Checkpoint, site: Site) -> tuple[StaticEmbeddings, StaticEmbeddings]:
    """Those of the queries' side and of the keys' side of a site; without a table where the model shows none."""
    query = "encoder" if site is Site.ENCODER_SELF else "decoder"
    key = "decoder" if site is Site.DECODER_SELF else "encoder"
    return StaticEmbeddings(_table(checkpoint, query)), StaticEmbeddings(_table(checkpoint, key))


def _table(checkpoint: Checkpoint, stack: str) -> Tensor | None:
    model: Any = checkpoint.model
    if checkpoint.is_native:
        part = getattr(model, stack, None)
        native: Tensor | None = None if part is None else part.embeddings.tokens.weight.detach()
        return native
    if checkpoint.two_sided:
        part = getattr(model, f"get_{stack}", lambda: None)()
        model = model if part is None else part
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return None
    if weight.ndim != 2 or len(weight) < checkpoint.vocabulary or not weight.is_floating_point():
        return None
    table: Tensor = weight.detach()
    return table
