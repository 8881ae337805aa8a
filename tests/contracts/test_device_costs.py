"""What the analyses cost an accelerator, counted on a pretended one: kernels, and waits of the host for the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import Batch, pad_side
from headscope.engine.base import ANALYSES, RunOptions
from headscope.engine.plan import analyze, choose_analyses
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.model.interface import through_attend
from headscope.model.nonfinite import EVERY
from tests.oracles import speakers, tiny
from tests.oracles.pretended import FIRST, Counts, pretended

MOST_KERNELS = 2.05
GRADIENTS = ("gradient", "taylor")
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
RANKS = torch.arange(len(tiny.PIECES)) * 97


def encoder() -> HuggingFaceCheckpoint:
    """A BERT of six layers, as MiniLM has, on the device."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tiny.PIECES),
        hidden_size=12,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=11,
        max_position_embeddings=97,
        **EAGER,
    )
    model: Any = transformers.BertModel(config).eval().to(FIRST)
    return HuggingFaceCheckpoint(
        path="six", model=model, tokenizer=tiny.tokenizer([tiny.START], [tiny.END]), digest="0" * 64
    )


def corpus(batches: int, *, target: bool = False) -> Corpus:
    """Text of so many batches of 8 sentences of three words; of one fold, since batches are within one."""
    words = [*tiny.WORDS, *tiny.WORDS]
    texts = {8 * n: " ".join(words[n % 30 : n % 30 + 3]) for n in range(8 * batches)}
    sentences = [Sentence(number, text, text if target else None) for number, text in texts.items()]
    return Corpus("made", len(sentences), "0" * 40, lambda: iter(sentences), has_target=target)


def cost(checkpoint: Any, names: list[str], counts: Counts, *, target: bool = False) -> tuple[float, float, float]:
    """Kernels, synchronisations and uploads that wait, of one more batch (what comes once a pass does not count)."""
    options = RunOptions(ranks=RANKS, frequencies="made", attention="dense")
    found = []
    for batches in (1, 2, 2 + EVERY):  # the first time where heads are is found out
        counts.clear()
        analyze(
            checkpoint,
            corpus(batches, target=target),
            analyses=[ANALYSES.get(name) for name in names],
            options=options,
            batching=BatchingOptions(tokens=8 * (5 if not target else 4)),
            replicates=2,
        )
        found.append((counts.kernels, counts.syncs, counts.uploads))
    more = [(after - before) / EVERY for before, after in zip(*found[1:], strict=True)]
    return more[0], more[1], more[2]


def forward(checkpoint: Any, counts: Counts) -> tuple[int, int]:
    """Kernels and synchronisations of a batch of the model alone, with padding as text has it."""
    encoded = checkpoint.encode([sentence.source for sentence in corpus(1)], side="source", limit=97)
    batch = Batch(torch.arange(8), 0, pad_side(encoded)).to(checkpoint.device)
    with torch.no_grad(), through_attend(checkpoint.model, implementation="eager"):
        counts.clear()
        checkpoint.model(input_ids=batch.source.ids, attention_mask=batch.source.real)
    return counts.kernels, counts.syncs


def test_the_default_analyses_of_a_batch() -> None:
    """Together with the forward pass; of synchronisations there is the model's own, for its mask."""
    with pretended() as counts:
        its = encoder()
        names = [cls.name for cls in choose_analyses()]
        alone, waits = forward(its, counts)
        kernels, syncs, uploads = cost(its, names, counts)
    assert kernels <= MOST_KERNELS * alone, (kernels, alone)
    assert syncs <= waits + 1 / EVERY and uploads == 0, (syncs, uploads, counts.places)


@pytest.mark.parametrize("kind", ["llama", "native-post"])
def test_gradients_make_the_host_wait_once_a_batch(kind: str) -> None:
    with pretended() as counts:
        its = speakers.checkpoint(kind)
        its = its.with_model(copy.deepcopy(its.model).to(FIRST))
        target = speakers.SPEAKERS[kind].two_sided
        names = [*GRADIENTS, *(cls.name for cls in choose_analyses())]
        _, syncs, _ = cost(its, names, counts, target=target)
    assert syncs <= 1 + 1 / EVERY, counts.places
