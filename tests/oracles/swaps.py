"""Heads of a native model taken apart and put together again, weight by weight, for tests of swaps."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.heads import HeadId
from headscope.model.native.transformer import Transformer
from headscope.training.swaps import MODULES


def head_rows(model: Transformer, name: str, head: int) -> dict[str, Tensor]:
    """Copies of what one head of an attention module has, by the name of the weight."""
    module: Any = model.get_submodule(name)
    rows = {}
    for part, width in (("query", module.d_head), ("key", module.d_head), ("value", module.d_value)):
        for kind in ("weight", "bias"):
            values = getattr(getattr(module, part), kind)
            if values is not None:
                rows[f"{part}.{kind}"] = torch.stack([values[head * width + i] for i in range(width)]).clone()
    columns = [module.output.weight[:, head * module.d_value + i] for i in range(module.d_value)]
    rows["output.weight"] = torch.stack(columns, dim=1).clone()
    return rows


def state(model: Transformer) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Names of the weights that are not the same bit for bit."""
    return {key for key in before if not torch.equal(before[key], after[key])}


def schedule(path: Path, swaps: dict[int, list[str]]) -> Path:
    """A file of the MHR program: pairs of heads, such as "cross.0.0 cross.1.0", by epoch."""

    def entry(pair: str) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for end, head in zip("sd", map(HeadId.parse, pair.split()), strict=True):
            stack, module = MODULES[head.site]
            fields |= {f"{end}_layer": str(head.layer), f"{end}_head": head.head}
            fields |= {f"{end}_layer_module": module, f"{end}_transformer_module": stack}
        return fields

    path.write_text(json.dumps({epoch: [*map(entry, pairs)] for epoch, pairs in swaps.items()}), encoding="utf-8")
    return path
