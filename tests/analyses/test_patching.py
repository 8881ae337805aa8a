"""Patching: exact differences, their first order, gradients along a path; against hooks on the eager model."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from headscope.attribution.patching import exact_effects
from headscope.data.batching import Omissions, batches
from headscope.data.corpus import Corpus, open_corpus
from headscope.data.encoded import Batch
from headscope.evaluation.prompts import with_answers
from headscope.heads import Site, SiteLayer
from headscope.model.prefix_cache import resumable_layers
from headscope.model.taps import frozen_parameters
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import circuit, patching, prompts, speakers
from tests.oracles.patching import Eager

pytestmark = pytest.mark.slow

STEPS = 2
RUNS = (("gpt2", "noising"), ("gpt2", "denoising"), ("llama", "noising"), ("t5", "denoising"), ("bert", "noising"))
"""Models and directions that are compared with hooks."""
COLUMNS = {"patching": "exact", "attribution_patching": "first_order", "eap_ig": "integrated"}


@cache
def found(kind: str, direction: str) -> Study:
    options: dict[str, Any] = {"tokens": 101, "replicates": 19, "direction": direction, "eap_steps": STEPS}
    return study_of(speakers.checkpoint(kind), prompts.corpus(kind), "prompts", **options)


@cache
def eager(kind: str) -> list[Eager]:
    its = speakers.checkpoint(kind)
    return [Eager(its.model, kind, prompt, dict(its.layout)) for prompt in prompts.prompts(kind)]


def expected(kind: str, direction: str, column: str) -> dict[SiteLayer, np.ndarray]:
    """Means over prompts."""
    name, _, channel = column.partition(":")
    with frozen_parameters(speakers.checkpoint(kind).model):
        if channel:
            rows = [patching.by_weights(its, direction, channel) for its in eager(kind)]
        elif name == "eap_ig":
            rows = [patching.integrated_gradients(its, STEPS) for its in eager(kind)]
        else:
            rows = [getattr(patching, COLUMNS[name])(its, direction) for its in eager(kind)]
    return {place: torch.stack([row[place] for row in rows]).mean(dim=0).numpy() for place in rows[0]}


def columns(its: Study, name: str) -> dict[SiteLayer, np.ndarray]:
    grouped: Any = its.heads.groupby(["site", "layer"], sort=False)[name]
    return {(Site(site), layer): values.to_numpy() for (site, layer), values in grouped}


def precision(kind: str) -> float:
    """Llama's norms compute in float32, whatever the model's type."""
    return 2e-6 if kind == "llama" else 1e-9


def same(one: dict[SiteLayer, np.ndarray], other: dict[SiteLayer, np.ndarray], *, within: float) -> None:
    assert one.keys() == other.keys() and max(abs(values).max() for values in one.values()) > 1e-3
    for place, values in one.items():
        np.testing.assert_allclose(values, other[place], atol=within, rtol=0, err_msg=str(place))


@pytest.mark.parametrize(("kind", "direction"), RUNS)
@pytest.mark.parametrize("column", COLUMNS)
def test_columns_are_those_of_hooks_on_the_eager_model(kind: str, direction: str, column: str) -> None:
    same(columns(found(kind, direction), column), expected(kind, direction, column), within=precision(kind))


@pytest.mark.parametrize(("kind", "direction"), RUNS[:3])
@pytest.mark.parametrize("channel", ["query", "key", "value"])
def test_channels_are_changes_of_weights_times_their_gradients(kind: str, direction: str, channel: str) -> None:
    name = f"attribution_patching_{channel}"
    same(columns(found(kind, direction), name), expected(kind, direction, f"{name}:{channel}"), within=precision(kind))


def one_batch(kind: str) -> Batch:
    (batch, *_) = batches(
        prompts.corpus(kind), speakers.checkpoint(kind), tokens=1000, limit=60, omissions=Omissions(), labels=False
    )
    return batch


def swapped(count: int = 9) -> Corpus:
    """… a b … c d … a: b is the answer; in the corrupt prompt a and c have changed places, and it is d."""
    luck = np.random.default_rng(3)
    sentences, corrupt, answers = [], [], []
    for number in range(count):
        a, b, c, d, *rest = luck.permutation(circuit.WORDS[:21]).tolist()
        cut = 1 + number % 3
        sentences.append(" ".join([*rest[:cut], a, b, rest[cut], c, d, *rest[cut + 1 : 6], a]))
        corrupt.append(" ".join([*rest[:cut], c, b, rest[cut], a, d, *rest[cut + 1 : 6], a]))
        answers.append(f"{b}\t{d}")
    text = open_corpus(sentences)
    return with_answers(circuit.checkpoint(), text, corrupt, answers)


@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_patching_names_exactly_the_heads_of_the_circuit(direction: str) -> None:
    its = study_of(circuit.checkpoint(), swapped(), "prompts", replicates=50, direction=direction, eap_steps=STEPS)
    heads = its.heads.set_index(["layer", "head"])
    share = heads.patching_share
    assert (share[[circuit.PREVIOUS, circuit.INDUCTION]] > 0.95).all()
    assert (share.drop([circuit.PREVIOUS, circuit.INDUCTION]).abs() < 0.001).all()
    table = its.tables["patching"].query("measure == 'patching'")
    first = table.sort_values("rank").head(2)
    assert set(zip(first["layer"], first["head"], strict=True)) == {circuit.PREVIOUS, circuit.INDUCTION}
    assert (first["p_adjusted"] < 0.001).all()
    assert heads.attribution_patching_key.abs().idxmax() == circuit.INDUCTION, "its keys are what the other head writes"


def test_exact_effects_with_and_without_resumed_passes() -> None:
    its, batch = speakers.checkpoint("llama"), one_batch("llama")
    index = resumable_layers(its.model)
    assert index is not None
    with frozen_parameters(its.model):
        fast, slow = (exact_effects(its, batch, direction="noising", layer_index=part) for part in (index, None))
    for place, values in fast.effects["context"].items():
        torch.testing.assert_close(values, slow.effects["context"][place], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", [*speakers.SPEAKERS])
def test_logits_of_single_positions_are_those_of_all_positions(kind: str) -> None:
    its, batch = speakers.checkpoint(kind), one_batch(kind)
    assert batch.contrasts is not None
    with torch.no_grad():
        every, found = its.logits(batch), its.logits_at(batch, batch.contrasts.positions)
    expected = torch.stack([row[place] for row, place in zip(every, batch.contrasts.positions, strict=True)])
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
