"""Costs of the analyses on an accelerator, counted on a simulated one: kernels, and waits of the host for it."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from headscope.bootstrap import FOLDS
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import Batch, pad_side
from headscope.engine import plan
from headscope.engine.base import ANALYSES, Analysis, Attention
from headscope.engine.plan import choose_analyses
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.model import nonfinite
from headscope.model.interface import through_attend
from tests.contracts.studies import OPTIONS
from tests.makers import wrappers
from tests.makers.studies import study_of
from tests.oracles import speakers, tiny
from tests.oracles.simulation import FIRST, Counts, simulate_devices

MAX_KERNELS = 5.4
EVERY = 4
"""Batches between checks for non-finite numbers: fewer here than in headscope."""
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
RANKS = torch.arange(len(tiny.PIECES)) * 97


@pytest.fixture(autouse=True)
def _check_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "EVERY", EVERY)
    monkeypatch.setattr(plan, "RANDOM_SEQUENCES", FOLDS)
    monkeypatch.setattr(plan, "RANDOM_BLOCK", 5)


def encoder() -> HuggingFaceCheckpoint:
    """A BERT of six layers, as MiniLM has, on the device."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 12, "num_hidden_layers": 6, "num_attention_heads": 3, **tiny.SIZES}
    config = transformers.BertConfig(**sizes, **EAGER)
    model: Any = transformers.BertModel(config).eval().to(FIRST)
    return wrappers.hugging_face(model, tiny.tokenizer([tiny.START], [tiny.END]))


def corpus(batches: int, *, target: bool = False) -> Corpus:
    """Text of so many batches of 8 sentences of three words, in one fold, since a batch has one."""
    words = [*tiny.WORDS, *tiny.WORDS]
    texts = {8 * n: " ".join(words[n % 30 : n % 30 + 3]) for n in range(8 * batches)}
    sentences = [Sentence(number, text, text if target else None) for number, text in texts.items()]
    return Corpus("made", len(sentences), "0" * 40, lambda: iter(sentences), has_target=target)


def cost(checkpoint: Any, names: list[str], counts: Counts, *, target: bool = False) -> tuple[float, float, float]:
    """Kernels, synchronisations and uploads that wait, of one more batch, without the costs of a pass."""
    rows, options = [], {"ranks": RANKS, "frequencies": "made", "attention": "dense"}
    for batches in (1, 2, 2 + EVERY):  # the first time where heads are is found out
        counts.clear()
        text, tokens = corpus(batches, target=target), 8 * (4 if target else 5)
        study_of(checkpoint, text, *names, tokens=tokens, replicates=2, **options)
        rows.append((counts.kernels, counts.syncs, counts.uploads))
    more = [(after - before) / EVERY for before, after in zip(*rows[1:], strict=True)]
    return more[0], more[1], more[2]


def forward(checkpoint: Any, counts: Counts) -> tuple[int, int]:
    """Kernels and synchronisations of a batch of the model alone, with padding as text has it."""
    texts = checkpoint.encode([sentence.source for sentence in corpus(1)], side="source", limit=97)
    batch = Batch(torch.arange(8), 0, pad_side(texts)).to(checkpoint.device)
    with torch.no_grad(), through_attend(checkpoint.model, implementation="eager"):
        counts.clear()
        checkpoint.model(input_ids=batch.source.ids, attention_mask=batch.source.real)
    return counts.kernels, counts.syncs


def test_the_default_analyses_of_a_batch() -> None:
    """Costs with the forward pass, whose only synchronisation is for the model's mask."""
    with simulate_devices() as counts:
        checkpoint = encoder()
        names = [cls.name for cls in choose_analyses()]
        alone, waits = forward(checkpoint, counts)
        kernels, syncs, uploads = cost(checkpoint, names, counts)
    assert kernels <= MAX_KERNELS * alone, (kernels, alone)
    assert syncs <= waits + 1 / EVERY and uploads == 0, (syncs, uploads, counts.call_sites)


@pytest.mark.parametrize("kind", ["llama", "native-post"])
def test_gradients_make_the_host_wait_once_a_batch(kind: str) -> None:
    with simulate_devices() as counts:
        checkpoint = speakers.checkpoint(kind)
        checkpoint = checkpoint.with_model(copy.deepcopy(checkpoint.model).to(FIRST))
        target = speakers.SPEAKERS[kind].two_sided
        _, syncs, _ = cost(checkpoint, ["gradient", "taylor"], counts, target=target)
    assert syncs <= 1 + 1 / EVERY, counts.call_sites


OF_THE_MODEL = {"dense": "headscope/model/interface.py", "streamed": "headscope/model/streaming.py"}
"""Files in which a model's masks are read, once each: in transformers' path, or in the streamed one."""
T5_MASKS = "headscope/model/transformers_attention.py"
"""The file in which transformers 5.24 reads a mask of T5 that it makes."""
KEEPERS, OF_KEEPERS = ("massive", "explained"), "headscope/distributed.py"
"""Opt-in analyses that move the kept tensors of a batch to the CPU with the next batch: once for each site."""
OF_PATTERNS = "headscope/engine/heads/streamed_rows.py"
"""The file that finds the pairs of the opt-in `massive` in streamed text: two waits a layer."""


def observing(*, default: bool) -> list[str]:
    """Analyses of the shared passes; those with passes of their own wait for these."""
    classes = [cls for _, cls in ANALYSES if cls.passes and cls.explain is Analysis.explain]
    return [cls.name for cls in classes if cls.default is default and "contrast" not in cls.needs]


def waits(checkpoint: Any, line: Sentence, attention: Attention, names: list[str]) -> tuple[Counter[str], set[str]]:
    """Synchronisations of each of two more batches of a sentence, by file; and the analyses that were left out."""
    counters: list[Counter[str]] = []
    with simulate_devices() as counts:
        checkpoint = checkpoint.with_model(copy.deepcopy(checkpoint.model).to(FIRST))
        for batches in (1, 3):
            text = [line._replace(number=8 * number) for number in range(batches)]
            sides = {"has_target": line.target is not None, "has_parses": line.parse is not None}
            counts.clear()
            corpus = Corpus("made", batches, "0" * 40, lambda text=text: iter(text), **sides)  # type: ignore[misc]
            result = study_of(checkpoint, corpus, *names, tokens=1, replicates=2, attention=attention, **OPTIONS)
            counters.append(Counter())
            for site, count in counts.call_sites.items():
                counters[-1][site.partition(":")[0]] += count
    more = Counter({site: (count - counters[0][site]) // 2 for site, count in counters[1].items()})
    return +more, {left.analysis for left in result.left_out}


@pytest.mark.parametrize(("kind", "attention", "masks"), [("t5", "dense", 2), ("gemma", "streamed", 2)])
def test_no_analysis_waits_for_the_device(kind: str, attention: Attention, masks: int) -> None:
    """For any number of layers, except for masks and for the tensors that opt-in analyses keep or search."""
    checkpoint, line = tiny.checkpoint(kind, 7), list(tiny.corpus(7, count=3, target=kind == "t5"))[2]
    layers, streamed = checkpoint.attention_sites.order, attention == "streamed"
    limits = {OF_THE_MODEL[attention]: masks, T5_MASKS: 1}
    syncs, left_out = waits(checkpoint, line, attention, observing(default=True))
    assert all(count <= limits.get(file, 0) for file, count in syncs.items()), syncs
    assert not streamed or syncs[OF_THE_MODEL[attention]] == masks  # they are seen
    limits |= {OF_PATTERNS: 2 * len(layers) * streamed, OF_KEEPERS: len(KEEPERS) * len({part.site for part in layers})}
    syncs, left_out = waits(checkpoint, line, attention, observing(default=False))
    assert all(count <= limits.get(file, 0) for file, count in syncs.items()), syncs
    assert syncs[OF_KEEPERS] and left_out.isdisjoint(KEEPERS)
