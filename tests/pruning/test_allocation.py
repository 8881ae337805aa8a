"""Heads per module by the measured objective, against measuring every module at every step; and how it is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partialmethod
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headscope.data.corpus import Corpus
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.formats.native import NATIVE
from headscope.heads import HeadId
from headscope.model.prefix_cache import resumable_layers
from headscope.pruning.closed_form import compensate as compensate_module
from headscope.pruning.closed_form.compensate import ModuleOrder, RefittedCopy, compensate, measured_allocation
from headscope.pruning.closed_form.damage import DamageMeter, SharedLayers
from headscope.pruning.closed_form.moments import Moments, collect_moments
from headscope.pruning.closed_form.output_projections import output_projections
from headscope.pruning.options.rank import RankConfig
from headscope.pruning.ranking import scoring
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from headscope.pruning.ranking.rank_run import run_ranking
from headscope.pruning.ranking.scoring import removal_order
from tests.oracles import checkpoints, speakers

pytestmark = pytest.mark.slow

KINDS = ("bert", "llama", "marian", "native-post", "native-pre")


@cache
def measured(kind: str) -> tuple[Checkpoint, Moments, DamageMeter, tuple[ModuleOrder, ...]]:
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=19)
    moments = collect_moments(checkpoint, corpus)
    orders: list[ModuleOrder] = []
    for projection in output_projections(checkpoint):
        sums = moments.of(projection)
        assert sums is not None
        orders.append(
            (projection, [step.block for step in removal_order(ScoringContext(checkpoint, corpus), projection, sums)])
        )
    return checkpoint, moments, DamageMeter.of(checkpoint, corpus.first(7)), tuple(orders)


def damage_without(kind: str, heads: Sequence[HeadId]) -> float:
    """Mean growth of the loss of a model that is refitted anew, sentence by sentence, without padding."""
    checkpoint, moments, _, _ = measured(kind)
    made = RefittedCopy.of(checkpoint, compensate(checkpoint, moments, heads)).model
    intact, altered = loss(kind, checkpoint.model), loss(kind, made)
    return altered - intact


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
    checkpoint, moments, meter, orders = measured(kind)
    heads = [head for projection, units in orders for head in projection.units[units[0]]]
    made = RefittedCopy.of(checkpoint, compensate(checkpoint, moments, heads)).model
    performance = meter.measure(made)
    assert performance.objective == "loss" and performance.sentences == 7
    assert performance.value == pytest.approx(loss(kind, made), rel=1e-9)
    assert performance.damage == pytest.approx(damage_without(kind, heads), abs=1e-9)
    intact = meter.measure()
    assert intact.damage == 0 and intact.value == pytest.approx(loss(kind, checkpoint.model), rel=1e-9)
    assert intact.predictions == performance.predictions >= 7


def test_nothing_is_measured_on_lines_that_refits_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fourth of the text, and of a text of the user's as anchor; random subwords are refitted on alone."""
    checkpoint, corpus = speakers.checkpoint("bert"), speakers.corpus("bert", count=41)
    other = [sentence.source for sentence in speakers.corpus("bert", count=68, seed=2)]
    lines = {sentence.source for sentence in corpus} | set(other)
    read: dict[str, list[list[str]]] = {"fitted": [], "measured": []}

    def collected(its: Checkpoint, text: Corpus, *given: Any, **more: Any) -> Moments:
        read["fitted"].append([sentence.source for sentence in text])
        return collect_moments(its, text, *given, **more)

    def metered(its: Checkpoint, text: Corpus, *given: Any, made: Any = DamageMeter.of, **more: Any) -> DamageMeter:
        read["measured"].append([sentence.source for sentence in text])
        found: DamageMeter = made(its, text, *given, **more)
        return found

    monkeypatch.setattr(scoring, "collect_moments", collected)
    monkeypatch.setattr(DamageMeter, "of", metered)
    monkeypatch.setattr(scoring, "measured_allocation", lambda *given, **more: {})
    for anchor, counts in (("", [16]), ("mixed", [16]), (other, [16, 17])):
        for texts in read.values():
            texts.clear()
        scoring.measured_scores(ScoringContext(checkpoint, corpus, anchor=anchor), [])
        assert [len(text) for text in read["measured"]] == counts
        seen, measured = (Counter(chain(*read[name])) for name in ("fitted", "measured"))
        whole = Counter(line.source for line in corpus) + Counter(other if anchor is other else [])
        assert Counter({line: seen[line] for line in lines}) + measured >= whole >= measured
        if anchor != "mixed":
            assert seen + measured == whole
    for count in (2 * scoring.FEWEST_MEASURED - 1, 3):
        with pytest.raises(ConfigError, match=f"too few lines.*{count} of at least 32.*--by obs"):
            scoring.measured_scores(ScoringContext(checkpoint, corpus.first(count)), [])


@pytest.mark.parametrize("kind", KINDS)
def test_passes_begin_at_the_layer_that_differs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers to the last digit as of whole passes; feed-forward blocks are run less often."""
    _, moments, meter, orders = measured(kind)
    runs, of_layers = list[str](), [projection.owner for projection, _ in orders]

    def allocated() -> tuple[dict[HeadId, float], dict[str, float], list[str]]:
        runs.clear()
        known: dict[str, float] = {}
        return measured_allocation([meter, meter], moments, orders, known=known), known, [*runs]

    def counted(self: RefittedCopy, *given: Any, made: Any = RefittedCopy.__init__) -> None:
        made(self, *given)
        for owner in of_layers:
            self.model.get_submodule(owner).register_forward_hook(lambda *_, owner=owner: runs.append(owner))

    def probed(model: nn.Module) -> Any:
        found = resumable_layers(model)
        runs.clear()
        return found

    monkeypatch.setattr(RefittedCopy, "__init__", counted)
    monkeypatch.setattr(compensate_module, "resumable_layers", probed)
    scores, known, fewer = allocated()
    monkeypatch.setattr(SharedLayers, "__init__", partialmethod(SharedLayers.__init__, most=3000))
    found, alike, some = allocated()
    assert (found, alike) == (scores, known) and len(fewer) < len(some), "as far as memory goes"
    monkeypatch.setattr(compensate_module, "resumable_layers", lambda model: None)
    assert allocated() == (scores, known, runs) and len(some) < len(runs)
    counts = {owner: (fewer.count(owner), runs.count(owner)) for owner in of_layers}
    assert all(shared <= whole for shared, whole in counts.values()) and len(fewer) < len(runs)
    assert counts[of_layers[0]][0] < 0.8 * counts[of_layers[0]][1]


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_every_step_takes_the_module_that_does_the_least_damage(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module is measured at every step; the lazy evaluation measures few, and takes the same ones."""
    _, moments, meter, orders = measured(kind)
    known: dict[str, float] = {}
    found = measured_allocation([meter], moments, orders, known=known)
    half = dict(list(known.items())[: len(known) // 2])
    with monkeypatch.context() as patch:
        measures, measure = iter(range(len(known) - len(half))), DamageMeter.measure
        patch.setattr(DamageMeter, "measure", lambda *given, **how: (next(measures), measure(*given, **how))[1])
        again = measured_allocation([meter], moments, orders, known=half)
    assert again == found and half == known and next(measures, None) is None
    fewer: dict[str, float] = {}
    first = measured_allocation([meter], moments, orders, most=2, known=fewer)
    placed = sorted(found, key=found.__getitem__)[:3]
    assert [first[head] for head in placed] == [found[head] for head in placed] and fewer.keys() < known.keys()
    assert first.keys() == found.keys() and min(first.keys() - set(placed), key=first.__getitem__) not in placed
    gone: list[HeadId] = []
    numbers = [0] * len(orders)
    previous = 0.0
    for _ in range(sum(len(units) for _, units in orders)):
        trials = {
            number: damage_without(kind, [*gone, *projection.units[units[numbers[number]]]])
            for number, (projection, units) in enumerate(orders)
            if numbers[number] < len(units)
        }
        number = min(trials, key=lambda candidate: trials[candidate])
        projection, units = orders[number]
        unit = projection.units[units[numbers[number]]]
        score = found[unit[0]]
        assert {found[head] for head in unit} == {score}
        assert score == pytest.approx(max(trials[number], previous), abs=1e-7)
        assert score > previous or not gone
        gone, previous = [*gone, *unit], score
        numbers[number] += 1
    assert sorted(found, key=lambda head: (found[head], gone.index(head))) == gone


def test_the_criterion_measures_on_its_text_and_heads_that_are_protected_never_go() -> None:
    checkpoint, corpus = checkpoints.hugging("bert-without-head"), speakers.corpus("bert", count=37)
    heads = [HeadId.parse(name) for name in ("encoder-self.0.0", "encoder-self.0.2", "encoder-self.1.1")]
    context = ScoringContext(checkpoint, corpus, candidates=frozenset(heads))
    scores = criterion_named("obs-measured").scores(context)
    assert {head for head, score in scores.items() if score == score} == set(heads)
    _, _, last = sorted(heads, key=lambda head: scores[head])
    fitted, measured = scoring.held_apart(corpus)
    moments, meter = collect_moments(checkpoint, fitted), DamageMeter.of(checkpoint, measured)
    made = RefittedCopy.of(checkpoint, compensate(checkpoint, moments, heads)).model
    assert scores[last] == pytest.approx(meter.measure(made).damage, abs=1e-6)


def test_any_order_inside_modules_is_allocated_by_measuring(tmp_path: Path) -> None:
    """`--by obs --allocate measured` is `obs-measured`; by another criterion modules lose their heads in its order."""
    NATIVE.save(checkpoints.small(), tmp_path / "whole")
    lines = [" ".join("abcdefg"[(n * k) % 7] for k in range(1, 3 + n % 4)) for n in range(1, 49)]
    for name, sign in (("a", 1), ("b", -1)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines[::sign]), encoding="utf-8")

    def chosen(out: str, **options: Any) -> Any:
        texts = {"source": tmp_path / "a", "target": tmp_path / "b"}
        keep = {"keep": 8, "checkpoint": str(tmp_path / "whole"), "device": "cpu", "valid_sentences": 3}
        return run_ranking(RankConfig(**{"out": tmp_path / out, **keep, **texts, **options}))

    first = chosen("first", by="obs", allocate="measured")
    assert first.tables["ranking"].equals(chosen("second", by="obs-measured").tables["ranking"])
    assert first.record["ranking"]["allocate"] == "measured" and "allocate:measured" in str(first.signature)
    by_size = chosen("third", by="magnitude", allocate="measured").tables["ranking"]
    magnitudes = chosen("fourth", by="magnitude").tables["ranking"]
    places = ["site", "layer"]
    for place, rows in by_size.groupby(places):
        alone = magnitudes.set_index(places).loc[[place]]
        assert rows["head"].tolist() == alone["head"].tolist()
    equal = (
        chosen("fifth", by="obs", allocate="per-layer").tables["ranking"].groupby(places)["kept"].agg(["sum", "count"])
    )
    assert ((equal["sum"] - equal["count"] * 8 / equal["count"].sum()).abs() < 1).all()
    damped = [chosen(f"damped{number}", by="obs", damping=damping) for number, damping in enumerate((1e-4, 10.0))]
    assert not damped[0].tables["ranking"].equals(damped[1].tables["ranking"]) and "damping:10" in str(
        damped[1].signature
    )


def test_vectors_are_compared_by_their_cosine() -> None:
    checkpoint, corpus = checkpoints.hugging("bert-without-head"), speakers.corpus("bert", count=11)
    meter = DamageMeter.of(checkpoint, corpus)
    altered: Any = checkpoint.with_model(RefittedCopy.of(checkpoint, []).model).model
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


def test_an_objective_that_does_not_apply_is_refused() -> None:
    corpus = speakers.corpus("bert", count=3)
    with pytest.raises(ConfigError, match="--objective loss"):
        DamageMeter.of(checkpoints.hugging("bert-without-head"), corpus, objective="loss")
    with pytest.raises(ConfigError, match="'los'"):
        DamageMeter.of(speakers.checkpoint("bert"), replace(corpus), objective="los")
