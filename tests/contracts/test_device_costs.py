"""What the analyses cost an accelerator, counted on a pretended one: kernels, and waits of the host for the device."""

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
from tests.oracles.pretended import FIRST, Counts, simulate_devices

MAX_KERNELS = 5.4
EVERY = 4
"""Batches after which it is asked whether all numbers were finite: here fewer than there."""
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
RANKS = torch.arange(len(tiny.PIECES)) * 97


@pytest.fixture(autouse=True)
def _asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Text of so many batches of 8 sentences of three words; of one fold, since batches are within one."""
    words = [*tiny.WORDS, *tiny.WORDS]
    texts = {8 * n: " ".join(words[n % 30 : n % 30 + 3]) for n in range(8 * batches)}
    sentences = [Sentence(number, text, text if target else None) for number, text in texts.items()]
    return Corpus("made", len(sentences), "0" * 40, lambda: iter(sentences), has_target=target)


def cost(checkpoint: Any, names: list[str], counts: Counts, *, target: bool = False) -> tuple[float, float, float]:
    """Kernels, synchronisations and uploads that wait, of one more batch (what comes once a pass does not count)."""
    found, options = [], {"ranks": RANKS, "frequencies": "made", "attention": "dense"}
    for batches in (1, 2, 2 + EVERY):  # the first time where heads are is found out
        counts.clear()
        text, tokens = corpus(batches, target=target), 8 * (4 if target else 5)
        study_of(checkpoint, text, *names, tokens=tokens, replicates=2, **options)
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
    with simulate_devices() as counts:
        its = encoder()
        names = [cls.name for cls in choose_analyses()]
        alone, waits = forward(its, counts)
        kernels, syncs, uploads = cost(its, names, counts)
    assert kernels <= MAX_KERNELS * alone, (kernels, alone)
    assert syncs <= waits + 1 / EVERY and uploads == 0, (syncs, uploads, counts.call_sites)


@pytest.mark.parametrize("kind", ["llama", "native-post"])
def test_gradients_make_the_host_wait_once_a_batch(kind: str) -> None:
    with simulate_devices() as counts:
        its = speakers.checkpoint(kind)
        its = its.with_model(copy.deepcopy(its.model).to(FIRST))
        target = speakers.SPEAKERS[kind].two_sided
        _, syncs, _ = cost(its, ["gradient", "taylor"], counts, target=target)
    assert syncs <= 1 + 1 / EVERY, counts.call_sites


OF_THE_MODEL = {"dense": "headscope/model/interface.py", "streamed": "headscope/model/streaming.py"}
"""Where a model's masks are looked at, once each: by transformers, or by what streams."""
MADE = "headscope/model/transformers_attention.py"
"""Where transformers 5.24 looks at a mask of T5 that it makes."""
KEEPERS, KEPT = ("massive", "explained"), "headscope/distributed.py"
"""Opt-in analyses that bring to the CPU what they keep of a batch when the next one comes: once for each site."""
OF_PATTERNS = "headscope/engine/heads/streamed_rows.py"
"""Where the pairs of the opt-in `massive` are found in streamed text, which are each layer's own: twice at each."""


def observing(*, default: bool) -> list[str]:
    """Analyses that see attention in passes that all share; others make passes of their own, which wait for those."""
    seen = [cls for _, cls in ANALYSES if cls.passes and cls.explain is Analysis.explain]
    return [cls.name for cls in seen if cls.default is default and "contrast" not in cls.needs]


def waits(its: Any, line: Sentence, attention: Attention, names: list[str]) -> tuple[Counter[str], set[str]]:
    """Synchronisations of each of two more batches of a sentence, by file; and the analyses that were left out."""
    found: list[Counter[str]] = []
    with simulate_devices() as counts:
        its = its.with_model(copy.deepcopy(its.model).to(FIRST))
        for batches in (1, 3):
            text = [line._replace(number=8 * number) for number in range(batches)]
            about = {"has_target": line.target is not None, "has_parses": line.parse is not None}
            counts.clear()
            corpus = Corpus("made", batches, "0" * 40, lambda text=text: iter(text), **about)  # type: ignore[misc]
            result = study_of(its, corpus, *names, tokens=1, replicates=2, attention=attention, **OPTIONS)
            found.append(Counter())
            for place, count in counts.call_sites.items():
                found[-1][place.partition(":")[0]] += count
    more = Counter({place: (count - found[0][place]) // 2 for place, count in found[1].items()})
    return +more, {left.analysis for left in result.left_out}


@pytest.mark.parametrize(("kind", "attention", "masks"), [("t5", "dense", 2), ("gemma", "streamed", 2)])
def test_no_analysis_waits_for_the_device(kind: str, attention: Attention, masks: int) -> None:
    """Whatever the number of layers; but for masks, and what opt-in analyses keep or find by themselves."""
    its, line = tiny.checkpoint(kind, 7), list(tiny.corpus(7, count=3, target=kind == "t5"))[2]
    layers, streamed = its.attention_sites.order, attention == "streamed"
    allowed = {OF_THE_MODEL[attention]: masks, MADE: 1}
    found, left_out = waits(its, line, attention, observing(default=True))
    assert all(count <= allowed.get(place, 0) for place, count in found.items()), found
    assert not streamed or found[OF_THE_MODEL[attention]] == masks  # they are seen
    allowed |= {OF_PATTERNS: 2 * len(layers) * streamed, KEPT: len(KEEPERS) * len({part.site for part in layers})}
    found, left_out = waits(its, line, attention, observing(default=False))
    assert all(count <= allowed.get(place, 0) for place, count in found.items()), found
    assert found[KEPT] and left_out.isdisjoint(KEEPERS)
