"""Causal Head Gating: fits against loops over sentences, open gates, and errors."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.analyses.causal_head_gating import (
    CausalHeadGatingOptions,
    FittedGates,
    fit_gates,
    gated_losses,
    join_batches,
    penalize,
    scores,
    single_sentences,
)
from headscope.data.batching import BatchingOptions, Omissions, batches
from headscope.data.encoded import IGNORED, Batch, Encoded, pad_side
from headscope.formats.base import open_checkpoint
from tests.makers.studies import study_of
from tests.oracles import causal_gates, patching, prompts, speakers

SENTENCES = 5
DATA = Path(__file__).parents[1] / "data"


@cache
def examples(kind: str) -> tuple[Batch, ...]:
    corpus, checkpoint = speakers.corpus(kind, count=SENTENCES), speakers.checkpoint(kind)
    padded = batches(corpus, checkpoint, tokens=101, limit=97, omissions=Omissions(), labels=True)
    return tuple(single_sentences(padded))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_fits_are_those_of_loops(kind: str) -> None:
    """Both phases, with two fits at once and sentences of unequal lengths padded in one pass."""
    checkpoint, steps, rates = speakers.checkpoint(kind), 3, ((0.3, 0.06), (0.5, 0.1))
    options = CausalHeadGatingOptions(2, steps, 64, *rates, 0.3)
    ours = fit_gates(checkpoint, examples(kind), options, tokens=61, seed=1)
    sentences = [speakers.make_example(kind, sentence) for sentence in speakers.corpus(kind, count=SENTENCES)]
    modules, more = list(patching.outputs(checkpoint.model, kind).values()), {"steps": steps}
    start = torch.rand(2, ours.plus.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for number, theta in enumerate(torch.log(start / (1 - start))):
        theta = causal_gates.run_adam(checkpoint, modules, sentences, theta, pull=0.0, rates=rates[0], **more)
        for pull, gates in ((0.3, ours.plus), (-0.3, ours.minus)):
            expected = causal_gates.run_adam(checkpoint, modules, sentences, theta, pull=pull, rates=rates[1], **more)
            torch.testing.assert_close(gates[number], expected.sigmoid(), rtol=1e-7, atol=1e-8)
    assert (ours.plus - ours.minus).abs().max() > 0.1


def test_fits_are_those_of_the_authors_program() -> None:
    """On the model of tests/data/induction; `python -m scripts.chg_reference` runs the program."""
    theirs = json.loads((DATA / "oracles" / "chg" / "gates.json").read_text(encoding="utf-8"))
    texts = []
    for number, ids in enumerate(theirs["ids"]):
        side = pad_side([Encoded(ids, [False] * len(ids))])
        texts.append(Batch(torch.tensor([number]), 0, side, labels=torch.tensor([[*ids[1:], IGNORED]])))
    rates: Any = {"chg_lr": ("lr", "lr_end"), "chg_penalised_lr": ("lr_reg", "lr_reg_end")}
    rates = {option: tuple(theirs[name] for name in names) for option, names in rates.items()}
    options = CausalHeadGatingOptions(chg_fits=1, chg_steps=theirs["updates"], chg_penalty=theirs["penalty"], **rates)
    ours = fit_gates(open_checkpoint(str(DATA / "induction"), dtype="float64"), texts, options, tokens=2048, seed=1)
    for gates, name in ((ours.plus, "positive"), (ours.minus, "negative")):
        torch.testing.assert_close(gates[0], torch.tensor(theirs[name], dtype=torch.float64), rtol=1e-5, atol=1e-6)
    last = [theirs["nll"][name][-1] for name in ("none", "positive", "negative")]
    assert ours.losses[:, 0].tolist() == pytest.approx(last, rel=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_of_prompts_only_the_answer_counts(kind: str) -> None:
    checkpoint, expected = speakers.checkpoint(kind), prompts.prompts(kind)
    examples = single_sentences(
        batches(prompts.corpus(kind), checkpoint, tokens=101, limit=97, omissions=Omissions(), labels=True)
    )
    assert len(examples) == prompts.COUNT
    for example in examples:
        prompt = expected[int(example.indices)]
        assert example.labels is not None and (example.labels != IGNORED).sum() == 1
        assert example.labels[0, prompt.position] == prompt.answer


def test_the_penalty_is_the_mean_and_pulls_no_further_than_four() -> None:
    theta = torch.tensor([[1.0, -2.0, 9.0], [0.0, 4.5, -4.5]], dtype=torch.float64).requires_grad_()
    losses, pull = torch.tensor([5.0, 7.0]).double(), torch.tensor([0.3, -0.3]).double()
    totals = penalize(losses, theta, pull)
    torch.testing.assert_close(totals, torch.tensor([5 - 0.3 * (1 - 2 + 4) / 3, 7.0]).double())
    (slope,) = torch.autograd.grad(totals.sum(), theta)
    torch.testing.assert_close(slope, torch.tensor([[-0.1, -0.1, 0], [0.1, 0, 0]]).double())


def test_scores_are_those_of_the_paper() -> None:
    plus, minus = torch.tensor([[1.0, 0.0, 1.0, 0.25]]).double(), torch.tensor([[1.0, 0.0, 0.0, 0.5]]).double()
    shares = scores(FittedGates(plus, minus, torch.zeros(3, 1), {}))
    assert shares["facilitation"].tolist() == [[1, 0, 0, 0.5]]
    assert shares["interference"].tolist() == [[0, 1, 0, 0.75]]
    assert shares["irrelevance"].tolist() == [[0, 0, 1, 0.125]]
    torch.testing.assert_close(sum(shares.values()), 1 + minus * (1 - plus))


@pytest.mark.parametrize("kind", ["gpt2", "t5", "native-pre"])
def test_open_gates_are_the_model_itself(kind: str) -> None:
    checkpoint = speakers.checkpoint(kind)
    layout = {site_layer: heads for site_layer, heads in checkpoint.layout.items() if heads}
    together, ones = join_batches(examples(kind)), torch.ones(1, sum(layout.values()), dtype=torch.float64)
    sentences = {sentence.number: sentence for sentence in speakers.corpus(kind, count=SENTENCES)}
    texts = [speakers.make_example(kind, sentences[number]) for number in together.indices.tolist()]
    with torch.no_grad():
        losses = gated_losses(checkpoint, ones, together, layout)
        half_losses = gated_losses(checkpoint, torch.cat([ones, ones / 2]), together, layout)
        alone = torch.stack([text.loss(checkpoint) / len(text.labels) for text in texts])
    torch.testing.assert_close(losses[0], alone, rtol=1e-9, atol=0)
    torch.testing.assert_close(half_losses[0], losses[0])
    assert not torch.allclose(half_losses[1], losses[0], rtol=1e-3)


def test_sentences_that_are_cut_are_counted() -> None:
    checkpoint, corpus = speakers.checkpoint("gpt2"), speakers.corpus("gpt2", count=SENTENCES)
    batching = BatchingOptions(tokens=101, limit=3)
    study = study_of(checkpoint, corpus, "causal_head_gating", chg_fits=1, chg_steps=1, batching=batching)
    assert [remark for remark in study.remarks if "causal_head_gating" in remark] == [
        "causal_head_gating: 4 sentences were cut (--max-length)"
    ]
