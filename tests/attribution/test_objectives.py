"""Objectives against sums written out, sentence by sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headscope.attribution.objectives.base import OBJECTIVES, ObjectiveOutput, choose_objective
from headscope.data.batching import Omissions, batches
from headscope.data.corpus import Labels, add_labels, open_corpus
from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint, open_checkpoint
from tests.oracles import classifiers, speakers, tiny
from tests.oracles.shuffled import together
from tests.oracles.speakers import SPEAKERS, asked

KINDS = tuple(SPEAKERS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def batch_of(kind: str, its: Checkpoint, *, labels: bool = True) -> Batch:
    """All sentences as one batch in corpus order: unequal lengths, padding in the middle."""
    how: dict[str, Any] = {"tokens": 1, "limit": 50, "losses": Omissions(), "labels": labels and its.decodes}
    single = sorted(batches(speakers.corpus(kind), its, **how), key=lambda batch: int(batch.indices))
    lengths = [batch.source.ids.shape[1] for batch in single]
    assert min(lengths[1:-1]) < max(lengths)
    return together(single, 0)


def outcome(kind: str, name: str) -> ObjectiveOutput:
    its = speakers.checkpoint(kind)
    with torch.no_grad():
        return OBJECTIVES.get(name)(seed=1).outcome(its, batch_of(kind, its))


@every_kind
def test_loss_is_minus_log_p_of_every_label(kind: str) -> None:
    its, found = speakers.checkpoint(kind), outcome(kind, "loss")
    for sentence, value, count in zip(speakers.corpus(kind), found.values, found.counts, strict=True):
        one = asked(kind, sentence)
        with torch.no_grad():
            assert value.item() == pytest.approx(one.loss(its).item(), rel=1e-6 if kind in ("llama", "t5") else 1e-10)
        assert count == len(one.labels)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not SPEAKERS[kind].masked])
def test_log_probability_is_the_loss_of_the_whole_reference(kind: str) -> None:
    loss, found = outcome(kind, "loss"), outcome(kind, "log-probability")
    torch.testing.assert_close(found.values, -loss.values)
    assert found.counts.eq(1).all()


@every_kind
def test_top1_adds_the_largest_logits_of_the_text_as_it_is(kind: str) -> None:
    its, found = speakers.checkpoint(kind), outcome(kind, "top1")
    for sentence, value, count in zip(speakers.corpus(kind), found.values, found.counts, strict=True):
        one = asked(kind, sentence, hide=False)
        with torch.no_grad():
            logits = one.logits(its)
        expected = sum(max(logits[place].tolist()) for place in one.places)
        assert value.item() == pytest.approx(expected, rel=1e-6 if kind in ("llama", "t5") else 1e-10)
        assert count == len(one.places)


def test_an_altered_model_is_asked_for_what_the_intact_one_said() -> None:
    its = speakers.checkpoint("gpt2")
    batch, objective = batch_of("gpt2", its), OBJECTIVES.get("top1")()
    with torch.no_grad():
        logits = its.logits(batch)
        intact = objective.evaluate(its, logits, batch)
        altered = objective.evaluate(its, -logits, batch, intact.aim)
    torch.testing.assert_close(altered.values, -intact.values)
    torch.testing.assert_close(objective.damage(intact, altered), 2 * intact.values)


@pytest.mark.parametrize("kind", ["bert", "gemma", "t5"])
def test_representation_is_the_mean_state_along_its_own_direction(kind: str) -> None:
    its = tiny.checkpoint(kind, 3)
    corpus = tiny.corpus(3, target=tiny.KINDS[kind].two_sided)
    how: dict[str, Any] = {"tokens": 1, "limit": 90, "losses": Omissions()}
    single = sorted(batches(corpus, its, **how), key=lambda batch: int(batch.indices))
    objective, batch = OBJECTIVES.get("representation")(), together(single, 0)
    with torch.enable_grad():
        states = objective.output(its, batch).detach().requires_grad_()
        found = objective.evaluate(its, states, batch)
        (gradient,) = torch.autograd.grad(found.values.sum(), states)
    for row, one in enumerate(single):
        given: dict[str, Any] = {"input_ids": one.source.ids, "use_cache": False}
        if one.target is not None:
            given["decoder_input_ids"] = one.target.ids
        with torch.no_grad():
            mean = its.model(**given).last_hidden_state[0].mean(dim=0)
        assert found.values[row].item() == pytest.approx(mean.norm().item(), rel=1e-6)
        length = (one.source if one.target is None else one.target).ids.shape[1]
        expected = (mean / mean.norm() / length).expand(length, -1)
        torch.testing.assert_close(gradient[row, :length], expected, rtol=1e-5, atol=1e-7)
        assert gradient[row, length:].eq(0).all()
    turned = objective.evaluate(its, states.roll(1, dims=-1), batch, found.aim)
    assert found.vector is not None and found.aim is not None
    torch.testing.assert_close(turned.values, (found.vector.roll(1, dims=-1) * found.aim).sum(-1))
    for vector, value in zip(found.vector, objective.damage(found, turned), strict=True):
        cosine = (vector @ vector.roll(1)) / vector.square().sum()
        assert value.item() == pytest.approx(1 - cosine.item(), abs=1e-9)
    assert objective.damage(found, found).abs().max() < 1e-9


def test_classes() -> None:
    its = speakers.wrapped(lambda: speakers.bert(transformers.BertForSequenceClassification), SPEAKERS["bert"])
    assert its.predicts == "classes" and choose_objective("", its, has_target=False) == "top1"
    with torch.no_grad():
        found = OBJECTIVES.get("top1")().outcome(its, batch_of("bert", its))
        for sentence, value in zip(speakers.corpus("bert"), found.values, strict=True):
            ids = torch.tensor([asked("bert", sentence, hide=False).source])
            assert value.item() == pytest.approx(its.model(input_ids=ids).logits.max().item(), rel=1e-10)
    with pytest.raises(ConfigError, match=r"--objective loss.*--labels.*top1"):
        choose_objective("loss", its, has_target=False)


@pytest.mark.parametrize("kind", ["bert", "t5"])
@pytest.mark.parametrize("name", ["representation-l2", "token-representation", "token-representation-l2"])
def test_states_are_compared_sentence_by_sentence(kind: str, name: str) -> None:
    its = tiny.checkpoint(kind, 3)
    how: dict[str, Any] = {"tokens": 1, "limit": 90, "losses": Omissions()}
    single = sorted(
        batches(tiny.corpus(3, target=tiny.KINDS[kind].two_sided), its, **how), key=lambda b: int(b.indices)
    )
    objective, batch = OBJECTIVES.get(name)(), together(single, 0)
    with torch.no_grad():
        states = objective.output(its, batch)
        other = states.roll(1, dims=-1) + 0.1
        intact = objective.evaluate(its, states, batch)
        altered = objective.evaluate(its, other, batch, intact.aim)
    found = objective.damage(intact, altered)
    for row, one in enumerate(single):
        length = (one.source if one.target is None else one.target).ids.shape[1]
        first, second = states[row, :length], other[row, :length]
        if not name.startswith("token"):
            first, second = first.mean(dim=0, keepdim=True), second.mean(dim=0, keepdim=True)
        if name.endswith("l2"):
            far = [
                float((b - a).square().sum().sqrt() / a.square().sum().sqrt())
                for a, b in zip(first, second, strict=True)
            ]
        else:
            far = [1 - float((a @ b) / (a @ a).sqrt() / (b @ b).sqrt()) for a, b in zip(first, second, strict=True)]
        assert found[row].item() == pytest.approx(sum(far)) and intact.counts[row] == len(far)
        assert intact.values[row].item() == pytest.approx(sum(float(a.norm()) for a in first))
    assert objective.damage(intact, intact).abs().max() < 1e-9


@pytest.mark.parametrize("kind", ["bert", "gpt2", "bert-tags"])
def test_the_loss_of_a_classifier_is_that_of_its_labels(kind: str, tmp_path: Path) -> None:
    its = open_checkpoint(str(classifiers.folder(tmp_path / "model", kind)), dtype="float64")
    texts, model = classifiers.texts(5), classifiers.model(kind)
    wanted = [Labels((label,)) for label in classifiers.labels(5)]
    if kind == "bert-tags":
        wanted = [Labels(tuple(n % 5 for n, _ in enumerate(text.split())), tuple(text.split())) for text in texts]
    plain = open_corpus(texts)
    corpus = plain.with_field(
        "labels", lambda: add_labels(plain.read(), iter(wanted), plain.name, "labels"), has_labels=True
    )
    single = sorted(
        batches(corpus, its, tokens=1, limit=61, losses=Omissions(), labels=True), key=lambda b: int(b.indices)
    )
    assert choose_objective("", its, has_target=False, has_labels=True) == "loss"
    assert choose_objective("", its, has_target=False) == "top1"
    with torch.no_grad():
        found = OBJECTIVES.get("loss")().outcome(its, together(single, 0))
    for text, labels, value, count in zip(texts, wanted, found.values, found.counts, strict=True):
        outputs = classifiers.logits(model, kind, text)
        if kind == "bert-tags":
            starts = [1]
            for word in text.split():
                starts.append(starts[-1] + len(classifiers.tokenizer(kind).tokenize(word)))
            outputs = outputs[starts[:-1]]
        log_p = outputs.log_softmax(-1).view(-1, len(classifiers.NAMES))
        expected = -sum(float(row[label]) for row, label in zip(log_p, labels.ids, strict=True))
        assert value.item() == pytest.approx(expected) and count == len(labels.ids)
