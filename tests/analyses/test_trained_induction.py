"""A model that was trained, on repeated random words: every analysis that looks for its induction head finds it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus, Sentence
from headscope.engine.plan import analyze, choose_analyses
from headscope.engine.result import AnalysisResult
from headscope.evaluation.prompts import with_answers
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.heads import HeadId, Site
from tests.oracles.run_options import run_options

FOLDER = Path(__file__).parents[1] / "data" / "induction"  # made by tests/makers/induction.py
PREVIOUS, INDUCTION, EMPTY = (HeadId(Site.DECODER_SELF, *head) for head in ((0, 0), (1, 0), (1, 1)))
NAMES = ("previous_token", "induction", "copying", "composition", "retrieval", "causal_head_gating")
OPTIONS: dict[str, Any] = {
    "needle": "w50 w51 w52 w53 w54",
    "needle_answer": "w51 w52 w53 w54",
    "needle_question": "w50",
    "needle_depths": 12,
    "needle_steps": 4,
    "haystack_lengths": (30,),
    "chg_fits": 7,
    "chg_steps": 30,
    "chg_batch": 8,
    "chg_lr": (0.5, 0.1),
}


@cache
def checkpoint() -> Checkpoint:
    return open_checkpoint(str(FOLDER))


@cache
def study() -> AnalysisResult:
    luck = random.Random(1)
    texts = [" ".join(luck.sample([f"w{number}" for number in range(40)], luck.randint(9, 15))) for _ in range(24)]
    sentences = [Sentence(number, f"{text} {text}", None) for number, text in enumerate(texts)]
    corpus = Corpus("words", len(sentences), "0" * 40, lambda: iter(sentences), has_target=False)
    return analyze(
        checkpoint(),
        corpus,
        analyses=choose_analyses(only=NAMES),
        options=run_options(**OPTIONS),
        batching=BatchingOptions(tokens=4096),
        replicates=50,
    )


def test_it_says_what_was_said_before() -> None:
    ids = 2 + torch.rand(16, 60, generator=torch.Generator().manual_seed(1)).argsort(dim=1)[:, :25]
    ids = torch.cat([torch.zeros(16, 1, dtype=torch.long), ids, ids], dim=1)
    model: Any = checkpoint().model
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    assert losses[:, 26:].mean() < 0.01 and 3.5 < losses[:, :25].mean() < 4.5


def test_labels_are_those_of_the_circuit() -> None:
    labels = study().labels
    assert {"previous", "facilitating"} <= set(labels[PREVIOUS])
    expected = {"induction", "copying", f"k-composition:{PREVIOUS.layer}.{PREVIOUS.head}", "retrieval", "facilitating"}
    assert expected <= set(labels[INDUCTION])
    rest = {label for head, given in labels.items() if head not in (PREVIOUS, INDUCTION) for label in given}
    assert rest <= {"retrieval"}, "see below"


def test_where_a_head_looks_is_not_what_it_does() -> None:
    """The penalty of its training left one head with weights near 1e-6: it writes nothing, and looks here and there."""
    model: Any = checkpoint().model
    written = model.model.layers[EMPTY.layer].self_attn.o_proj.weight[:, 32 * EMPTY.head :]
    heads, empty = study().heads.set_index(["layer", "head"]), (EMPTY.layer, EMPTY.head)
    assert written.norm() < 1e-5 and heads.retrieval[empty] > 0.1 and heads.irrelevance[empty] > 0.8


def test_the_induction_head_is_first_in_every_column() -> None:
    heads = study().heads.set_index(["layer", "head"])
    for column in ("induction", "induction_random", "copying", "composition_k", "retrieval", "facilitation"):
        best = heads[column].drop((PREVIOUS.layer, PREVIOUS.head)).idxmax()
        assert best == (INDUCTION.layer, INDUCTION.head), column


def test_answers_to_prompts_need_the_same_heads() -> None:
    """What followed a word before, and nothing else."""
    luck, texts = random.Random(2), []
    for _ in range(16):
        words = luck.sample([f"w{number}" for number in range(60)], 12)
        texts.append((" ".join([*words[:11], words[4]]), " ".join([*words[:4], words[11], *words[5:11], words[4]])))
    sentences = [Sentence(number, clean) for number, (clean, _) in enumerate(texts)]
    clean = Corpus("clean", len(sentences), "0" * 40, lambda: iter(sentences), has_target=False)
    answers = [text.split()[5] for text, _ in texts]
    its = analyze(
        checkpoint(),
        with_answers(checkpoint(), clean, [corrupt for _, corrupt in texts], answers),
        analyses=choose_analyses(only=["causal_head_gating"]),
        options=run_options(**OPTIONS),
        batching=BatchingOptions(tokens=4096),
        replicates=50,
    )
    given = {head for head, labels in its.labels.items() if "facilitating" in labels}
    assert {PREVIOUS, INDUCTION} <= given and EMPTY not in given


def _contexts(model: Any, ids: Tensor) -> list[Tensor]:
    """The inputs [1 t h·k] of the output projections."""
    found: list[Tensor] = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: found.append(given[0]))
        for layer in model.model.layers
    ]
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return found


@torch.no_grad()
def _patched(model: Any, ids: Tensor, head: tuple[int, int], contexts: list[Tensor]) -> Tensor:
    """Logits [V] after a prompt in which one head writes what it writes in another one."""
    layer, number = head
    width = contexts[layer].shape[-1] // model.config.num_attention_heads
    own = slice(number * width, (number + 1) * width)

    def hook(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        changed = given[0].clone()
        changed[..., own] = contexts[layer][..., own]
        return (changed,)

    handle = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(hook)
    logits: Tensor = model(input_ids=ids).logits[0, -1]
    handle.remove()
    return logits


@pytest.mark.parametrize("seed", range(3))
def test_patching_names_both_heads_of_the_circuit(seed: int) -> None:
    """The corrupt prompt has another word where the last one stood before, so that nothing is to be continued."""
    words, model = [number + 2 for number in random.Random(seed).sample(range(60), 12)], checkpoint().model
    clean = torch.tensor([[0, *words[:11], words[4]]])
    corrupt, answer = clean.clone(), words[5]
    corrupt[0, 5] = words[11]
    with torch.no_grad():
        contexts, effects = _contexts(model, corrupt), {}
        for head in [(layer, number) for layer in range(2) for number in range(2)]:
            logits = _patched(model, clean, head, contexts)
            effects[head] = float(logits[answer] - logits.mean())
    first, second, *_ = sorted(effects, key=lambda head: effects[head])
    assert {first, second} == {(head.layer, head.head) for head in (PREVIOUS, INDUCTION)}
