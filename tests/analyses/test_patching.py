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
"""The models and directions to compare with hooks."""
COLUMNS = {"patching": "exact", "attribution_patching": "first_order", "eap_ig": "integrated"}


@cache
def study(kind: str, direction: str) -> Study:
    options: dict[str, Any] = {"tokens": 101, "replicates": 19, "direction": direction, "eap_steps": STEPS}
    return study_of(speakers.checkpoint(kind), prompts.corpus(kind), "prompts", **options)


@cache
def eager(kind: str) -> list[Eager]:
    checkpoint = speakers.checkpoint(kind)
    return [Eager(checkpoint.model, kind, prompt, dict(checkpoint.layout)) for prompt in prompts.prompts(kind)]


def expected(kind: str, direction: str, column: str) -> dict[SiteLayer, np.ndarray]:
    """Means over prompts."""
    name, _, channel = column.partition(":")
    with frozen_parameters(speakers.checkpoint(kind).model):
        if channel:
            rows = [patching.by_weights(model, direction, channel) for model in eager(kind)]
        elif name == "eap_ig":
            rows = [patching.integrated_gradients(model, STEPS) for model in eager(kind)]
        else:
            rows = [getattr(patching, COLUMNS[name])(model, direction) for model in eager(kind)]
    return {site_layer: torch.stack([row[site_layer] for row in rows]).mean(dim=0).numpy() for site_layer in rows[0]}


def columns(study: Study, name: str) -> dict[SiteLayer, np.ndarray]:
    groups: Any = study.heads.groupby(["site", "layer"], sort=False)[name]
    return {(Site(site), layer): values.to_numpy() for (site, layer), values in groups}


def precision(kind: str) -> float:
    """Llama's norms compute in float32, whatever the model's type."""
    return 2e-6 if kind == "llama" else 1e-9


def check(one: dict[SiteLayer, np.ndarray], other: dict[SiteLayer, np.ndarray], *, atol: float) -> None:
    assert one.keys() == other.keys() and max(abs(values).max() for values in one.values()) > 1e-3
    for site_layer, values in one.items():
        np.testing.assert_allclose(values, other[site_layer], atol=atol, rtol=0, err_msg=str(site_layer))


@pytest.mark.parametrize(("kind", "direction"), RUNS)
@pytest.mark.parametrize("column", COLUMNS)
def test_columns_are_those_of_hooks_on_the_eager_model(kind: str, direction: str, column: str) -> None:
    check(columns(study(kind, direction), column), expected(kind, direction, column), atol=precision(kind))


@pytest.mark.parametrize(("kind", "direction"), RUNS[:3])
@pytest.mark.parametrize("channel", ["query", "key", "value"])
def test_channels_are_changes_of_weights_times_their_gradients(kind: str, direction: str, channel: str) -> None:
    name = f"attribution_patching_{channel}"
    check(columns(study(kind, direction), name), expected(kind, direction, f"{name}:{channel}"), atol=precision(kind))


def one_batch(kind: str) -> Batch:
    (batch, *_) = batches(
        prompts.corpus(kind), speakers.checkpoint(kind), tokens=1000, limit=60, omissions=Omissions(), labels=False
    )
    return batch


def swap_words(count: int = 9) -> Corpus:
    """… a b … c d … a: b is the answer; in the corrupt prompt a and c have changed places, and it is d."""
    rng = np.random.default_rng(3)
    sentences, corrupt, answers = [], [], []
    for number in range(count):
        a, b, c, d, *fillers = rng.permutation(circuit.WORDS[:21]).tolist()
        split = 1 + number % 3
        sentences.append(" ".join([*fillers[:split], a, b, fillers[split], c, d, *fillers[split + 1 : 6], a]))
        corrupt.append(" ".join([*fillers[:split], c, b, fillers[split], a, d, *fillers[split + 1 : 6], a]))
        answers.append(f"{b}\t{d}")
    text = open_corpus(sentences)
    return with_answers(circuit.checkpoint(), text, corrupt, answers)


@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_patching_names_exactly_the_heads_of_the_circuit(direction: str) -> None:
    study = study_of(circuit.checkpoint(), swap_words(), "prompts", replicates=50, direction=direction, eap_steps=STEPS)
    heads = study.heads.set_index(["layer", "head"])
    share = heads.patching_share
    assert (share[[circuit.PREVIOUS, circuit.INDUCTION]] > 0.95).all()
    assert (share.drop([circuit.PREVIOUS, circuit.INDUCTION]).abs() < 0.001).all()
    table = study.tables["patching"].query("measure == 'patching'")
    first = table.sort_values("rank").head(2)
    assert set(zip(first["layer"], first["head"], strict=True)) == {circuit.PREVIOUS, circuit.INDUCTION}
    assert (first["p_adjusted"] < 0.001).all()
    assert heads.attribution_patching_key.abs().idxmax() == circuit.INDUCTION, "its keys are what the other head writes"


def test_exact_effects_with_and_without_resumed_passes() -> None:
    checkpoint, batch = speakers.checkpoint("llama"), one_batch("llama")
    index = resumable_layers(checkpoint.model)
    assert index is not None
    with frozen_parameters(checkpoint.model):
        fast, slow = (exact_effects(checkpoint, batch, direction="noising", layer_index=part) for part in (index, None))
    for site_layer, values in fast.effects["context"].items():
        torch.testing.assert_close(values, slow.effects["context"][site_layer], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", [*speakers.SPEAKERS])
def test_logits_of_single_positions_are_those_of_all_positions(kind: str) -> None:
    checkpoint, batch = speakers.checkpoint(kind), one_batch(kind)
    assert batch.contrasts is not None
    with torch.no_grad():
        all_logits, logits = checkpoint.logits(batch), checkpoint.logits_at(batch, batch.contrasts.positions)
    expected = torch.stack([row[position] for row, position in zip(all_logits, batch.contrasts.positions, strict=True)])
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
