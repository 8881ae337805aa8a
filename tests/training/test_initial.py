"""How new weights are drawn, against fairseq's rules written out."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headscope.config.option import make_config
from headscope.data.corpus import open_corpus
from headscope.errors import ConfigError
from headscope.formats.base import open_checkpoint
from headscope.training.architecture import INITIAL
from headscope.training.config import TrainConfig
from headscope.training.trainer import train
from headscope.training.variant import VARIANTS
from tests.oracles import lessons
from tests.oracles.swaps import differing


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
    first = train(lessons.config(tmp_path / "a", updates=1), cls(cls.Options()))
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


# Runs that are resumed with another end: what depends on the length goes by the length they were begun with.


SHORT: dict[str, Any] = {"precision": "float32", "log_every": 1}


def train_more(out: Path, name: str = "baseline", *, resume: bool = False, **options: Any) -> list[dict[str, str]]:
    """Train; the lines of metrics.csv. Names that a variant has are its options, the others those of all."""
    cls = VARIANTS.get(name)
    own = {key: value for key, value in options.items() if key in cls.Options.__dataclass_fields__}
    shared = {key: value for key, value in options.items() if key not in own}
    train(lessons.config(out, **SHORT | shared), cls(cls.Options(**own)), resume=resume)
    with (out / "run" / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def weights(out: Path) -> dict[str, Any]:
    model: Any = open_checkpoint(str(out / "run" / "last"), device="cpu").model
    return dict(model.state_dict())


@pytest.mark.slow
def test_a_window_that_has_opened_stays_open(tmp_path: Path) -> None:
    """Two epochs and three more are five in which the window opens as early."""
    train_more(tmp_path / "a", "mixing", max_epochs=2, start_after=0.5, gamma=0.1)
    prolonged = train_more(tmp_path / "a", "mixing", max_epochs=5, start_after=0.5, gamma=0.1, resume=True)
    whole = train_more(tmp_path / "b", "mixing", max_epochs=5, start_after=0.2, gamma=0.1)
    open_in = [{row["epoch"] for row in rows if row["window"] == "1"} for rows in (prolonged, whole)]
    assert open_in == [{"2", "3", "4", "5"}] * 2
    assert not differing(weights(tmp_path / "a"), weights(tmp_path / "b"))
    about = json.loads((tmp_path / "a" / "run" / "run.json").read_text(encoding="utf-8"))
    assert about["planned"] == {"updates": None, "epochs": 2} and about["config"]["max_epochs"] == 5


@pytest.mark.slow
def test_a_cosine_rate_stays_where_it_ended(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "cosine", "lr": 0.01, "min_lr": 0.001}
    first = train_more(tmp_path, updates=8, max_epochs=None, **options)
    for end in (11, 14):  # the plan outlives the second restart too
        rows = train_more(tmp_path, updates=end, max_epochs=None, resume=True, **options)
        assert [row["lr"] for row in rows[:8]] == [row["lr"] for row in first]
        assert [float(row["lr"]) for row in rows[8:]] == [0.001] * (end - 8)


@pytest.mark.slow
def test_an_earlier_end_cuts_the_run_short_and_changes_nothing_before_it(tmp_path: Path) -> None:
    """Interrupted in a train_more of three epochs, resumed to end after two."""

    options: dict[str, Any] = {"schedule": "cosine", "min_lr": 0.0}
    whole = train_more(tmp_path / "whole", max_epochs=3, **options)
    config = lessons.config(tmp_path / "cut", max_epochs=3, **SHORT, **options)
    cls = VARIANTS.get("baseline")
    assert train(config, cls(cls.Options()), progress=lessons.StopsAfter(2)).reason == "interrupted"
    assert train(replace(config, max_epochs=2), cls(cls.Options()), resume=True).epoch == 2
    rows = train_more(tmp_path / "cut", max_epochs=2, resume=True, **options)
    assert len(rows) > 4 and [row["loss"] for row in rows] == [row["loss"] for row in whole[: len(rows)]]
