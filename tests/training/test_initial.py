"""How new weights are drawn, against fairseq's rules written out."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from headscope.config.option import make_config
from headscope.data.corpus import open_corpus
from headscope.errors import ConfigError
from headscope.formats.base import open_checkpoint
from headscope.training.architecture import INITIAL
from headscope.training.config import TrainConfig
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
    first = lessons.trained(tmp_path / "a", updates=1)
    shared = {"init": str(first.folder / "last"), "initial": "fairseq"}
    again = lessons.begin(tmp_path / "b", "baseline", shared=shared)
    theirs = open_checkpoint(str(first.folder / "last"), device="cpu", dtype="float64").model.state_dict()
    for key, value in again.model.state_dict().items():
        torch.testing.assert_close(value.double(), theirs[key], rtol=0, atol=1e-6)


# Tuning a trained model on a share of the text, and the figure of it.


def test_a_smaller_share_is_part_of_a_larger_one(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"line {n}\n" for n in range(40)), encoding="utf-8")
    whole = open_corpus(tmp_path / "text")
    drawn = {share: [each.source for each in whole.share(share, seed=1)] for share in (0.01, 0.25, 0.5, 1.0)}
    assert [len(lines) for lines in drawn.values()] == [1, 10, 20, 40]
    assert set(drawn[0.01]) < set(drawn[0.25]) < set(drawn[0.5]) < set(drawn[1.0])
    assert drawn[1.0] == [each.source for each in whole] and drawn[0.5] == sorted(drawn[0.5], key=drawn[1.0].index)
    other = whole.share(0.5, seed=2)
    assert [each.source for each in other] != drawn[0.5] and other.digest != whole.share(0.5, seed=1).digest
    for share in (0.0, 1.5):
        with pytest.raises(ConfigError, match="--fraction"):
            make_config(TrainConfig, {"source": tmp_path / "text", "target": tmp_path / "text", "fraction": share})
