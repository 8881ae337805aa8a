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
from headscope.model.prefix_cache import SharedLayers
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
def measured(kind: str) -> tuple[Checkpoint, Moments, DamageMeter, list[OutputProjection]]:
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=19)
    meter = DamageMeter(checkpoint, corpus.first(7), batching=BatchingOptions(tokens=1))
    return checkpoint, collect_moments(checkpoint, corpus), meter, output_projections(checkpoint)


def damage_without(kind: str, heads: Sequence[HeadId]) -> float:
    """Mean growth of the loss of a model that is refitted anew, sentence by sentence, without padding."""
    return loss(kind, altered_model(kind, heads)) - loss(kind, speakers.checkpoint(kind).model)


def loss(kind: str, model: nn.Module) -> float:
    checkpoint = speakers.checkpoint(kind).with_model(model)
    total, count = 0.0, 0
    for sentence in speakers.corpus(kind, count=19).first(7):
        question = speakers.asked(kind, sentence)
        with torch.no_grad():
            total += float(question.loss(checkpoint))
        count += len(question.labels)
    return total / count


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_the_growth_of_the_loss(kind: str) -> None:
    checkpoint, _, meter, projections = measured(kind)
    heads = [head for projection in projections for head in projection.units[0]]
    made = altered_model(kind, heads)
    performance = meter.measure(made)
    assert performance.objective == "loss" and performance.sentences == 7
    assert performance.value == pytest.approx(loss(kind, made), rel=1e-9)
    assert performance.damage == pytest.approx(damage_without(kind, heads), abs=1e-9)
    intact = meter.measure()
    assert intact.damage == 0 and intact.value == pytest.approx(loss(kind, checkpoint.model), rel=1e-9)
    assert intact.predictions == performance.predictions >= 7


@pytest.mark.parametrize("words", [3, 999])
@pytest.mark.parametrize("kind", KINDS)
def test_divergence_tells_the_likeliest_words_apart(kind: str, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """KL(intact ‖ altered), sentence by sentence, no padding: of all words, or the less likely ones as one."""
    monkeypatch.setattr(damage, "WORDS", words)
    checkpoint, _, _, projections = measured(kind)
    corpus = speakers.corpus(kind, count=19).first(7)
    meter = DamageMeter(checkpoint, corpus, objective=Divergence())
    altered = altered_model(kind, [head for projection in projections for head in projection.units[0]])
    total, count = 0.0, 0
    for sentence in corpus:
        question = speakers.asked(kind, sentence)
        with torch.no_grad():
            p, q = (question.logits(each).softmax(-1) for each in (checkpoint, checkpoint.with_model(altered)))
        for place in question.labels:
            order = p[place].argsort(descending=True)
            (p_top, p_rest), (q_top, q_rest) = (
                each[place][order].split([min(words, V), V - min(words, V)]) for each in (p, q)
            )
            pairs = [*zip(p_top, q_top, strict=True)] + [(p_rest.sum(), q_rest.sum())] * (words < V)
            total += sum(float(a * (a / b).log()) for a, b in pairs)
            count += 1
    performance = meter.measure(altered)
    assert performance.damage == performance.value == pytest.approx(total / count, rel=1e-9) and total > 1e-4
    assert performance.predictions == count and meter.measure().damage == pytest.approx(0, abs=1e-12)


def altered_model(kind: str, heads: Sequence[HeadId]) -> nn.Module:
    checkpoint, moments, _, _ = measured(kind)
    return RefittedCopy.of(checkpoint, compensate(checkpoint, moments, heads, OPTIONS)).model


def search(kind: str) -> MeasuredAllocation:
    """With estimates so low that every candidate is measured first."""
    _, moments, meter, projections = measured(kind)
    estimates = dict.fromkeys(all_units(kind), -9.0)
    return MeasuredAllocation([meter, meter], moments, projections, estimates, OPTIONS)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_cheapest_by_a_fresh_measurement_goes_next(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured again only when it is the cheapest by what was measured before; here with a model refitted anew."""
    monkeypatch.setattr(allocation, "TRIES", 99)
    left = {number: list(each.units) for number, each in enumerate(measured(kind)[3])}
    costs = {(number, unit): -9.0 for number, units in left.items() for unit in [*units, ()]}
    fresh, gone, damage, found = set[Any](), list[HeadId](), 0.0, search(kind).take(99)
    while costs:
        number, unit = key = min(costs, key=lambda key: (costs[key], key))
        units = [unit] if unit else left[number]
        if not set(units) <= set(left[number]) or (not unit and len(units) < 2):
            del costs[key]
        elif key not in fresh:
            costs[key] = (damage_without(kind, [*gone, *chain(*units)]) - damage) / len(units)
            fresh.add(key)
        else:
            gone += chain(*units)
            damage += costs[key] * len(units)
            assert min(found[head] for head in chain(*units)) >= damage - 1e-7
            left[number] = [other for other in left[number] if other not in units]
            fresh.clear()
    assert sorted(found, key=lambda head: (found[head], gone.index(head))) == gone


@pytest.mark.parametrize("kind", ["bert", "llama", "native-post"])
def test_sizes_are_nested_and_modules_never_exceed_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "TRIES", 99)
    one, heads = search(kind), len(all_units(kind)[0])
    for count in range(heads, 3 * heads + 1, heads):
        found = one.take(count)
        first = sorted(found, key=found.__getitem__)[:count]
        assert (
            len(one.scores) == count and set(first) == set(one.scores) and found.keys() == set(chain(*all_units(kind)))
        )
        assert one.damage == pytest.approx(damage_without(kind, first), abs=1e-9)


def all_units(kind: str) -> list[tuple[HeadId, ...]]:
    return [unit for projection in measured(kind)[3] for unit in projection.units]


def test_passes_are_said_beforehand_and_with_one_a_step_estimates_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, steps = search("bert"), list[tuple[int, int]]()
    tries.take(2, progress=report_to(lambda _, done, total: steps.append((done, total))))
    done, most = steps[-1]
    assert done == len(steps) - 1 == tries.passes <= most == 2 * allocation.TRIES
    monkeypatch.setattr(allocation, "TRIES", 1)
    _, moments, meter, projections = measured("bert")
    estimates = {unit: 9.0**number for number, unit in enumerate(reversed(all_units("bert")))}
    unknown = MeasuredAllocation([meter], moments, projections, dict.fromkeys(estimates, 0.0), OPTIONS)
    most = unknown.max_passes(1)
    unknown.take(1)
    assert unknown.passes == len(estimates) <= most, "all that can go are measured first"
    assert all(cut.unit == allocation.MODULE for cut in unknown.estimated_cuts)
    blind = MeasuredAllocation([meter], moments, projections, estimates, OPTIONS)
    found = blind.take(len(estimates))
    assert blind.passes == len(estimates)
    assert sorted(found, key=found.__getitem__) == list(chain(*reversed(all_units("bert"))))


def test_passes_begin_at_the_layer_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers to the last digit as of whole passes; output projections of lower layers are run less often."""
    monkeypatch.setattr(allocation, "TRIES", 99)
    runs = list[str]()

    def searched(known: bool, **options: Any) -> tuple[dict[HeadId, float], int]:
        with monkeypatch.context() as patch:
            if not known:
                patch.setattr(allocation, "resumable_layers", lambda model: None)
            patch.setattr(SharedLayers, "__init__", partialmethod(SharedLayers.__init__, **options))
            tries = search("llama")
        for projection in tries.projections:
            tries.trial.model.get_submodule(projection.owner).register_forward_hook(lambda *_: runs.append(""))
        runs.clear()
        return tries.take(99), len(runs)

    shared, some, whole = searched(True), searched(True, max_bytes=3000), searched(False)
    assert shared[0] == some[0] == whole[0] and shared[1] < some[1] < whole[1], "as far as memory goes"


def test_what_is_measured_no_refit_saw() -> None:
    """The last fifth of the text, and the second text where that is measured in the same unit."""
    checkpoint, corpus = checkpoints.hugging("bert-without-head"), speakers.corpus("bert", count=41)
    context = ScoringContext(checkpoint, corpus)
    gates = GateLayout(checkpoint.attention_sites)
    scores = {head: float(number) for number, head in enumerate(chain(*gates.units))}
    tries = criterion_module.measured_allocation(context, gates.units, scores)
    assert [meter.corpus.count for meter in tries.meters] == [8, 24]
    assert tries.moments.of(tries.projections[0]) is not None
    fitted = collect_moments(checkpoint, corpus.first(33))
    assert torch.equal(*(each.of(tries.projections[0]).products for each in (tries.moments, fitted)))  # type: ignore[union-attr]
    with pytest.raises(DataError, match="too few to refit"):
        criterion_module.measured_allocation(ScoringContext(checkpoint, corpus.first(8)), gates.units, scores)
    with pytest.raises(ConfigError, match="no score"):
        criterion_module.measured_allocation(context, gates.units, {})


def test_units_are_tried_in_the_order_of_any_ranking_and_protected_heads_stay(tmp_path: Path) -> None:
    NATIVE.save(checkpoints.small(), tmp_path / "whole")
    lines = [" ".join("abcdefg"[(n * k) % 7] for k in range(1, 3 + n % 4)) for n in range(1, 49)]
    for name, sign in (("a", 1), ("b", -1)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines[::sign]), encoding="utf-8")

    def chosen(out: str, **options: Any) -> Ranking:
        texts = {"source": tmp_path / "a", "target": tmp_path / "b"}
        keep = {"keep": 8, "checkpoint": str(tmp_path / "whole"), "device": "cpu", "valid_sentences": 3}
        return run_ranking(RankConfig(**{"out": tmp_path / out, **keep, **texts, **options}))

    first = chosen("first", by="fisher", allocate="measured", protect="cross.0.*")
    assert first.record["ranking"]["allocate"] == "measured" and "allocate:measured" in str(first.signature)
    assert len(first.kept) == 8 and not [head for head in first.removed if head.site is Site.CROSS and head.layer == 0]
    places = ["site", "layer"]
    equal = (
        chosen("second", by="obs", allocate="per-layer").tables["ranking"].groupby(places)["kept"].agg(["sum", "count"])
    )
    assert ((equal["sum"] - equal["count"] * 8 / equal["count"].sum()).abs() < 1).all()
    damped = [chosen(f"damped{number}", by="obs", damping=damping) for number, damping in enumerate((1e-4, 10.0))]
    assert not damped[0].scores.equals(damped[1].scores) and "damping:10" in str(damped[1].signature)


def test_vectors_are_compared_by_their_cosine() -> None:
    checkpoint, corpus = checkpoints.hugging("bert-without-head"), speakers.corpus("bert", count=11)
    meter = DamageMeter(checkpoint, corpus)
    altered: Any = deepcopy(checkpoint.model)
    assert meter.measure(altered).value == pytest.approx(1, abs=1e-6)
    with torch.no_grad():
        next(altered.parameters()).add_(torch.linspace(-0.1, 0.1, 5)[0])
        next(altered.parameters())[::2] *= -1
    performance = meter.measure(altered)
    cosines = [
        torch.cosine_similarity(pooled(checkpoint, sentence), pooled(checkpoint.with_model(altered), sentence), dim=0)
        for sentence in corpus
    ]
    assert performance.value == pytest.approx(float(torch.stack(cosines).double().mean()), abs=1e-6)
    assert performance.damage == pytest.approx(1 - performance.value) and performance.damage > 1e-4


def pooled(checkpoint: Checkpoint, sentence: Any) -> torch.Tensor:
    model: Any = checkpoint.model
    (encoded,) = checkpoint.encode([sentence.source], side="source", limit=50)
    with torch.no_grad():
        states: torch.Tensor = model(input_ids=torch.tensor([encoded.ids])).last_hidden_state[0]
    return states.mean(dim=0)
