"""What the program of Nam et al. 2025 makes of the model in tests/data/induction: gates after a few updates.

With `src` of github.com/andrewnam/causal_head_gating (commit 97b223a) on PYTHONPATH:
`python -m scripts.chg_reference`. Its data set is replaced by the same four sentences in every update.
"""

from __future__ import annotations

import importlib
import json
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from scripts.induction import FOLDER, repeat_tokens

FILE = Path(__file__).parents[1] / "tests" / "data" / "oracles" / "chg" / "gates.json"
UPDATES, PENALTY = 5, 0.1
RATES = {"lr": 0.4, "lr_end": 0.1, "lr_reg": 0.5, "lr_reg_end": 0.2}


def main() -> None:
    trainer: Any = importlib.import_module("chg.chg_trainer").CHGTrainer
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(FOLDER).double().eval()
    ids = repeat_tokens(4, 9, torch.Generator().manual_seed(7), different=True)
    batch = {"input_ids": ids, "loss_masks": torch.ones_like(ids)}
    data = SimpleNamespace(to_iterator=lambda **_: repeat(batch))
    start = torch.rand(1, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).view(2, 2)
    chg = trainer(model, data, l1_weight=PENALTY, **RATES)
    for name in ("mask_logits", "mask_logits_pos", "mask_logits_neg"):
        setattr(chg, name, torch.nn.Parameter(torch.logit(start)))
    gates: dict[str, Any] = {"ids": ids.tolist(), "updates": UPDATES, "penalty": PENALTY, **RATES, "nll": {}}
    for mask, metrics in chg.fit(UPDATES, UPDATES, verbose=False):
        gates[metrics["regularization"]] = mask.flatten().tolist()
        gates["nll"].setdefault(metrics["regularization"], []).append(metrics["nll"])
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(gates) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
