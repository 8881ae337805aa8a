"""Differentiable subset pruning: the soft top-K by loops, and exactly K heads at the end."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.config.option import make_config
from headscope.formats.native import NATIVE
from headscope.pruning.gate_layout import GateLayout, top_k
from headscope.pruning.learning.examples import TrainingExamples
from headscope.pruning.learning.finetuning import Recipe, Tuner, mean_loss
from headscope.pruning.learning.learn import run_learning
from headscope.pruning.learning.learners.subset import Subset, SubsetOptions, gumbel, soft_top_k, straight_through
from headscope.pruning.options.choice import LearnConfig
from tests.makers.shared import write_lines
from tests.oracles import checkpoints, speakers, subset

pytestmark = pytest.mark.slow

SCORES = st.one_of(
    st.floats(-3, 3), st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0, -1.0, 1 + 1e-7, 1e6]), st.floats(-1e-6, 1e-6)
)
TEMPERATURES = st.sampled_from([1e-8, 1e-4, 0.03, 0.1, 1.0, 7.0, 1000.0]) | st.floats(1e-8, 1e3)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(SCORES, min_size=1, max_size=12),
    share=st.floats(0, 1),
    temperature=TEMPERATURES,
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_soft_gates_are_within_0_and_1_and_sum_to_k(
    values: list[float], share: float, temperature: float, dtype: torch.dtype
) -> None:
    k = round(share * len(values))
    scores = torch.tensor(values, dtype=dtype, requires_grad=True)
    gates = soft_top_k(scores, k, temperature=temperature)
    precision = torch.finfo(dtype).eps
    assert gates.dtype == dtype and ((gates >= 0) & (gates <= 1)).all()
    assert math.isclose(gates.sum().item(), k, abs_tol=8 * len(values) * precision)
    order = torch.argsort(scores.detach())
    assert (gates.detach()[order].diff() >= 0).all()
    if 0 < k < len(values):
        expected = subset.soft_top_k(scores.tolist(), k, temperature)
        np.testing.assert_allclose(gates.detach().numpy(), expected, rtol=0, atol=max(1e-11, 2 * precision))
        (slopes,) = torch.autograd.grad(gates @ torch.arange(len(values), dtype=dtype), scores)
        assert slopes.isfinite().all()


@settings(max_examples=8, deadline=None)
@given(
    values=st.lists(st.floats(-3, 3) | st.sampled_from([0.0, 1.0]), min_size=2, max_size=5),
    share=st.floats(0, 1),
    temperature=st.floats(0.03, 100),
)
def test_gradients_of_soft_gates_are_those_of_differences(
    values: list[float], share: float, temperature: float
) -> None:
    k = 1 + round(share * (len(values) - 2))
    scores = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    weights = torch.arange(len(values), dtype=torch.float64)
    (slopes,) = torch.autograd.grad(soft_top_k(scores, k, temperature=temperature) @ weights, scores)
    expected = subset.derivative(values, k, temperature, weights.tolist())
    np.testing.assert_allclose(slopes.numpy(), expected, rtol=1e-6, atol=1e-7 / temperature)


def test_exactly_k_also_where_scores_tie() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    assert top_k(scores, 2).tolist() == [False, True, True, False, False]
    for k in range(6):
        gates = straight_through(scores, k)
        assert gates.sum().item() == k
        (slopes,) = torch.autograd.grad((gates * torch.arange(5)).sum(), scores)
        assert slopes.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("updates", [3, 150, 20_000])
def test_the_temperature_falls_over_the_whole_run(updates: int) -> None:
    """However short it is; the authors' schedule is three options."""
    gates = GateLayout(speakers.checkpoint("gpt2").attention_sites)
    authors: dict[str, Any] = {"first": 0.1, "last": 1e-8, "cooldown": 15_000}
    expected = {"default": (1.0, 0.05**0.5, 0.05), "authors": (0.1, 0.1 * 1e-7 ** (updates / 30_000), None)}
    for name, options in (("default", dict[str, Any]()), ("authors", authors)):
        learner = Subset(gates, SubsetOptions(keep=2, **options), updates=updates, generator=torch.Generator())
        temperatures = []
        for update in (0, updates / 2, updates):
            learner.update = update  # type: ignore[assignment]
            temperatures.append(learner.temperature)
        assert temperatures[:2] == pytest.approx(expected[name][:2]) and temperatures[2] > 9.9e-9
        assert expected[name][2] is None or temperatures[2] == pytest.approx(expected[name][2])


@pytest.mark.parametrize(("kind", "sites"), [("gpt2", ()), ("native-post", ("cross",))])
def test_a_subset_that_is_learnt_is_among_the_best(kind: str, sites: tuple[str, ...]) -> None:
    """All subsets of that size are tried out; gates alone learn, so the loss says which are the best.

    0 is the best subset, 1 the worst: at random the mean over seeds would be near a half.
    """
    checkpoint = speakers.checkpoint(kind)
    gates = GateLayout(checkpoint.attention_sites, sites=sites)
    n, k = len(gates.units), len(gates.units) // 2
    data = TrainingExamples(checkpoint, speakers.corpus(kind), limit=60)
    losses = {}
    for units in itertools.combinations(range(n), k):
        gate_values = torch.zeros(n, dtype=torch.float64)
        gate_values[list(units)] = 1
        losses[units] = mean_loss(checkpoint, data, tokens=500, seed=1, gates=gates.spread(gate_values))
    best, worst = min(losses.values()), max(losses.values())
    assert len(losses) >= 15
    excesses = []
    for seed in (1, 2):
        options = SubsetOptions(keep=k, first=1.0, last=1e-2)
        torch.manual_seed(seed)  # the model's own dropout
        learner = Subset(gates, options, updates=50, generator=torch.Generator().manual_seed(seed))
        Tuner(checkpoint, data, Recipe(updates=50, lr=0.0, gate_lr=0.4, tokens=500), [], learner).run()
        loss = losses[tuple(learner.decide().nonzero()[:, 0].tolist())]
        excesses.append((loss - best) / (worst - best))
    assert sum(excesses) / len(excesses) < 0.3, excesses


@pytest.mark.parametrize("straight", [False, True])
def test_exactly_k_heads(straight: bool, tmp_path: Path) -> None:
    NATIVE.save(checkpoints.small(), tmp_path / "whole")
    text = write_lines(tmp_path / "a", ["a b c", "b c", "d e f g", "a"] * 6)
    options: dict[str, Any] = {"checkpoint": str(tmp_path / "whole"), "source": text, "target": text, "device": "cpu"}
    method = make_config(SubsetOptions, {"keep": 5, "straight_through": straight})
    choice = run_learning(LearnConfig(**options, out=tmp_path / "run", method=method, updates=5, batch_tokens=60))
    assert len(choice.kept) == 5 == sum(choice.tables["ranking"].kept)
    gates = pd.read_csv(tmp_path / "run" / "gates.csv")
    assert set(gates.groupby("update").gate.sum()) == {5.0} and gates["lambda"].isna().all()


def test_gates_of_a_subset_above_half_stay_within_0_and_1() -> None:
    """37 of 72 at all temperatures of a training, with its noise; none or all have no gradient."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(72, generator=generator, dtype=torch.float64, requires_grad=True)
    for update in range(100):
        temperature = 10.0 * 1e-9 ** (update / 100)
        gates = soft_top_k(scores + gumbel(72, generator), 37, temperature=temperature)
        assert gates.min() >= 0 and gates.max() <= 1 and math.isclose(gates.sum().item(), 37, rel_tol=1e-12)
    for k in (0, 72):
        ends = soft_top_k(scores, k, temperature=0.7)
        assert ends.tolist() == [k / 72] * 72 and not ends.requires_grad
