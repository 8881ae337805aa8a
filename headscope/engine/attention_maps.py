"""Attention weights of single sentences, for figures and for the examples on the page of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import SIDE_NAMES, Batch, Encoded, SideName, encode_side, pad_side
from headscope.description.tokens import TokenReader
from headscope.files.tables import Bytes, Example
from headscope.formats.base import Checkpoint
from headscope.heads import SITES, HeadId, Site
from headscope.model.taps import Captured, capture, masked

SHORT, LONG = 32, 128
"""The most subwords of a side, special ones included, of an example; `LONG` if the text has no more sentences."""
ROOM = 256 << 20  # bytes of the weights of all examples, before compression
LINES_PER_EXAMPLE = 50  # lines that are searched for each requested example


@dataclass(frozen=True)
class Maps:
    """The captured attention of one sentence, and its encoded sides."""

    tensors: Captured
    sides: Mapping[SideName, Encoded]

    def side_names(self, site: Site) -> tuple[SideName, SideName]:
        """The sides of queries and keys."""
        text: SideName = "target" if "target" in self.sides else "source"
        return ("source" if site is Site.ENCODER_SELF else text, text if site is Site.DECODER_SELF else "source")


def attention_maps(checkpoint: Checkpoint, sentence: Sentence, *, limit: int, off: Sequence[HeadId] = ()) -> Maps:
    """The attention of every head on one sentence, with the heads of `off` switched off."""
    return _maps(checkpoint, _encode_sides(checkpoint, sentence, limit), off)


def _maps(checkpoint: Checkpoint, sides: Mapping[SideName, Encoded], off: Sequence[HeadId]) -> Maps:
    target = pad_side([sides["target"]]) if "target" in sides else None
    batch = Batch(torch.zeros(1, dtype=torch.long), 0, pad_side([sides["source"]]), target)
    with torch.inference_mode(), masked(checkpoint.model, off), capture(checkpoint.model) as tensors:
        checkpoint.forward(batch.to(checkpoint.device))
    return Maps(tensors, sides)


def short_examples(
    checkpoint: Checkpoint, corpus: Corpus, count: int, *, limit: int, off: Sequence[HeadId] = ()
) -> list[Example]:
    """The first `count` sentences with at most `SHORT` subwords a side, while their weights fit in `ROOM`.

    A text with at most `count` sentences, such as a typed one, may have up to `LONG` subwords a side.
    """
    examples, room, longest = list[Example](), ROOM, SHORT if corpus.count > count else LONG
    readers = {side: TokenReader.of(checkpoint, side) for side in SIDE_NAMES}
    for sentence in corpus.first(LINES_PER_EXAMPLE * count):
        sides = _encode_sides(checkpoint, sentence, limit)
        if all(0 < len(side.ids) <= longest and not side.cut for side in sides.values()):
            example = _example(readers, sentence, sides, off)
            room -= sum(weights.nbytes for weights in example.weights.values())
            if room < 0:
                break
            examples.append(example)
        if len(examples) == count:
            break
    return examples


def _example(
    readers: Mapping[SideName, TokenReader],
    sentence: Sentence,
    sides: Mapping[SideName, Encoded],
    off: Sequence[HeadId],
) -> Example:
    """A sentence with the weights of all heads by site, as bytes, of sites whose layers were all captured."""
    checkpoint = readers["source"].checkpoint
    maps = _maps(checkpoint, sides, off)
    texts = {"source": sentence.source if sentence.second is None else f"{sentence.source} ‖ {sentence.second}"}
    if "target" in sides and sentence.target:
        texts["target"] = sentence.target
    subwords: dict[str, list[str]] = {name: readers[name].display(side.ids) for name, side in sides.items()}
    weights: dict[str, Bytes] = {}
    for site in SITES:
        layers = sorted(layer for (own, layer), heads in checkpoint.layout.items() if own is site and heads)
        if layers and all((site, layer) in maps.tensors.calls for layer in layers):
            shares = torch.cat([maps.tensors[site, layer]["weights"][0].float() for layer in layers])  # [h t s]
            weights[site.value] = (shares.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    return Example(sentence.number, texts, subwords, weights)


def _encode_sides(checkpoint: Checkpoint, sentence: Sentence, limit: int) -> dict[SideName, Encoded]:
    source = encode_side([sentence], checkpoint, "source", limit=limit)
    target = checkpoint.decoder_inputs(source)
    if checkpoint.two_sided and sentence.target and not target:
        target = checkpoint.encode([sentence.target], side="target", limit=limit)
    return dict(zip(SIDE_NAMES, [*source, *target], strict=False))
