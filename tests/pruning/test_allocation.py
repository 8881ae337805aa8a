"""Heads per module by the measured objective, against measuring every module at every step; and how it is measured."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache, partialmethod
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headscope.data.batching import BatchingOptions
from headscope.errors import ConfigError, DataError
from headscope.formats.base import Checkpoint
from headscope.formats.native import NATIVE
from headscope.heads import HeadId, Site
from headscope.model import discovery
from headscope.model.prefix_cache import SharedLayers
from headscope.model.projections import has_added_bias
from headscope.progress import report_to
from headscope.pruning.closed_form import allocation, damage
from headscope.pruning.closed_form.allocation import MeasuredAllocation
from headscope.pruning.closed_form.compensate import RefittedCopy, compensate
from headscope.pruning.closed_form.damage import DamageMeter, Divergence
from headscope.pruning.closed_form.moments import Moments, collect_moments
from headscope.pruning.closed_form.output_projections import OutputProjection, output_projections
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.options.shared import Refit
from headscope.pruning.ranking import criterion as criterion_module
from headscope.pruning.ranking.criterion import ScoringContext
from headscope.pruning.ranking.rank_run import run_ranking
from headscope.results.ranking import Ranking
from tests.oracles import checkpoints, speakers
from tests.oracles.speakers import V

pytestmark = pytest.mark.slow

OPTIONS = Refit(add_bias=True)
KINDS = ("bert", "llama", "marian", "native-post", "native-pre")


@cache
def prepare_refit(kind: str) -> tuple[Checkpoint, Moments, DamageMeter, list[OutputProjection]]:
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=19)
    meter = DamageMeter(checkpoint, corpus.first(7), batching=BatchingOptions(tokens=1))
    return checkpoint, collect_moments(checkpoint, corpus), meter, output_projections(checkpoint)


def damage_without(kind: str, heads: Sequence[HeadId]) -> float:
    """Mean growth of the loss of a model refitted from the start, sentence by sentence, without padding."""
    return mean_loss(kind, prune_model(kind, heads)) - mean_loss(kind, speakers.checkpoint(kind).model)


def mean_loss(kind: str, model: nn.Module) -> float:
    checkpoint = speakers.checkpoint(kind).with_model(model)
    total, count = 0.0, 0
    for sentence in speakers.corpus(kind, count=19).first(7):
        question = speakers.make_example(kind, sentence)
        with torch.no_grad():
            total += float(question.loss(checkpoint))
        count += len(question.labels)
    return total / count


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_the_growth_of_the_loss(kind: str) -> None:
    checkpoint, _, meter, projections = prepare_refit(kind)
    heads = [head for projection in projections for head in projection.units[0]]
    model = prune_model(kind, heads)
    performance = meter.measure(model)
    assert performance.objective == "loss" and performance.sentences == 7
    assert performance.value == pytest.approx(mean_loss(kind, model), rel=1e-9)
    assert performance.damage == pytest.approx(damage_without(kind, heads), abs=1e-9)
    intact = meter.measure()
    assert intact.damage == 0 and intact.value == pytest.approx(mean_loss(kind, checkpoint.model), rel=1e-9)
    assert intact.predictions == performance.predictions >= 7


@pytest.mark.parametrize("words", [3, 999])
@pytest.mark.parametrize("kind", KINDS)
def test_divergence_tells_the_likeliest_words_apart(kind: str, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """KL(intact ‖ pruned), sentence by sentence, no padding: of all words, or the less likely ones as one."""
    monkeypatch.setattr(damage, "WORDS", words)
    checkpoint, _, _, projections = prepare_refit(kind)
    corpus = speakers.corpus(kind, count=19).first(7)
    meter = DamageMeter(checkpoint, corpus, objective=Divergence())
    pruned = prune_model(kind, [head for projection in projections for head in projection.units[0]])
    total, count = 0.0, 0
    for sentence in corpus:
        question = speakers.make_example(kind, sentence)
        with torch.no_grad():
            p, q = (question.logits(model).softmax(-1) for model in (checkpoint, checkpoint.with_model(pruned)))
        for position in question.labels:
            order = p[position].argsort(descending=True)
            (p_top, p_rest), (q_top, q_rest) = (
                rows[position][order].split([min(words, V), V - min(words, V)]) for rows in (p, q)
            )
            pairs = [*zip(p_top, q_top, strict=True)] + [(p_rest.sum(), q_rest.sum())] * (words < V)
            total += sum(float(a * (a / b).log()) for a, b in pairs)
            count += 1
    performance = meter.measure(pruned)
    assert performance.damage == performance.value == pytest.approx(total / count, rel=1e-9) and total > 1e-4
    assert performance.predictions == count and meter.measure().damage == pytest.approx(0, abs=1e-12)


def prune_model(kind: str, heads: Sequence[HeadId]) -> nn.Module:
    checkpoint, moments, _, _ = prepare_refit(kind)
    return RefittedCopy.of(checkpoint, compensate(checkpoint, moments, heads, OPTIONS)).model


def build_allocator(kind: str) -> MeasuredAllocation:
    """With estimates so low that every candidate is measured first."""
    _, moments, meter, projections = prepare_refit(kind)
    estimates = dict.fromkeys(all_units(kind), -9.0)
    return MeasuredAllocation([meter, meter], moments, projections, estimates, OPTIONS)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_cheapest_by_a_fresh_measurement_goes_next(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate is measured again only when it is the cheapest by its last measurement; here with a new refit."""
    monkeypatch.setattr(allocation, "TRIES", 99)
    left = {number: list(projection.units) for number, projection in enumerate(prepare_refit(kind)[3])}
    costs = {(number, unit): -9.0 for number, units in left.items() for unit in [*units, ()]}
    fresh, removed, damage, damages = set[Any](), list[HeadId](), 0.0, build_allocator(kind).take(99)
    while costs:
        number, unit = key = min(costs, key=lambda key: (costs[key], key))
        units = [unit] if unit else left[number]
        if not set(units) <= set(left[number]) or (not unit and len(units) < 2):
            del costs[key]
        elif key not in fresh:
            costs[key] = (damage_without(kind, [*removed, *chain(*units)]) - damage) / len(units)
            fresh.add(key)
        else:
            removed += chain(*units)
            damage += costs[key] * len(units)
            assert min(damages[head] for head in chain(*units)) >= damage - 1e-7
            left[number] = [other for other in left[number] if other not in units]
            fresh.clear()
    assert sorted(damages, key=lambda head: (damages[head], removed.index(head))) == removed


@pytest.mark.parametrize("kind", ["bert", "llama", "native-post"])
def test_sizes_are_nested_and_modules_never_exceed_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "TRIES", 99)
    allocator, heads = build_allocator(kind), len(all_units(kind)[0])
    for count in range(heads, 3 * heads + 1, heads):
        damages = allocator.take(count)
        first = sorted(damages, key=damages.__getitem__)[:count]
        assert len(allocator.scores) == count and set(first) == set(allocator.scores)
        assert damages.keys() == set(chain(*all_units(kind)))
        assert allocator.damage == pytest.approx(damage_without(kind, first), abs=1e-9)


def all_units(kind: str) -> list[tuple[HeadId, ...]]:
    return [unit for projection in prepare_refit(kind)[3] for unit in projection.units]


def test_passes_are_said_beforehand_and_with_one_a_step_estimates_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, steps = build_allocator("bert"), list[tuple[int, int]]()
    allocator.take(2, progress=report_to(lambda _, step, total: steps.append((step, total))))
    step, max_passes = steps[-1]
    assert step == len(steps) - 1 == allocator.passes <= max_passes == 2 * allocation.TRIES
    monkeypatch.setattr(allocation, "TRIES", 1)
    _, moments, meter, projections = prepare_refit("bert")
    estimates = {unit: 9.0**number for number, unit in enumerate(reversed(all_units("bert")))}
    unknown = MeasuredAllocation([meter], moments, projections, dict.fromkeys(estimates, 0.0), OPTIONS)
    max_passes = unknown.max_passes(1)
    unknown.take(1)
    assert unknown.passes == len(estimates) <= max_passes, "all that can go are measured first"
    assert all(estimate.unit == allocation.MODULE for estimate in unknown.estimated_cuts)
    estimating = MeasuredAllocation([meter], moments, projections, estimates, OPTIONS)
    damages = estimating.take(len(estimates))
    assert estimating.passes == len(estimates)
    assert sorted(damages, key=damages.__getitem__) == list(chain(*reversed(all_units("bert"))))


def test_modules_that_get_a_bias_are_not_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, probed = build_allocator("llama"), list[nn.Module]()
    monkeypatch.setattr(discovery, "probe", probed.append)
    allocator.take(len(all_units("llama")[0]))
    owners = (allocator.trial.model.get_submodule(projection.owner) for projection in allocator.projections)
    assert any(map(has_added_bias, owners)) and not probed


def test_passes_begin_at_the_layer_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to whole passes to the last digit; output projections of lower layers run less often."""
    monkeypatch.setattr(allocation, "TRIES", 99)
    runs = list[str]()

    def run_search(resumable: bool, **options: Any) -> tuple[dict[HeadId, float], int]:
        with monkeypatch.context() as patch:
            if not resumable:
                patch.setattr(SharedLayers, "for_texts", lambda model, count: [None] * count)
            patch.setattr(SharedLayers, "__init__", partialmethod(SharedLayers.__init__, **options))
            allocator = build_allocator("llama")
        for projection in allocator.projections:
            allocator.trial.model.get_submodule(projection.owner).register_forward_hook(lambda *_: runs.append(""))
        runs.clear()
        return allocator.take(99), len(runs)

    shared, partial, full = run_search(True), run_search(True, max_bytes=3000), run_search(False)
    assert shared[0] == partial[0] == full[0] and shared[1] < partial[1] < full[1], "as far as memory goes"


def test_what_is_measured_no_refit_saw() -> None:
    """The held-out fifth of the text, and the second text where its unit is the same."""
    checkpoint, corpus = checkpoints.huggingface("bert-without-head"), speakers.corpus("bert", count=41)
    context = ScoringContext(checkpoint, corpus)
    gates = GateLayout(checkpoint.attention_sites)
    scores = {head: float(number) for number, head in enumerate(chain(*gates.units))}
    allocator = criterion_module.measured_allocation(context, gates.units, scores)
    assert [meter.corpus.count for meter in allocator.meters] == [8, 24]
    assert allocator.moments.of(allocator.projections[0]) is not None
    expected = collect_moments(checkpoint, corpus.first(33))
    assert torch.equal(*(moments.of(allocator.projections[0]).products for moments in (allocator.moments, expected)))  # type: ignore[union-attr]
    with pytest.raises(DataError, match="too few to refit"):
        criterion_module.measured_allocation(ScoringContext(checkpoint, corpus.first(8)), gates.units, scores)
    with pytest.raises(ConfigError, match="no score"):
        criterion_module.measured_allocation(context, gates.units, {})


def test_units_are_tried_in_the_order_of_any_ranking_and_protected_heads_stay(tmp_path: Path) -> None:
    NATIVE.save(checkpoints.small(), tmp_path / "whole")
    lines = [" ".join("abcdefg"[(n * k) % 7] for k in range(1, 3 + n % 4)) for n in range(1, 49)]
    for name, sign in (("a", 1), ("b", -1)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines[::sign]), encoding="utf-8")

    def run_rank(out: str, **options: Any) -> Ranking:
        texts = {"source": tmp_path / "a", "target": tmp_path / "b"}
        keep = {"keep": 8, "checkpoint": str(tmp_path / "whole"), "device": "cpu", "valid_sentences": 3}
        return run_ranking(RankConfig(**{"out": tmp_path / out, **keep, **texts, **options}))

    first = run_rank("first", by="fisher", allocate="measured", protect="cross.0.*")
    assert first.record["ranking"]["allocate"] == "measured" and "allocate:measured" in str(first.signature)
    assert len(first.kept) == 8 and not [head for head in first.removed if head.site is Site.CROSS and head.layer == 0]
    table = run_rank("second", by="obs", allocate="per-layer").tables["ranking"]
    per_layer = table.groupby(["site", "layer"])["kept"].agg(["sum", "count"])
    assert ((per_layer["sum"] - per_layer["count"] * 8 / per_layer["count"].sum()).abs() < 1).all()
    rankings = [run_rank(f"damping{number}", by="obs", damping=damping) for number, damping in enumerate((1e-4, 10.0))]
    assert not rankings[0].scores.equals(rankings[1].scores) and "damping:10" in str(rankings[1].signature)


def test_vectors_are_compared_by_their_cosine() -> None:
    checkpoint, corpus = checkpoints.huggingface("bert-without-head"), speakers.corpus("bert", count=11)
    meter = DamageMeter(checkpoint, corpus)
    noisy: Any = deepcopy(checkpoint.model)
    assert meter.measure(noisy).value == pytest.approx(1, abs=1e-6)
    with torch.no_grad():
        next(noisy.parameters()).add_(torch.linspace(-0.1, 0.1, 5)[0])
        next(noisy.parameters())[::2] *= -1
    performance = meter.measure(noisy)
    cosines = [
        torch.cosine_similarity(embed(checkpoint, sentence), embed(checkpoint.with_model(noisy), sentence), dim=0)
        for sentence in corpus
    ]
    assert performance.value == pytest.approx(float(torch.stack(cosines).double().mean()), abs=1e-6)
    assert performance.damage == pytest.approx(1 - performance.value) and performance.damage > 1e-4


def embed(checkpoint: Checkpoint, sentence: Any) -> torch.Tensor:
    model: Any = checkpoint.model
    (tokens,) = checkpoint.encode([sentence.source], side="source", limit=50)
    with torch.no_grad():
        states: torch.Tensor = model(input_ids=torch.tensor([tokens.ids])).last_hidden_state[0]
    return states.mean(dim=0)
