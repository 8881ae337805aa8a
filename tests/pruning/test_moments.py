"""Moments of contexts and Fisher matrices, against hooks and one sentence at a time without padding."""

from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headscope.attribution.objectives.base import ObjectiveOutput
from headscope.attribution.objectives.predictions import Representation
from headscope.config.option import SEED
from headscope.data.batching import BatchingOptions, Omissions, batches
from headscope.data.corpus import Corpus, open_corpus
from headscope.distributed import Processes
from headscope.errors import ConfigError
from headscope.heads import SiteLayer
from headscope.pruning.closed_form.moments import Moments, collect_moments, explained_values
from headscope.pruning.closed_form.output_projections import output_projections
from tests.contracts import architectures
from tests.makers import wrappers
from tests.oracles import checkpoints, speakers, tiny
from tests.oracles import closed_form as oracle

KINDS = ("bert", "llama", "t5", "marian", "native-post")
WITH_LOSS = (*KINDS, "native-pre")


def assert_near(actual: Tensor, expected: Any, tolerance: float = 1e-9) -> None:
    expected = torch.as_tensor(expected)
    assert actual.shape == expected.shape and actual.dtype == torch.float64
    assert (actual - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


@cache
def moments(kind: str, *, tokens: int = 2048, objective: str | None = None) -> Moments:
    batching = BatchingOptions(tokens=tokens)
    return collect_moments(speakers.checkpoint(kind), speakers.corpus(kind), batching=batching, objective=objective)


def assert_equal(first: Moments, second: Moments, tolerance: float = 1e-11) -> None:
    assert first.sites.keys() == second.sites.keys()
    assert first.predictions == second.predictions
    for site_layer, sums in first.sites.items():
        other = second.sites[site_layer]
        assert sums.tokens == other.tokens
        for name in ("total", "products", "norms"):
            assert_near(getattr(sums, name), getattr(other, name), tolerance)
        assert (sums.fisher is None) is (other.fisher is None)
        if sums.fisher is not None and other.fisher is not None:
            assert_near(sums.fisher, other.fisher, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_the_inputs_of_every_output_projection(kind: str) -> None:
    """Batches of several lengths: padding in the middle, which is not counted."""
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind)
    expected, actual = oracle.contexts(kind, checkpoint, corpus), moments(kind)
    with_heads = {site_layer for site_layer, heads in checkpoint.layout.items() if heads}
    assert actual.sites.keys() == with_heads <= expected.keys()
    for site_layer in with_heads:
        sums, heads, rows = actual.sites[site_layer], checkpoint.layout[site_layer], expected[site_layer]
        assert sums.tokens == len(rows) and sums.fisher is None
        assert_near(sums.total, rows.sum(axis=0))
        assert_near(sums.products, sum(np.outer(row, row) for row in rows))
        assert_near(sums.mean, rows.mean(axis=0))
        assert_near(sums.covariance, np.cov(rows.T, bias=True))
        assert_near(
            sums.norms,
            [np.linalg.norm(rows[:, part], axis=1).sum() for part in np.split(np.arange(rows.shape[1]), heads)],
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "gpt2", "native-pre"])
def test_a_batch_of_many_sentences_is_as_many_batches_of_one(kind: str) -> None:
    assert_equal(moments(kind, objective=""), moments(kind, tokens=1, objective=""), 1e-9)


def test_mixed_heads_are_seen_before_a_mixing_that_is_folded() -> None:
    """W_O with the mixing folded in times contexts before it is W_O times contexts after it."""
    checkpoint = speakers.checkpoint("native-pre")
    after, actual = oracle.contexts("native-pre", checkpoint, speakers.corpus("native-pre")), moments("native-pre")
    for projection in output_projections(checkpoint):
        (site_layer,) = projection.site_layers
        assert projection.mixing
        plain = checkpoint.model.get_submodule(projection.owner).get_parameter("weight").detach().numpy()
        rows = after[site_layer] @ plain.T
        sums = actual.of(projection)
        assert sums is not None and sums.tokens == len(rows)
        assert_near(projection.weight @ sums.mean, rows.mean(axis=0))
        assert_near(projection.weight @ sums.second @ projection.weight.T, rows.T @ rows / len(rows))
        if checkpoint.layout[site_layer] > 1:
            assert np.abs(sums.mean.numpy() - after[site_layer].mean(axis=0)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_LOSS)
def test_fisher_matrices_of_the_training_criterion(kind: str) -> None:
    """Σ g gᵀ of the loss at every token; a masked model reads hidden tokens for it, contexts are of the plain text."""
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind)
    gradients, predictions = oracle.output_gradients(kind, checkpoint, corpus)
    actual = moments(kind, objective="loss")
    assert actual.predictions == predictions
    for site_layer, sums in actual.sites.items():
        rows = gradients[site_layer]
        assert sums.fisher is not None and len(rows) == sums.tokens
        assert_near(sums.fisher, rows.T @ rows)
        assert_near(sums.products, moments(kind).sites[site_layer].products, 1e-11)


@pytest.mark.slow
def test_the_probe_has_the_curvature_of_the_cosine() -> None:
    """For an objective that compares vectors: E (z · δ)² is 2 (1 − cos) for a small change δ."""
    checkpoint = speakers.checkpoint("bert")
    (batch,) = batches(speakers.corpus("bert", count=1), checkpoint, tokens=99, limit=97, omissions=Omissions())
    outcome = Representation().outcome(checkpoint, batch)
    assert outcome.vector is not None
    vector = outcome.vector.detach()
    change = 1e-4 * torch.randn(vector.shape, generator=torch.Generator().manual_seed(1)).to(vector)
    expected = 2 * float(1 - torch.cosine_similarity(vector, vector + change)[0])
    with_gradient = replace(outcome, vector=vector.requires_grad_())
    squares = []
    for number in range(4001):
        (probe,) = torch.autograd.grad(explained_values(with_gradient, [number], seed=1).sum(), vector)
        squares.append(float((probe * change).sum()) ** 2)
    assert np.mean(squares) == pytest.approx(expected, rel=0.1)


def test_the_largest_seed_draws_a_probe() -> None:
    vector = torch.randn(1, 4, dtype=torch.float64)
    outcome = ObjectiveOutput(vector.sum(dim=1), torch.ones(1), vector=vector)
    assert explained_values(outcome, [3], seed=SEED).isfinite().all()


def test_processes_share_a_corpus_and_halves_add_up() -> None:
    checkpoint, corpus = speakers.checkpoint("marian"), speakers.corpus("marian")
    sentences = list(corpus)
    parts = [sentences[:4], sentences[4:]]
    halves = [
        collect_moments(checkpoint, replace(corpus, count=len(part), read=partial(iter, part)), objective="")
        for part in parts
    ]
    assert_equal(reduce(Moments.merge, halves), moments("marian", objective=""))

    class Alone(Processes):
        def all(self, value: Any) -> list[Any]:
            return [value]

    batching = BatchingOptions(tokens=17)
    shares = [
        collect_moments(checkpoint, corpus, batching=batching, objective="", processes=Alone(rank, 3))
        for rank in range(3)
    ]
    single = moments("marian", tokens=17, objective="")
    assert all(0 < share.predictions < single.predictions for share in shares)
    assert_equal(reduce(Moments.merge, shares), single)


# Which columns of which matrix.


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert", "gpt2", "llama", "qwen3", "t5", "marian"])
def test_units_and_weights_of_every_architecture(name: str) -> None:
    """Groups of heads together; ALBERT's layers share one module; W times a context is the module's output."""
    architecture = architectures.BY_NAME[name]

    model = architectures.build(architecture)
    checkpoint = wrappers.hugging_face(model, tiny.tokenizer([], []))
    projections = output_projections(checkpoint)
    assert sum(len(projection.site_layers) for projection in projections) == len(checkpoint.layout)
    for projection in projections:
        heads = [head for unit in projection.units for head in unit]
        assert len(heads) == sum(checkpoint.layout[site_layer] for site_layer in projection.site_layers)
        assert sorted(projection.blocks.flatten().tolist()) == list(range(projection.weight.shape[1]))
        owner = model.get_submodule(projection.owner)
        x = torch.randn(3, projection.weight.shape[1])
        plain = owner(x).double() - (owner.bias.double() if projection.has_bias else 0)
        assert_near(plain.detach(), x.double() @ projection.weight.T, 1e-5)
        assert projection.columns(projection.units[-1]).tolist() == projection.blocks[-1].tolist()
        assert not len(projection.columns([]))
        if len(projection.site_layers) > 1:
            with pytest.raises(ConfigError, match=r"encoder-self\.0"):
                projection.columns(heads[:1])
        else:
            assert projection.columns(heads[-1:]).tolist() == projection.blocks[-1].tolist()[-projection.width :]
    assert {projection.has_bias for projection in projections} == {name in ("bert", "albert", "gpt2", "marian")}
    if name in ("llama", "qwen3", "albert"):
        assert all(len(unit) == 3 for projection in projections for unit in projection.units)
    if name == "albert":
        assert [len(projection.site_layers) for projection in projections] == [3]


def test_layers_that_share_a_module_share_moments() -> None:
    albert = speakers.wrap_model(architectures.CATALOGUE["albert"].model, speakers.SPEAKERS["bert"])
    actual = collect_moments(albert, speakers.corpus("bert"), objective="")
    (projection,) = output_projections(albert)
    sums, parts = actual.of(projection), [actual.sites[site_layer] for site_layer in projection.site_layers]
    assert sums is not None and sums.tokens == sum(part.tokens for part in parts)
    assert_near(sums.products, sum(part.products for part in parts))
    assert sums.fisher is not None
    assert_near(sums.fisher, sum(part.fisher for part in parts))
    assert not torch.allclose(parts[0].products, parts[1].products)


def test_mixed_heads_are_seen_after_a_mixing_that_depends_on_the_input() -> None:
    checkpoint = checkpoints.small(self_mixing="experts.v1")
    corpus = open_corpus(checkpoints.SOURCES[:3], target=checkpoints.TARGETS[:3])
    actual = collect_moments(checkpoint, corpus)
    expected = _contexts_by_hooks(checkpoint, corpus)
    assert any(not projection.mixing for projection in output_projections(checkpoint))
    for site_layer, sums in actual.sites.items():
        assert_near(sums.products, expected[site_layer].T @ expected[site_layer])


def test_the_model_is_left_as_it_was() -> None:
    checkpoint = speakers.checkpoint("llama", 5)  # which no other test has
    checkpoint.model.train()
    hooks = [len(part._forward_hooks) for part in checkpoint.model.modules()]
    collect_moments(checkpoint, speakers.corpus("llama"), objective="")
    assert checkpoint.model.training and all(weight.requires_grad for weight in checkpoint.model.parameters())
    assert hooks == [len(part._forward_hooks) for part in checkpoint.model.modules()]
    assert all(weight.grad is None for weight in checkpoint.model.parameters())


def _contexts_by_hooks(checkpoint: Any, corpus: Corpus) -> dict[SiteLayer, Any]:
    with oracle.record_passes(checkpoint) as recorder, torch.no_grad():
        for batch in batches(corpus, checkpoint, tokens=1, limit=50, omissions=Omissions()):
            checkpoint.forward(batch)
    return {site_layer: np.concatenate(rows) for site_layer, rows in recorder.inputs.items()}
