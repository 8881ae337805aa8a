"""Ablation, Shapley values and integrated gradients against their definitions, one sentence and pass at a time."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headscope.attribution.gatevector import (
    REPLACEMENTS,
    explained_batch,
    mean_context,
    other_context,
    random_shifts,
)
from headscope.attribution.objectives.base import OBJECTIVES
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import Batch, Side
from headscope.engine.plan import analyze
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site, all_heads
from headscope.model.prefix_cache import resumable_layers
from headscope.model.taps import masked
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import gate_games, speakers
from tests.oracles.gate_games import Game
from tests.oracles.shuffled import in_folds, other_way_round
from tests.oracles.speakers import SPEAKERS, Asked, asked

pytestmark = pytest.mark.slow

KINDS = tuple(SPEAKERS)
HALF = ("llama", "t5")  # their norms compute in float32
every_kind = pytest.mark.parametrize("kind", KINDS)


def text(kind: str) -> Corpus:
    """Few sentences, as every head of each is looked at by itself; of one fold, whose middle one is the shortest."""
    *_, first, second, third = sorted(speakers.corpus(kind, count=7), key=lambda one: len(one.source.split()))
    few = [one._replace(number=number) for number, one in enumerate((second, first, third))]
    return in_folds(replace(speakers.corpus(kind, count=3), read=lambda: iter(few)), 1)


def study(kind: str, name: str, *, tokens: int = 10**9, **options: Any) -> Study:
    return study_of(speakers.checkpoint(kind), text(kind), name, tokens=tokens, **options)


def column(its: Study, name: str) -> list[float]:
    """Values in the order of `all_heads`."""
    found = {HeadId(Site(row["site"]), row["layer"], row["head"]): row[name] for _, row in its.heads.iterrows()}
    return [found[head] for head in sorted(found, key=lambda h: (list(Site).index(h.site), h.layer, h.head))]


def same(found: Sequence[float], expected: Sequence[float], *, kind: str, exact: float = 1e-10) -> None:
    assert len(found) == len(expected) and any(expected)
    within = (1e-6 if kind in HALF else exact) * max(map(abs, expected))
    assert found == pytest.approx(expected, abs=within)


def minus_loss(one: Asked, its: Checkpoint) -> float:
    return -float(one.loss(its))


def logits_of(one: Asked, its: Checkpoint, ids: Tensor) -> float:
    """Σ of the logits of `ids` [t]."""
    logits = one.logits(its)
    return sum(logits[t, w].item() for t, w in enumerate(ids))


def over_corpus(kind: str, measure: Callable[[Game, Sentence], Sequence[float]]) -> list[float]:
    """Σ over sentences of a measure of −loss, divided by Σ of predicted tokens."""
    its, total, count = speakers.checkpoint(kind), torch.zeros(()).double(), 0
    for sentence in text(kind):
        one = asked(kind, sentence)
        game = gate_games.under_gates(its.model, its.layout, partial(minus_loss, one, its))
        total = total + torch.tensor(measure(game, sentence), dtype=torch.float64)
        count += len(one.labels)
    return (total / count).tolist()


def size_of(kind: str) -> int:
    return sum(speakers.checkpoint(kind).layout.values())


@every_kind
def test_ablation_is_the_rise_of_the_loss(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole folds in any order, with padding in the middle, as of single sentences."""
    expected = over_corpus(kind, lambda game, _: gate_games.ablation(game, size_of(kind)))
    same(column(study(kind, "ablation"), "ablation"), expected, kind=kind)
    if kind.startswith("native"):  # contracts have the others
        monkeypatch.setattr(sys.modules[analyze.__module__], "batches", other_way_round)
        same(column(study(kind, "ablation"), "ablation"), expected, kind=kind)


@pytest.mark.parametrize(
    ("how", "kind"), [("mean", "t5"), ("mean", "native-pre"), ("resample", "bert"), ("resample", "t5")]
)
def test_other_contexts_in_place_of_a_head(how: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    its = speakers.checkpoint(kind)

    def damages(_: Game, sentence: Sentence) -> list[float]:
        one = asked(kind, sentence)
        found, intact = [], float(one.loss(its).detach())
        for head in all_heads(its.layout):
            length = len(one.source if head.site is Site.ENCODER_SELF or one.target is None else one.target)
            shift = int(random_shifts(torch.tensor([sentence.number]), torch.tensor([length]), seed=1))
            loss = gate_games.replaced(its.model, head, how, shift, lambda: float(one.loss(its)))
            found.append(loss - intact)
        return found

    expected = over_corpus(kind, damages)
    one = study(kind, "ablation", ablate_with=how)
    same(column(one, "ablation"), expected, kind=kind)
    assert one.record["signatures"]["ablation"] == {"m": "ablation.v1", "objective": "loss.v1", "with": how}
    monkeypatch.setattr(sys.modules[analyze.__module__], "batches", other_way_round)
    same(column(study(kind, "ablation", ablate_with=how), "ablation"), expected, kind=kind)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "native-post"])
def test_shapley_values_of_the_drawn_orders(kind: str) -> None:
    size = size_of(kind)
    torch.manual_seed(5)
    orders = [torch.randperm(size).tolist() for _ in range(2)]
    expected = over_corpus(kind, lambda game, _: gate_games.shapley(game, size, orders))
    before = torch.random.get_rng_state()
    found = column(study(kind, "shapley", shapley_samples=2, seed=5), "shapley") if kind != "bert" else None
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers stay as they are"
    if found is not None:
        same(found, expected, kind=kind, exact=1e-6)
    whole = over_corpus(kind, lambda game, _: [game([1.0] * size) - game([0.0] * size)])
    again = column(study(kind, "shapley", shapley_samples=1, seed=1), "shapley")
    assert sum(again) == pytest.approx(whole[0], rel=1e-6), "whatever the orders, values add up to the whole"


@pytest.mark.parametrize("kind", ["gpt2", "native-pre"])
def test_integrated_gradients(kind: str) -> None:
    size = size_of(kind)
    few = over_corpus(kind, lambda game, _: gate_games.integrated_gradients(game, size, points=3))
    its = study(kind, "integrated_gradients", ig_steps=3)
    same(column(its, "integrated_gradients"), few, kind=kind, exact=1e-6)
    if kind == "native-pre":
        return  # too steep near zero, where its first norm has next to nothing to divide by, for a few steps
    whole = over_corpus(kind, lambda game, _: [game([1.0] * size) - game([0.0] * size)])[0]
    many = study(kind, "integrated_gradients", ig_steps=32)
    assert sum(column(many, "integrated_gradients")) == pytest.approx(whole, rel=1e-4)
    assert not any("raise --ig-steps" in remark for remark in many.remarks)
    assert any("32 steps leave a gap of 0.0%" in remark for remark in many.remarks)
    one = study(kind, "integrated_gradients", ig_steps=1)
    assert abs(sum(column(one, "integrated_gradients")) - whole) > 0.01 * abs(whole)
    assert any("1 steps leave" in remark and "raise --ig-steps" in remark for remark in one.remarks)


def test_what_the_intact_model_says() -> None:
    """`top1`: logits of the ids that the intact model finds likeliest."""
    its, total, count = speakers.checkpoint("gpt2"), torch.zeros(()).double(), 0
    heads = list(all_heads(its.layout))
    for sentence in text("gpt2"):
        one = asked("gpt2", sentence)
        with torch.no_grad():
            ids = one.logits(its).argmax(dim=-1)
        game = gate_games.under_gates(its.model, its.layout, partial(logits_of, one, its, ids))
        total = total + torch.tensor(gate_games.ablation(game, len(heads)), dtype=torch.float64)
        count += len(ids)
    same(column(study("gpt2", "ablation", objective="top1"), "ablation"), (total / count).tolist(), kind="gpt2")


def test_gates_of_their_own_for_every_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that differ take a whole pass and give what each row's gates give alone."""
    its = speakers.checkpoint("gpt2")
    ids = torch.tensor([[2, 7, 11, 5], [9, 23, 6, 40]])
    real = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(torch.arange(2), 0, Side(ids, real, ~real))
    explained = partial(explained_batch, its, OBJECTIVES.get("top1")(), batch, of="value")
    rows = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with explained(layer_index=resumable_layers(its.model)) as f:
        both = f(rows)
        alone = torch.stack([f(rows[row].expand(2, -1))[row] for row in range(2)])
        assert both == pytest.approx(alone) and both[0] != pytest.approx(both[1])
    monkeypatch.setitem(REPLACEMENTS, "itself", lambda contexts, batch, seed: contexts)
    with explained(layer_index=None, ablate_with="itself") as g:
        assert g(torch.zeros(2, 6)) == pytest.approx(g(torch.ones(2, 6))), "a head in place of itself"
        with pytest.raises(ConfigError, match="sentences"):
            g(rows)


def test_replacements_look_at_real_positions_only() -> None:
    context = torch.randn(3, 2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    real = torch.ones(3, 7, dtype=torch.bool)
    real[0, 5:] = real[1, :4] = False  # padded on the right, on the left, not at all
    means = mean_context(context, real)
    shifts = random_shifts(torch.tensor([3, 17, 40]), real.sum(dim=1), seed=2)
    others = other_context(context, real, shifts)
    for row in range(3):
        places = real[row].nonzero()[:, 0].tolist()
        assert means[row, :, 0] == pytest.approx(context[row][:, places].mean(dim=1))
        for rank, place in enumerate(places):
            donor = places[(rank + int(shifts[row])) % len(places)]
            assert donor != place and torch.equal(others[row, :, place], context[row, :, donor])


def test_heads_that_are_off_already_are_worth_nothing() -> None:
    its = speakers.checkpoint("gpt2")
    off = HeadId(Site.DECODER_SELF, 0, 1)
    with masked(its.model, [off]):
        expected = over_corpus("gpt2", lambda game, _: gate_games.ablation(game, size_of("gpt2")))
        found = column(study("gpt2", "ablation"), "ablation")
    assert found[1] == 0.0
    same(found, expected, kind="gpt2")
