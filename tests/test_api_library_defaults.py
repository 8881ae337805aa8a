"""What the caller has switched on for code of its own changes nothing that the API measures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal

import headscope as hs
from headscope.api.options import in_python
from headscope.errors import ConfigError
from tests.oracles.memory import in_memory, sentences


@contextmanager
def default_type(kind: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: default_type(torch.float64),
        lambda: torch.device("meta"),
    ],
    ids=["no gradients", "inference mode", "autocast", "double precision", "another device"],
)
def test_what_the_caller_has_switched_on_changes_no_number(around: Callable[[], Any]) -> None:
    opened = hs.load(in_memory("bert")[0], tokenizer=in_memory("bert")[1])
    names: dict[str, Any] = {"only": "similarity,positional,gradient", "bootstrap": 5}
    expected = opened.analyze(sentences(), **names)
    with around():
        kind, device = torch.get_default_dtype(), torch.get_default_device()
        found = opened.analyze(sentences(), **names)
        assert (torch.get_default_dtype(), torch.get_default_device()) == (kind, device)
    assert_frame_equal(found.heads, expected.heads)
    assert found.signature == expected.signature


def test_numbers_too_small_for_a_float_are_zero_whatever_numpy_raises() -> None:
    with np.errstate(all="raise"):
        assert in_python(lambda: np.exp(np.array([-1e3])).item())() == 0
        with pytest.raises(FloatingPointError):
            np.exp(np.array([-1e3]))


def test_weights_that_no_gradient_goes_through_are_refused() -> None:
    model = in_memory("bert")[0]
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"inference_mode\(\).*load it outside"):
        hs.load(copy.deepcopy(model))


def test_weights_without_values_are_refused() -> None:
    model = in_memory("bert")[0]
    with pytest.raises(ConfigError, match=r"weights of this model are on the meta device.*load it outside of"):
        hs.load(copy.deepcopy(model).to("meta"))
