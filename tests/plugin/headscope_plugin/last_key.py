"""An analysis: mean weight on the last key that counts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headscope.bootstrap import Ratio
from headscope.engine.base import Analysis, HeadBatch, analysis


@analysis
class LastKey(Analysis):
    """Mean over queries of the weight on the last key of the sentence that is no special token."""

    name = "last_key"
    summary = "mean weight on the last word"

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        positions = torch.arange(heads.keys.shape[1], device=heads.keys.device)  # [s]
        last = (heads.keys * (positions + 1)).argmax(dim=-1)  # [b]
        b, h, t, _ = heads.weights.shape
        return {
            "last_key": heads.over_queries(heads.weights.gather(-1, last.view(b, 1, 1, 1).expand(b, h, t, 1))[..., 0])
        }
