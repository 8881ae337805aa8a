"""What every training variant promises: whatever the precision, it learns the same and its weights stay float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import lessons

from headscope.formats.base import open_checkpoint
from headscope.training.engine import train
from headscope.training.variant import VARIANTS

NEEDED: dict[str, dict[str, Any]] = {
    "swap": {"dynamic": ("soft", "soft", "soft")},
    "mae": {"gate_every": 2},
    "mixing": {"gamma": 0.1, "start_after": 0.0},
}


def loss(folder: Path, name: str, precision: str) -> float:
    """Validation loss after a few epochs; the weights kept are float32."""
    folder.mkdir()
    cls = VARIANTS.get(name)
    options = {"precision": precision, "dropout": 0.0, "log_every": 1000}
    found = train(lessons.config(folder, **options), cls(cls.Options(**NEEDED.get(name, {}))))
    its: Any = open_checkpoint(str(found.folder / "last"), device="cpu").model
    assert {value.dtype for value in its.parameters()} == {torch.float32}
    assert found.nll is not None
    return found.nll


@pytest.mark.parametrize("name", VARIANTS.names())
def test_a_variant_learns_the_same_in_half_precision(name: str, tmp_path: Path) -> None:
    whole, half = (loss(tmp_path / kind, name, kind) for kind in ("float32", "bf16"))
    assert half == pytest.approx(whole, abs=0.05) and half != whole
