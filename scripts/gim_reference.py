"""What the authors' package gim-explain makes of a small GPT-2, with what it changes for either kind of attention.

With `eager` attention it changes softmax and norms, with `sdpa` queries, keys, values and norms: never all of them.
`pip install --no-deps gim-explain==0.1.4`, then `python -m scripts.gim_reference`.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import torch

from tests.oracles import gim

FILE = Path(__file__).parents[1] / "tests" / "data" / "oracles" / "gim" / "heads.json"
IDS = [3, 17, 5, 23, 11, 17, 2]


def main() -> None:
    torch.set_default_dtype(torch.float64)  # its copies of norms are of this type
    package = importlib.import_module("gim")
    record: dict[str, object] = {"ids": IDS}
    for implementation in ("eager", "sdpa"):
        model = gim.gpt2(implementation)
        with package.GIM(model):
            heads, logits = gim.relevances(model, gim.gpt2_outputs(model), IDS, heads=3)
        record[implementation] = heads.tolist()
        record["logits"] = logits.tolist()
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
