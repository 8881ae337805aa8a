"""Ablation, Shapley values and integrated gradients against their definitions, one sentence and pass at a time."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headscope.attribution.gatevector import REPLACEMENTS, explained_batch, mean_context, other_context, random_shifts
from headscope.attribution.objectives.base import OBJECTIVES, ObjectiveOutput, choose_objective
from headscope.config.option import SEED
from headscope.data.batching import Omissions, batches
from headscope.data.corpus import Corpus, Labels, Sentence, add_labels, open_corpus
from headscope.data.encoded import Batch, Side
from headscope.engine.plan import analyze
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.heads import HeadId, Site, all_heads
from headscope.model.prefix_cache import resumable_layers
from headscope.model.taps import masked
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import classifiers, gate_games, speakers, tiny
from tests.oracles.gate_games import Game
from tests.oracles.shuffled import in_folds, join_batches, reverse_folds
from tests.oracles.speakers import SPEAKERS, Example, make_example

pytestmark = pytest.mark.slow

KINDS = tuple(SPEAKERS)
FLOAT32_NORMS = ("llama", "t5")  # their norms compute in float32
every_kind = pytest.mark.parametrize("kind", KINDS)


def text(kind: str) -> Corpus:
    """Three sentences of one fold, few because every head is looked at alone; the middle one is the shortest."""
    *_, first, second, third = sorted(speakers.corpus(kind, count=7), key=lambda sentence: len(sentence.source.split()))
    sentences = [sentence._replace(number=number) for number, sentence in enumerate((second, first, third))]
    return in_folds(replace(speakers.corpus(kind, count=3), read=lambda: iter(sentences)), 1)


def study(kind: str, name: str, *, tokens: int = 10**9, **options: Any) -> Study:
    return study_of(speakers.checkpoint(kind), text(kind), name, tokens=tokens, **options)


def column(study: Study, name: str) -> list[float]:
    """Values in the order of `all_heads`."""
    values = {HeadId(Site(row["site"]), row["layer"], row["head"]): row[name] for _, row in study.heads.iterrows()}
    return [values[head] for head in sorted(values, key=lambda h: (list(Site).index(h.site), h.layer, h.head))]


def assert_close(values: Sequence[float], expected: Sequence[float], *, kind: str, exact: float = 1e-10) -> None:
    assert len(values) == len(expected) and any(expected)
    within = (1e-6 if kind in FLOAT32_NORMS else exact) * max(map(abs, expected))
    assert values == pytest.approx(expected, abs=within)


def minus_loss(example: Example, checkpoint: Checkpoint) -> float:
    return -float(example.loss(checkpoint))


def logits_of(example: Example, checkpoint: Checkpoint, ids: Tensor) -> float:
    """Σ of the logits of `ids` [t]."""
    logits = example.logits(checkpoint)
    return sum(logits[t, w].item() for t, w in enumerate(ids))


def over_corpus(kind: str, measure: Callable[[Game, Sentence], Sequence[float]]) -> list[float]:
    """Σ over sentences of a measure of −loss, divided by Σ of predicted tokens."""
    checkpoint, total, count = speakers.checkpoint(kind), torch.zeros(()).double(), 0
    for sentence in text(kind):
        example = make_example(kind, sentence)
        game = gate_games.under_gates(checkpoint.model, checkpoint.layout, partial(minus_loss, example, checkpoint))
        total = total + torch.tensor(measure(game, sentence), dtype=torch.float64)
        count += len(example.labels)
    return (total / count).tolist()


def size_of(kind: str) -> int:
    return sum(speakers.checkpoint(kind).layout.values())


@every_kind
def test_ablation_is_the_rise_of_the_loss(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole folds in any order, with padding in the middle, as of single sentences."""
    expected = over_corpus(kind, lambda game, _: gate_games.ablation(game, size_of(kind)))
    assert_close(column(study(kind, "ablation"), "ablation"), expected, kind=kind)
    if kind.startswith("native"):  # contracts have the others
        monkeypatch.setattr(sys.modules[analyze.__module__], "batches", reverse_folds)
        assert_close(column(study(kind, "ablation"), "ablation"), expected, kind=kind)


@pytest.mark.parametrize(
    ("mode", "kind"), [("mean", "t5"), ("mean", "native-pre"), ("resample", "bert"), ("resample", "t5")]
)
def test_other_contexts_in_place_of_a_head(mode: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = speakers.checkpoint(kind)

    def damages(_: Game, sentence: Sentence) -> list[float]:
        example = make_example(kind, sentence)
        differences, intact = [], float(example.loss(checkpoint).detach())
        for head in all_heads(checkpoint.layout):
            length = len(example.source if head.site is Site.ENCODER_SELF or example.target is None else example.target)
            shift = int(random_shifts(torch.tensor([sentence.number]), torch.tensor([length]), seed=1))
            loss = gate_games.replace_head(checkpoint.model, head, mode, shift, lambda: float(example.loss(checkpoint)))
            differences.append(loss - intact)
        return differences

    expected = over_corpus(kind, damages)
    result = study(kind, "ablation", ablate_with=mode)
    assert_close(column(result, "ablation"), expected, kind=kind)
    assert result.record["signatures"]["ablation"] == {"m": "ablation.v1", "objective": "loss.v1", "with": mode}
    monkeypatch.setattr(sys.modules[analyze.__module__], "batches", reverse_folds)
    assert_close(column(study(kind, "ablation", ablate_with=mode), "ablation"), expected, kind=kind)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "native-post"])
def test_shapley_values_of_the_drawn_orders(kind: str) -> None:
    size = size_of(kind)
    torch.manual_seed(5)
    orders = [torch.randperm(size).tolist() for _ in range(2)]
    expected = over_corpus(kind, lambda game, _: gate_games.shapley(game, size, orders))
    before = torch.random.get_rng_state()
    values = column(study(kind, "shapley", shapley_samples=2, seed=5), "shapley") if kind != "bert" else None
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers stay as they are"
    if values is not None:
        assert_close(values, expected, kind=kind, exact=1e-6)
    total = over_corpus(kind, lambda game, _: [game([1.0] * size) - game([0.0] * size)])
    again = column(study(kind, "shapley", shapley_samples=1, seed=1), "shapley")
    assert sum(again) == pytest.approx(total[0], rel=1e-6), "whatever the orders, values add up to the whole"


@pytest.mark.parametrize("kind", ["gpt2", "native-pre"])
def test_integrated_gradients(kind: str) -> None:
    size = size_of(kind)
    expected = over_corpus(kind, lambda game, _: gate_games.integrated_gradients(game, size, points=3))
    coarse = study(kind, "integrated_gradients", ig_steps=3)
    assert_close(column(coarse, "integrated_gradients"), expected, kind=kind, exact=1e-6)
    if kind == "native-pre":
        return  # too steep near zero, where its first norm has next to nothing to divide by, for a few steps
    total = over_corpus(kind, lambda game, _: [game([1.0] * size) - game([0.0] * size)])[0]
    fine = study(kind, "integrated_gradients", ig_steps=32)
    assert sum(column(fine, "integrated_gradients")) == pytest.approx(total, rel=1e-4)
    assert not any("raise --ig-steps" in remark for remark in fine.remarks)
    assert any("32 steps leave a gap of 0.0%" in remark for remark in fine.remarks)
    single_step = study(kind, "integrated_gradients", ig_steps=1)
    assert abs(sum(column(single_step, "integrated_gradients")) - total) > 0.01 * abs(total)
    assert any("1 steps leave" in remark and "raise --ig-steps" in remark for remark in single_step.remarks)


def test_what_the_intact_model_says() -> None:
    """`top1`: logits of the ids that the intact model finds likeliest."""
    checkpoint, total, count = speakers.checkpoint("gpt2"), torch.zeros(()).double(), 0
    heads = list(all_heads(checkpoint.layout))
    for sentence in text("gpt2"):
        example = make_example("gpt2", sentence)
        with torch.no_grad():
            ids = example.logits(checkpoint).argmax(dim=-1)
        game = gate_games.under_gates(checkpoint.model, checkpoint.layout, partial(logits_of, example, checkpoint, ids))
        total = total + torch.tensor(gate_games.ablation(game, len(heads)), dtype=torch.float64)
        count += len(ids)
    assert_close(column(study("gpt2", "ablation", objective="top1"), "ablation"), (total / count).tolist(), kind="gpt2")


def test_gates_of_their_own_for_every_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that differ take a whole pass and give what each row's gates give alone."""
    checkpoint = speakers.checkpoint("gpt2")
    ids = torch.tensor([[2, 7, 11, 5], [9, 23, 6, 40]])
    real = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(torch.arange(2), 0, Side(ids, real, ~real))
    explain = partial(explained_batch, checkpoint, OBJECTIVES.get("top1")(), batch, of="value")
    rows = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with explain(layer_index=resumable_layers(checkpoint.model)) as f:
        together = f(rows)
        alone = torch.stack([f(rows[row].expand(2, -1))[row] for row in range(2)])
        assert together == pytest.approx(alone) and together[0] != pytest.approx(together[1])
    monkeypatch.setitem(REPLACEMENTS, "itself", lambda contexts, batch, seed: contexts)
    with explain(layer_index=None, ablate_with="itself") as g:
        assert g(torch.zeros(2, 6)) == pytest.approx(g(torch.ones(2, 6))), "a head in place of itself"
        with pytest.raises(ConfigError, match="sentences"):
            g(rows)


def test_the_largest_seed_shifts_contexts() -> None:
    shifts = random_shifts(torch.arange(5), torch.full((5,), 9), seed=SEED)
    assert bool(((shifts >= 1) & (shifts < 9)).all())


def test_replacements_look_at_real_positions_only() -> None:
    context = torch.randn(3, 2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    real = torch.ones(3, 7, dtype=torch.bool)
    real[0, 5:] = real[1, :4] = False  # padded on the right, on the left, not at all
    means = mean_context(context, real)
    shifts = random_shifts(torch.tensor([3, 17, 40]), real.sum(dim=1), seed=2)
    other_contexts = other_context(context, real, shifts)
    for row in range(3):
        positions = real[row].nonzero()[:, 0].tolist()
        assert means[row, :, 0] == pytest.approx(context[row][:, positions].mean(dim=1))
        for rank, position in enumerate(positions):
            donor = positions[(rank + int(shifts[row])) % len(positions)]
            assert donor != position and torch.equal(other_contexts[row, :, position], context[row, :, donor])


def test_heads_that_are_off_already_are_worth_nothing() -> None:
    checkpoint = speakers.checkpoint("gpt2")
    off = HeadId(Site.DECODER_SELF, 0, 1)
    with masked(checkpoint.model, [off]):
        expected = over_corpus("gpt2", lambda game, _: gate_games.ablation(game, size_of("gpt2")))
        values = column(study("gpt2", "ablation"), "ablation")
    assert values[1] == 0.0
    assert_close(values, expected, kind="gpt2")


# Objectives against sums written out, sentence by sentence.


def singles(corpus: Corpus, checkpoint: Checkpoint, *, labels: bool = False) -> list[Batch]:
    """A batch for each sentence, in corpus order."""
    result = batches(corpus, checkpoint, tokens=1, limit=90, omissions=Omissions(), labels=labels)
    return sorted(result, key=lambda batch: int(batch.indices))


def batch_of(kind: str, checkpoint: Checkpoint, *, labels: bool = True) -> Batch:
    """All sentences as one batch in corpus order: unequal lengths, padding in the middle."""
    single = singles(speakers.corpus(kind), checkpoint, labels=labels and checkpoint.decodes)
    lengths = [batch.source.ids.shape[1] for batch in single]
    assert min(lengths[1:-1]) < max(lengths)
    return join_batches(single, 0)


def outcome(kind: str, name: str) -> ObjectiveOutput:
    checkpoint = speakers.checkpoint(kind)
    with torch.no_grad():
        return OBJECTIVES.get(name)(seed=1).outcome(checkpoint, batch_of(kind, checkpoint))


@every_kind
def test_loss_is_minus_log_p_of_every_label(kind: str) -> None:
    checkpoint, result = speakers.checkpoint(kind), outcome(kind, "loss")
    for sentence, value, count in zip(speakers.corpus(kind), result.values, result.counts, strict=True):
        example = make_example(kind, sentence)
        with torch.no_grad():
            loss = example.loss(checkpoint).item()
        assert value.item() == pytest.approx(loss, rel=1e-6 if kind in FLOAT32_NORMS else 1e-10)
        assert count == len(example.labels)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not SPEAKERS[kind].masked])
def test_log_probability_is_the_loss_of_the_whole_reference(kind: str) -> None:
    loss, result = outcome(kind, "loss"), outcome(kind, "log-probability")
    torch.testing.assert_close(result.values, -loss.values)
    assert result.counts.eq(1).all()


@every_kind
def test_top1_adds_the_largest_logits_of_the_text_as_it_is(kind: str) -> None:
    checkpoint, result = speakers.checkpoint(kind), outcome(kind, "top1")
    for sentence, value, count in zip(speakers.corpus(kind), result.values, result.counts, strict=True):
        example = make_example(kind, sentence, hide=False)
        with torch.no_grad():
            logits = example.logits(checkpoint)
        expected = sum(max(logits[position].tolist()) for position in example.positions)
        assert value.item() == pytest.approx(expected, rel=1e-6 if kind in FLOAT32_NORMS else 1e-10)
        assert count == len(example.positions)


def test_an_altered_model_is_asked_for_what_the_intact_one_said() -> None:
    checkpoint = speakers.checkpoint("gpt2")
    batch, objective = batch_of("gpt2", checkpoint), OBJECTIVES.get("top1")()
    with torch.no_grad():
        logits = checkpoint.logits(batch)
        intact = objective.evaluate(checkpoint, logits, batch)
        opposite = objective.evaluate(checkpoint, -logits, batch, intact.aim)
    torch.testing.assert_close(opposite.values, -intact.values)
    torch.testing.assert_close(objective.damage(intact, opposite), 2 * intact.values)


@pytest.mark.parametrize("kind", ["bert", "gemma", "t5"])
def test_representation_is_the_mean_state_along_its_own_direction(kind: str) -> None:
    checkpoint = tiny.checkpoint(kind, 3)
    single = singles(tiny.corpus(3, target=tiny.KINDS[kind].two_sided), checkpoint)
    objective, batch = OBJECTIVES.get("representation")(), join_batches(single, 0)
    with torch.enable_grad():
        states = objective.output(checkpoint, batch).detach().requires_grad_()
        output = objective.evaluate(checkpoint, states, batch)
        (gradient,) = torch.autograd.grad(output.values.sum(), states)
    for row, part in enumerate(single):
        inputs: dict[str, Any] = {"input_ids": part.source.ids, "use_cache": False}
        if part.target is not None:
            inputs["decoder_input_ids"] = part.target.ids
        with torch.no_grad():
            mean = checkpoint.model(**inputs).last_hidden_state[0].mean(dim=0)
        assert output.values[row].item() == pytest.approx(mean.norm().item(), rel=1e-6)
        length = (part.source if part.target is None else part.target).ids.shape[1]
        expected = (mean / mean.norm() / length).expand(length, -1)
        torch.testing.assert_close(gradient[row, :length], expected, rtol=1e-5, atol=1e-7)
        assert gradient[row, length:].eq(0).all()
    rotation = objective.evaluate(checkpoint, states.roll(1, dims=-1), batch, output.aim)
    assert output.vector is not None and output.aim is not None
    torch.testing.assert_close(rotation.values, (output.vector.roll(1, dims=-1) * output.aim).sum(-1))
    for vector, value in zip(output.vector, objective.damage(output, rotation), strict=True):
        cosine = (vector @ vector.roll(1)) / vector.square().sum()
        assert value.item() == pytest.approx(1 - cosine.item(), abs=1e-9)
    assert objective.damage(output, output).abs().max() < 1e-9


def test_classes() -> None:
    model = speakers.wrap_model(lambda: speakers.bert(transformers.BertForSequenceClassification), SPEAKERS["bert"])
    assert model.predicts == "classes" and choose_objective("", model, has_target=False) == "top1"
    with torch.no_grad():
        result = OBJECTIVES.get("top1")().outcome(model, batch_of("bert", model))
        for sentence, value in zip(speakers.corpus("bert"), result.values, strict=True):
            ids = torch.tensor([make_example("bert", sentence, hide=False).source])
            assert value.item() == pytest.approx(model.model(input_ids=ids).logits.max().item(), rel=1e-10)
    with pytest.raises(ConfigError, match=r"--objective loss.*--labels.*top1"):
        choose_objective("loss", model, has_target=False)


@pytest.mark.parametrize("kind", ["bert", "t5"])
@pytest.mark.parametrize("name", ["representation-l2", "token-representation", "token-representation-l2"])
def test_states_are_compared_sentence_by_sentence(kind: str, name: str) -> None:
    checkpoint = tiny.checkpoint(kind, 3)
    single = singles(tiny.corpus(3, target=tiny.KINDS[kind].two_sided), checkpoint)
    objective, batch = OBJECTIVES.get(name)(), join_batches(single, 0)
    with torch.no_grad():
        states = objective.output(checkpoint, batch)
        other = states.roll(1, dims=-1) + 0.1
        intact = objective.evaluate(checkpoint, states, batch)
        shift = objective.evaluate(checkpoint, other, batch, intact.aim)
    damage = objective.damage(intact, shift)
    for row, part in enumerate(single):
        length = (part.source if part.target is None else part.target).ids.shape[1]
        first, second = states[row, :length], other[row, :length]
        if not name.startswith("token"):
            first, second = first.mean(dim=0, keepdim=True), second.mean(dim=0, keepdim=True)
        if name.endswith("l2"):
            gaps = [
                float((b - a).square().sum().sqrt() / a.square().sum().sqrt())
                for a, b in zip(first, second, strict=True)
            ]
        else:
            gaps = [1 - float((a @ b) / (a @ a).sqrt() / (b @ b).sqrt()) for a, b in zip(first, second, strict=True)]
        assert damage[row].item() == pytest.approx(sum(gaps)) and intact.counts[row] == len(gaps)
        assert intact.values[row].item() == pytest.approx(sum(float(a.norm()) for a in first))
    assert objective.damage(intact, intact).abs().max() < 1e-9


@pytest.mark.parametrize("kind", ["bert", "gpt2", "bert-tags"])
def test_the_loss_of_a_classifier_is_that_of_its_labels(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(classifiers.folder(tmp_path / "model", kind)), dtype="float64")
    texts, model = classifiers.texts(5), classifiers.model(kind)
    label_rows = [Labels((label,)) for label in classifiers.labels(5)]
    if kind == "bert-tags":
        label_rows = [Labels(tuple(n % 5 for n, _ in enumerate(text.split())), tuple(text.split())) for text in texts]
    plain = open_corpus(texts)
    corpus = plain.with_field(
        "labels", lambda: add_labels(plain.read(), iter(label_rows), plain.name, "labels"), has_labels=True
    )
    single = singles(corpus, checkpoint, labels=True)
    assert choose_objective("", checkpoint, has_target=False, has_labels=True) == "loss"
    assert choose_objective("", checkpoint, has_target=False) == "top1"
    with torch.no_grad():
        result = OBJECTIVES.get("loss")().outcome(checkpoint, join_batches(single, 0))
    for text, labels, value, count in zip(texts, label_rows, result.values, result.counts, strict=True):
        outputs = classifiers.logits(model, kind, text)
        if kind == "bert-tags":
            starts = [1]
            for word in text.split():
                starts.append(starts[-1] + len(classifiers.tokenizer(kind).tokenize(word)))
            outputs = outputs[starts[:-1]]
        log_p = outputs.log_softmax(-1).view(-1, len(classifiers.NAMES))
        expected = -sum(float(row[label]) for row, label in zip(log_p, labels.ids, strict=True))
        assert value.item() == pytest.approx(expected) and count == len(labels.ids)
