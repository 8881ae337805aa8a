"""Every analysis and criterion has an oracle; contracts of every criterion."""

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest

from headscope.engine.base import ANALYSES
from headscope.heads import all_heads
from headscope.model.taps import masked
from headscope.pruning.ranking.criterion import CRITERIA, ScoringContext, criterion_named, rankable_names
from tests.makers.modules import ROOT
from tests.makers.studies import run_options
from tests.oracles import speakers
from tests.oracles.closed_form import KINDS, context_of, measure_inputs
from tests.oracles.plugin import register_plugin
from tests.oracles.rows import ORACLES as OF_ROWS
from tests.oracles.shuffled import in_folds

Array = Any


def flap(rows: Array, weight: Array) -> Array:
    """Variance · ‖column‖², as z-scores of the layer."""
    channels = rows.var(axis=0) * (weight**2).sum(axis=0)
    return (channels - channels.mean()) / channels.std(ddof=1)


OF_CONTEXTS: dict[str, Callable[[Array, Array, list[int]], float]] = {
    "flap": lambda rows, weight, part: flap(rows, weight)[part].mean(),
    "wanda": lambda rows, weight, part: (abs(weight) * np.sqrt((rows**2).mean(axis=0)))[:, part].mean(),
    "output-norm": lambda rows, weight, part: np.linalg.norm(rows[:, part], axis=1).mean(),
}
"""Criteria by their number of a head: of contexts [n m], the output projection [d m], and the columns of the head."""

ANALYSES_BY_TEST = {
    "ablation": "attribution/test_attribution.py::test_ablation_is_the_rise_of_the_loss",
    "alignment": "analyses/test_alignment.py::test_shares_and_error_rates_are_those_of_the_oracle",
    "alphas": "analyses/test_experts.py::test_numbers_of_every_matrix",
    "attribution_patching": "analyses/test_patching.py::test_columns_are_those_of_hooks_on_the_eager_model",
    "causal_head_gating": "analyses/test_causal_head_gating.py::test_fits_are_those_of_loops",
    "composition": "analyses/test_decoder_weights.py::test_composition_is_that_of_whole_matrices",
    "contribution": "analyses/test_importance.py::test_contribution",
    "copy_suppression": (
        "analyses/test_decoder_weights.py::test_copy_suppression_counts_tokens_among_the_ten_lowest_of_their_own_row"
    ),
    "copying": "analyses/test_decoder_weights.py::test_copying_is_that_of_the_whole_circuit",
    "direct_logit": "analyses/test_importance.py::test_direct_logit",
    "distinctness": "analyses/test_oracles.py::test_distinctness",
    "eap_ig": "analyses/test_patching.py::test_columns_are_those_of_hooks_on_the_eager_model",
    "experts": "analyses/test_experts.py::test_gates_are_measured_where_they_stand",
    "explained": "description/test_pair_functions.py::test_position_alone_explains_what_plain_regression_finds",
    "gates": "formats/test_story_of_heads.py::test_gates_are_those_of_the_original",
    "gradient": "analyses/test_importance.py::test_gradient_and_taylor",
    "head_gates": "analyses/test_experts.py::test_gates_of_heads",
    "integrated_gradients": "attribution/test_attribution.py::test_integrated_gradients",
    "lrp": "relevance/test_models.py::test_analysis_sums_to_one_over_the_heads_of_a_layer",  # rules: test_backward.py
    "magnitude": "analyses/test_importance.py::test_magnitude",
    "massive": "analyses/test_experts.py::test_massive",
    "one_expert": "analyses/test_experts.py::test_one_expert_costs_something",
    "patching": "analyses/test_patching.py::test_columns_are_those_of_hooks_on_the_eager_model",
    "positional": "analyses/test_oracles.py::test_offsets",
    "retrieval": "analyses/test_retrieval.py::test_steps_are_those_of_whole_passes",
    "shapley": "attribution/test_attribution.py::test_shapley_values_of_the_drawn_orders",
    "similarity": "analyses/test_oracles.py::test_similarity_of_pairs",
    "similarity.js": "analyses/test_oracles.py::test_similarity_of_pairs",
    "streaming": "analyses/test_retrieval.py::test_loss_is_that_of_loops",
    "successor": "analyses/test_decoder_weights.py::test_successor_counts_words_whose_next_one_is_raised_most",
    "syntactic": "analyses/test_oracles.py::test_relations",
    "taylor": "analyses/test_importance.py::test_gradient_and_taylor",
    "vocabulary": "analyses/test_decoder_weights.py::test_directions_are_those_of_the_whole_matrices",
}
CRITERIA_BY_TEST = {
    "fisher": "pruning/test_criteria_closed_form.py::test_fisher_is_half_the_squared_gradient_of_a_gate_a_token",
    "layer-drop": "pruning/test_residual_stream.py::test_layers_go_whole_those_first_that_turn_the_stream_least",
    "obs": "pruning/test_criteria_closed_form.py::test_obs_takes_out_what_the_residual_stream_loses_least_by",
    "obs-task": "pruning/test_criteria_closed_form.py::test_obs_task_takes_out_what_the_objective_loses_least_by",
    "random": "contracts/test_oracles.py::test_random_scores_are_those_of_the_seed",
}
NAMES_BY_KIND = {"analysis": ANALYSES.names(), "criterion": CRITERIA.names()}
BY_TEST = {"analysis": ANALYSES_BY_TEST, "criterion": CRITERIA_BY_TEST}


def names_with_function(kind: str) -> set[str]:
    """Names whose numbers a function of a common signature gives: it is called here or in `test_means_over_tokens`."""
    if kind == "criterion":
        return set(OF_CONTEXTS)
    return {name for name, cls in ANALYSES if any(measure.name in OF_ROWS for measure in cls.measures)}


def names_without_oracle(names: Iterable[str], kind: str) -> list[str]:
    return sorted(set(names) - names_with_function(kind) - set(BY_TEST[kind]))


@cache
def functions_and_words(file: str) -> tuple[set[str], set[Any]]:
    """The names of a test file's functions, and its constants with the modules that it imports."""
    path = ROOT / "tests" / file
    tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    functions = {part.name for part in tree.body if isinstance(part, ast.FunctionDef)}
    parts = list(ast.walk(tree))
    modules = {part.module for part in parts if isinstance(part, ast.ImportFrom)}
    return functions, modules | {part.value for part in parts if isinstance(part, ast.Constant)}


@pytest.mark.parametrize("kind", NAMES_BY_KIND)
def test_each_has_an_oracle(kind: str) -> None:
    missing = names_without_oracle(NAMES_BY_KIND[kind], kind)
    assert not missing, (
        f"no oracle for the {kind} {', '.join(missing)}: derive its numbers from the formula in tests/oracles, compare "
        "them in a test, and name that test in tests/contracts/test_oracles.py"
    )
    assert names_without_oracle(["unheard-of"], kind) == ["unheard-of"]


@pytest.mark.parametrize("kind", NAMES_BY_KIND)
def test_entries_name_what_there_is(kind: str) -> None:
    assert not BY_TEST[kind].keys() - set(NAMES_BY_KIND[kind]), f"no such {kind} is registered"
    assert not BY_TEST[kind].keys() & names_with_function(kind), "it has a function of the common signature already"
    for name, entry in BY_TEST[kind].items():
        file, _, test = entry.partition("::")
        functions, words = functions_and_words(file)
        assert test in functions, f"{name}: there is no test {entry}"
        cls: Any = ANALYSES.get(name) if kind == "analysis" else CRITERIA.get(name)
        columns = {measure.name for measure in cls.measures} if kind == "analysis" else set()
        assert words & {name, cls.__module__, *columns}, f"{entry} does not read {name}"


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_contexts(kind: str) -> None:
    context, (inputs, projections) = context_of(kind), measure_inputs(kind)
    for name, oracle in OF_CONTEXTS.items():
        scores = criterion_named(name).scores(context)
        assert {(head.site, head.layer) for head in scores} == set(inputs)
        for head, score in scores.items():
            rows, weight = inputs[head.site, head.layer], projections[head.site, head.layer].weight.numpy()
            width = rows.shape[1] // context.checkpoint.layout[head.site, head.layer]
            part = range(head.head * width, (head.head + 1) * width)
            assert score == pytest.approx(oracle(rows, weight, list(part))), (name, head)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_scores_are_those_of_the_seed(seed: int) -> None:
    checkpoint = speakers.checkpoint("bert")
    scores = criterion_named("random").scores(ScoringContext(checkpoint, None, options=run_options(seed=seed)))
    rng = np.random.default_rng([seed, len(scores)])
    assert [*scores.values()] == [rng.random() for _ in scores]


PLUGIN = "last_layer"
NAMES = ("ablation", "confidence", "entropy", "gradient", "lrp", "magnitude", "random", "shapley", "taylor")
CLOSED_FORM = ("fisher", "flap", "layer-drop", "obs", "obs-task", "output-norm", "wanda")
every_criterion = pytest.mark.parametrize("name", [*NAMES, *CLOSED_FORM, PLUGIN], indirect=True)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """`last_layer` is a criterion of another package (tests/plugin)."""
    with register_plugin(CRITERIA, PLUGIN) if request.param == PLUGIN else nullcontext():
        yield request.param


def test_the_names_that_the_command_line_promises() -> None:
    assert {*NAMES, *CLOSED_FORM} <= set(rankable_names()) and {"random", *CLOSED_FORM} <= set(CRITERIA.names())


@pytest.mark.parametrize("kind", ["bert", "llama"])
@every_criterion
def test_a_number_for_every_head_the_same_each_time(name: str, kind: str) -> None:
    checkpoint, corpus = speakers.checkpoint(kind), in_folds(speakers.corpus(kind, count=4), 1)
    criterion = criterion_named(name)
    assert criterion.name == name and criterion.summary and type(criterion).__doc__ and criterion.keep
    ctx = ScoringContext(checkpoint, corpus if criterion.reads_text else None, options=run_options(shapley_samples=2))
    scores = criterion.scores(ctx)
    assert list(scores) == list(all_heads(checkpoint.layout))
    values = np.array(list(scores.values()))
    assert np.isfinite(values).all() and len(set(values.tolist())) > 1
    assert criterion.scores(ctx) == scores


@every_criterion
def test_scores_depend_on_heads_that_are_gone_where_that_is_said(name: str) -> None:
    checkpoint, corpus = speakers.checkpoint("native-pre"), in_folds(speakers.corpus("native-pre", count=4), 1)
    criterion, removed = criterion_named(name), list(all_heads(checkpoint.layout))[:1]
    options = run_options(shapley_samples=2)
    plain = criterion.scores(ScoringContext(checkpoint, corpus, options=options))
    assert np.isfinite(list(plain.values())).all()
    later = criterion.scores(ScoringContext(checkpoint, corpus, options=options, removed=removed))
    remaining = [head for head in plain if head not in removed]
    differs = any(plain[head] != later[head] for head in remaining)
    assert differs is criterion.changes
    if differs:
        with masked(checkpoint.model, removed):
            assert criterion.scores(ScoringContext(checkpoint, corpus, options=options)) == later
