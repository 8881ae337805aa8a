"""How new weights are drawn, against fairseq's rules written out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from headscope.formats.base import open_checkpoint
from headscope.training.architecture import INITIAL
from headscope.training.trainer import train
from headscope.training.variant import VARIANTS
from tests.oracles import lessons


def bounds(name: str, weight: torch.Tensor, initial: str) -> float:
    """The largest value that fairseq draws for a weight or bias of a linear layer."""
    outputs, inputs = weight.shape
    if initial == "fairseq" and "ffn" in name:
        return 1 / math.sqrt(inputs)
    gain = 1 / math.sqrt(2) if name.endswith(("query", "key", "value")) else 1.0
    return gain * math.sqrt(6 / (inputs + outputs))


@pytest.mark.parametrize("initial", sorted(INITIAL))
def test_linear_layers_are_drawn_as_fairseq_draws_them(initial: str, tmp_path: Path) -> None:
    run = lessons.begin(tmp_path, "baseline", shared={"initial": initial, "d_model": 48, "d_ffn": 67})
    layers = {name: module for name, module in run.model.named_modules() if isinstance(module, nn.Linear)}
    drawn = [(name, layer) for name, layer in layers.items() if "layers" in name]
    assert len(drawn) == 3 * 2 + 3 * 4 + 2 * 4  # feed-forward, self-attention, cross-attention
    for name, layer in drawn:
        bound = bounds(name, layer.weight, initial)
        assert 0.97 * bound < float(layer.weight.detach().abs().max()) <= bound * (1 + 1e-6), name
        biased = initial == "fairseq" and ("ffn" in name or name.endswith(("query", "key", "value")))
        limit = layer.in_features**-0.5 if biased else 0.0
        assert 0.8 * limit <= float(layer.bias.detach().abs().max()) <= limit * (1 + 1e-6), name


def test_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    cls = VARIANTS.get("baseline")
    (tmp_path / "a").mkdir()
    first = train(lessons.config(tmp_path / "a", updates=1), cls(cls.Options()))
    (tmp_path / "b").mkdir()
    shared = {"init": str(first.folder / "last"), "initial": "fairseq"}
    again = lessons.begin(tmp_path / "b", "baseline", shared=shared)
    theirs = open_checkpoint(str(first.folder / "last"), device="cpu", dtype="float64").model.state_dict()
    for key, value in again.model.state_dict().items():
        torch.testing.assert_close(value.double(), theirs[key], rtol=0, atol=1e-6)
