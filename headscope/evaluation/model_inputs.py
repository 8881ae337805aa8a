"""Inputs to compare or time models on: text if the model can read it, else random ids or pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headscope.assets import sample
from headscope.data.encoded import Side
from headscope.errors import CheckpointError, DataError
from headscope.evaluation.opened import one_batch
from headscope.files.reading import Lines, in_step, read_lines, text_name
from headscope.formats.base import Checkpoint
from headscope.model.discovery import probe_inputs
from headscope.model.forward import ModelInputs
from headscope.model.interface import reads_sound

LONGEST, ROWS = 64, 4  # pieces of a sentence, sentences of a batch
PROMPTS = 3  # texts that a model continues
LENGTHS = (11, 5, 8, 3)  # of random texts, where there is no tokenizer


@dataclass(frozen=True)
class InputTexts:
    """Sentences to compare on, the name of their source, and batches of them (`feeds`); no sentences: random ids."""

    sources: tuple[str, ...]
    name: str
    feeds: tuple[ModelInputs, ...]

    def first(self) -> InputTexts:
        """The shortest batch alone, for a quick look."""
        return replace(self, feeds=self.feeds[:1])


def read_input_texts(
    checkpoint: Checkpoint, source: Lines | None, target: Lines | None, *, sentences: int
) -> InputTexts:
    """The first lines of `source` (default: the shipped sample) in batches of `ROWS`, sorted by length.

    Without `target` the decoder of an encoder–decoder reads the source lines too. A model that cannot read text gets
    random ids or pictures. CheckpointError or DataError if given files cannot be used.
    """
    try:
        return _read(checkpoint, source, target, sentences)
    except (CheckpointError, DataError):
        if source is not None:
            raise
        return InputTexts((), "random", (_random(checkpoint),))


def cut_prompts(data: InputTexts, length: int) -> list[list[int]]:
    """The first `length` tokens of a few texts that a model continues, without padding."""
    rows = [
        ids[mask.bool()].tolist()
        for batch in (data.feeds[0], data.feeds[-1])
        for ids, mask in zip(batch.arguments["input_ids"], batch.arguments["attention_mask"], strict=True)
    ]
    return [row[:length] for row in rows[-PROMPTS:]]


def _read(checkpoint: Checkpoint, source: Lines | None, target: Lines | None, sentences: int) -> InputTexts:
    source_text = sample("en") if source is None else source
    lines: Iterable[tuple[str, str | None]]
    if checkpoint.two_sided and (target is not None or source is None):
        target_text = sample("de") if target is None else target
        names = text_name(source_text), text_name(target_text)
        lines = in_step(read_lines(source_text), read_lines(target_text), names)
    else:
        lines = ((line, line if checkpoint.two_sided else None) for line in read_lines(source_text))
    pairs = list(islice(lines, sentences))
    by_length = sorted(pairs, key=lambda pair: len(pair[0]))
    feeds = []
    for first in range(0, len(pairs), ROWS):
        batch = one_batch(checkpoint, by_length[first : first + ROWS], longest=LONGEST)
        arguments = checkpoint.arguments(batch.source, batch.target)
        feeds.append(ModelInputs(arguments, (batch.target or batch.source).real).to(checkpoint.device))
    name = "headscope's sample" if source is None else text_name(source)
    return InputTexts(tuple(line for line, _ in pairs), name, tuple(feeds))


def _random(checkpoint: Checkpoint) -> ModelInputs:
    noise = torch.Generator().manual_seed(0)
    model: Any = checkpoint.model
    main = getattr(model, "main_input_name", "input_ids")
    limit = min(max(LENGTHS), checkpoint.limit or max(LENGTHS))

    def draw_side(size: int, lengths: Sequence[int]) -> Side:
        real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        low = min(5, size - 1)
        ids = torch.randint(low, size, real.shape, generator=noise) * real
        return Side(ids, real, torch.zeros_like(real))

    arguments: dict[str, Tensor] = {}
    if main == "pixel_values" or reads_sound(model):
        like = probe_inputs(model)[main]
        arguments = {main: torch.randn(len(LENGTHS), *like.shape[1:], generator=noise).to(like)}
        if not checkpoint.two_sided:
            return ModelInputs(arguments, None)
    source, target = draw_side(checkpoint.vocabularies[0], [min(length, limit) for length in LENGTHS]), None
    if checkpoint.two_sided:
        target = draw_side(checkpoint.vocabularies[1], [min(length, limit) for length in reversed(LENGTHS)])
    if arguments and target is not None:
        arguments |= {"decoder_input_ids": target.ids, "decoder_attention_mask": target.real.long()}
    else:
        arguments = checkpoint.arguments(source, target)
    return ModelInputs(arguments, (target or source).real).to(checkpoint.device)
