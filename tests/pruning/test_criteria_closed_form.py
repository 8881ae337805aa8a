"""Criteria from moments of contexts: their numbers from first principles, and how they order heads."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from headscope.engine.base import RunOptions
from headscope.heads import HeadId, Site, SiteLayer
from headscope.model.taps import masked
from headscope.pruning.closed_form.moments import collect_moments
from headscope.pruning.closed_form.output_projections import OutputProjection
from headscope.pruning.closed_form.refit import damp, greedy_order
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.ranking import criterion as criterion_module
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from tests.oracles import closed_form as oracle
from tests.oracles import speakers, tiny
from tests.oracles.closed_form import KINDS, context_of, measure_inputs
from tests.oracles.gate_gradients import position_gates

DAMPING = 1e-4


def slow_order(
    inputs: dict[SiteLayer, Any], projections: dict[SiteLayer, OutputProjection], cost: Any
) -> dict[HeadId, float]:
    """Take out the unit that adds least to the sum of all modules' costs, again and again; W refitted by lstsq."""
    removed: dict[SiteLayer, list[int]] = {site_layer: [] for site_layer in projections}
    errors, scores = dict.fromkeys(projections, 0.0), {}
    for _ in range(sum(len(projection.units) for projection in projections.values())):
        costs = {}
        for site_layer, projection in projections.items():
            for unit in set(range(len(projection.units))) - set(removed[site_layer]):
                columns = projection.blocks[[*removed[site_layer], unit]].flatten().tolist()
                costs[site_layer, unit] = cost(site_layer, projection, inputs[site_layer], columns) - errors[site_layer]
        site_layer, unit = min(costs, key=lambda key: costs[key])
        removed[site_layer].append(unit)
        errors[site_layer] += costs[site_layer, unit]
        scores.update(dict.fromkeys(projections[site_layer].units[unit], sum(errors.values())))
    return scores


def refit_change(projection: OutputProjection, rows: Any, columns: list[int]) -> tuple[Any, Any]:
    """W − V, and the damped moments that the error is measured with."""
    centred = rows - rows.mean(axis=0) if projection.has_bias else rows
    second = centred.T @ centred / len(centred)
    damping = DAMPING * np.diag(second).mean()
    weight = projection.weight.numpy()
    other, _ = oracle.refit(rows, weight, columns, damping=damping, affine=projection.has_bias)
    return weight - other, second + damping * np.eye(len(second))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_obs_takes_out_what_the_residual_stream_loses_least_by(kind: str) -> None:
    """Errors relative to the size of the stream that the next norm reads."""
    inputs, projections = measure_inputs(kind)
    sums_read = oracle.residual_sums(kind, speakers.checkpoint(kind), speakers.corpus(kind))

    def cost(site_layer: Any, projection: OutputProjection, rows: Any, columns: list[int]) -> float:
        change, second = refit_change(projection, rows, columns)
        _, stream = sums_read[site_layer]
        return float(np.trace(change @ second @ change.T) * (1 / (stream**2).sum(axis=1)).mean())

    expected = slow_order(inputs, projections, cost)
    scores = criterion_named("obs").scores(context_of(kind))
    assert set(scores) == set(expected)
    for head, score in expected.items():
        assert scores[head] == pytest.approx(score, rel=1e-6)


def test_obs_compares_errors_as_they_are_where_outputs_go_through_a_norm_first() -> None:
    """Gemma 2: no stream can be told, so scores are the sums of `greedy_order`'s errors."""
    gemma = speakers.wrap_model(tiny.KINDS["gemma"].make, speakers.SPEAKERS["llama"])
    context = ScoringContext(gemma, speakers.corpus("llama"))
    errors: dict[HeadId, float] = {}
    for projection, sums in criterion_module.reached_modules(context, criterion_module.moments_of(context)):
        second = sums.covariance if projection.has_bias else sums.second
        for step in greedy_order(projection.weight, damp(second).inverse(), projection.blocks):
            errors.update(dict.fromkeys(projection.units[step.block], step.error))
    total = sum(errors[unit[0]] for unit in GateLayout(context.checkpoint.attention_sites).units)
    assert max(criterion_named("obs").scores(context).values()) == pytest.approx(total, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_obs_task_takes_out_what_the_objective_loses_least_by(kind: str) -> None:
    inputs, projections = measure_inputs(kind)
    checkpoint = speakers.checkpoint(kind)
    gradients, predictions = oracle.output_gradients(kind, checkpoint, speakers.corpus(kind))

    def cost(site_layer: Any, projection: OutputProjection, rows: Any, columns: list[int]) -> float:
        change, second = refit_change(projection, rows, columns)
        fisher = gradients[site_layer].T @ gradients[site_layer]
        return float(np.trace(fisher @ change @ second @ change.T) / 2 / predictions)

    expected = slow_order(inputs, projections, cost)
    scores = criterion_named("obs-task").scores(context_of(kind, options=RunOptions(objective="loss")))
    for head, score in expected.items():
        assert scores[head] == pytest.approx(score, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_fisher_is_half_the_squared_gradient_of_a_gate_a_token(kind: str) -> None:
    """At each position a unit's shared gate has the sum of its heads' gradients; sentence by sentence."""
    checkpoint, predictions = speakers.checkpoint(kind), 0
    units = GateLayout(checkpoint.attention_sites).units
    squares = dict.fromkeys(units, 0.0)
    for sentence in speakers.corpus(kind):
        question = speakers.make_example(kind, sentence)
        gradients = position_gates(checkpoint.model, partial(question.loss, checkpoint))
        for unit in units:
            gradient = sum(gradients[head.site, head.layer][head.head] for head in unit)
            squares[unit] += float(torch.as_tensor(gradient).square().sum())
        predictions += len(question.labels)
    scores = criterion_named("fisher").scores(context_of(kind, options=RunOptions(objective="loss")))
    for unit in units:
        assert all(scores[head] == pytest.approx(squares[unit] / 2 / predictions, rel=1e-9) for head in unit)


def test_a_head_that_writes_nothing_goes_first_and_doubles_go_one_by_one() -> None:
    """A head of zeros, and two heads that are the same: one of them is cheap, then the other is not."""
    checkpoint = speakers.checkpoint("bert", seed=21)
    attention = checkpoint.model.get_submodule("bert.encoder.layer.1.attention")
    with torch.no_grad():
        for part in ("query", "key", "value"):
            linear: Any = attention.get_submodule(f"self.{part}")
            linear.weight[10:] = linear.weight[5:10]
            linear.bias[10:] = linear.bias[5:10]
        checkpoint.model.get_parameter("bert.encoder.layer.0.attention.output.dense.weight")[:, :5] = 0
    scores = criterion_named("obs").scores(ScoringContext(checkpoint, speakers.corpus("bert")))
    first, second, *remaining = sorted(scores, key=lambda head: scores[head])
    assert first == HeadId(Site.ENCODER_SELF, 0, 0) and scores[first] == 0
    assert second in (HeadId(Site.ENCODER_SELF, 1, 1), HeadId(Site.ENCODER_SELF, 1, 2))
    assert scores[second] < 0.01 * min(scores[head] for head in remaining)


@pytest.mark.slow
def test_moments_are_collected_once_for_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    objectives = []

    def record_objective(*arguments: Any, **options: Any) -> Any:
        objectives.append(options["objective"])
        return collect_moments(*arguments, **options)

    monkeypatch.setattr(criterion_module, "collect_moments", record_objective)
    context = context_of("bert")
    for name in ("flap", "obs", "wanda", "obs", "output-norm", "obs-task", "fisher"):
        criterion_named(name).scores(context)
    assert objectives == [None, ""]
    criterion_named("obs").scores(replace(context, damping=0.5))
    assert len(objectives) == 2
    removed, other_context = [HeadId(Site.ENCODER_SELF, 0, 1)], context_of("bert")
    copy = context.checkpoint.with_model(context.checkpoint.model)
    for changes in ({"removed": removed}, {"removed": removed}, {"corpus": other_context.corpus}, {"checkpoint": copy}):
        criterion_named("flap").scores(replace(context, **changes))
    criterion_named("obs-task").scores(other_context)
    criterion_named("flap").scores(other_context)
    assert objectives == [None, "", None, None, None, None, ""]


@pytest.mark.parametrize("name", ["flap", "wanda", "output-norm", "fisher"])
def test_heads_that_are_gone_are_masked(name: str) -> None:
    context, removed = context_of("marian"), [HeadId(Site.DECODER_SELF, 0, 1)]
    scores = criterion_named(name).scores(replace(context, removed=removed))
    with masked(context.checkpoint.model, removed):
        assert criterion_named(name).scores(context_of("marian")) == scores
    assert scores != criterion_named(name).scores(context)
