"""What a model is given when it is compared and timed: text if it can read any, random ids or pictures if not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from headscope.assets import sample
from headscope.data.encoded import Side, pad_side
from headscope.data.lines import Lines, in_step, read_lines, text_name
from headscope.errors import CheckpointError, DataError
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.speech import SpeechCheckpoint
from headscope.model.discovery import base_of, probe_inputs, text_config
from headscope.model.native.transformer import Transformer
from headscope.model.sound import reads_sound
from headscope.model.threads import threads_for_pass

LONGEST = 64  # pieces of a sentence
PATCH = 16 * 16 * 3  # numbers of a picture that are one position of most models
LENGTHS = (11, 5, 8, 3)  # of random texts, where there is no tokenizer


@dataclass(frozen=True)
class ModelInputs:
    """One batch as a model takes it; `real` [b t] tells which outputs are of tokens (None: all)."""

    arguments: dict[str, Tensor]
    real: Tensor | None

    @property
    def positions(self) -> int:
        """Positions of the longer side, padding included; of pictures about so many."""
        texts = [values.numel() for values in self.arguments.values() if values.ndim == 2]
        return max(texts, default=next(iter(self.arguments.values())).numel() // PATCH)

    def rows(self, order: Tensor) -> ModelInputs:
        """The sentences `order`, in that order and as often."""
        picked = {name: values.index_select(0, order.to(values.device)) for name, values in self.arguments.items()}
        return ModelInputs(picked, None if self.real is None else self.real.index_select(0, order.to(self.real.device)))


@dataclass(frozen=True)
class InputTexts:
    """Sentences to compare on, where they come from, and the feeds made of them; no sentences: random ids."""

    sources: tuple[str, ...]
    name: str
    feeds: tuple[ModelInputs, ...]


def texts(
    checkpoint: Checkpoint, source: Lines | None, target: Lines | None, *, sentences: int, rows: int = 4
) -> InputTexts:
    """The first lines of `source` (default: the shipped sample) in batches of `rows`, sorted by length.

    Without `target` a decoder beside an encoder reads the source lines too. A model that cannot read text gets
    random ids, or pictures. DataError where files were given and cannot be used.
    """
    try:
        pair = _read(checkpoint, source, target, sentences)
    except (CheckpointError, DataError):
        if source is not None:
            raise
        pair = None
    if pair is None:
        return InputTexts((), "random", _random(checkpoint))
    sources, targets = pair
    limit = min(LONGEST, checkpoint.limit or LONGEST)
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    feeds = []
    for first in range(0, len(order), rows):
        numbers = order[first : first + rows]
        source_side = pad_side(checkpoint.encode([sources[number] for number in numbers], side="source", limit=limit))
        target_side = None
        if checkpoint.two_sided:
            target_side = pad_side(
                checkpoint.encode([targets[number] for number in numbers], side="target", limit=limit)
            )
        feeds.append(feed(checkpoint, source_side, target_side))
    name = "headscope's sample" if source is None else text_name(source)
    return InputTexts(tuple(sources), name, tuple(feeds))


def feed(checkpoint: Checkpoint, source: Side, target: Side | None) -> ModelInputs:
    """One batch as the model of a checkpoint takes it."""
    source = source.to(checkpoint.device)
    target = None if target is None else target.to(checkpoint.device)
    if isinstance(checkpoint.model, Transformer):
        if target is None:
            return ModelInputs({"target": source.ids, "target_mask": source.real}, source.real)
        masks = {"source_mask": source.real, "target_mask": target.real}
        return ModelInputs({"source": source.ids, "target": target.ids, **masks}, target.real)
    arguments = {"input_ids": source.ids, "attention_mask": source.real.long()}
    if isinstance(checkpoint, SpeechCheckpoint):
        arguments = checkpoint.features(source)
    if target is None:
        return ModelInputs(arguments, source.real)
    arguments |= {"decoder_input_ids": target.ids, "decoder_attention_mask": target.real.long()}
    return ModelInputs(arguments, target.real)


def outputs(model: nn.Module, batch: ModelInputs) -> Tensor:
    """Logits (or the final states of a model without a head): [n V] of the real positions, else as they come."""
    if type(model).__name__.endswith("ForMultipleChoice"):  # it takes several texts for one answer
        model = base_of(model)
    with torch.no_grad(), threads_for_pass(model, batch.positions):
        result: Any = model(**batch.arguments)
    if not isinstance(result, Tensor):
        logits = getattr(result, "logits", None)
        result = result[0] if logits is None else logits
    if batch.real is not None and result.ndim == 3 and result.shape[:2] == batch.real.shape:
        result = result[batch.real]
    chosen: Tensor = result
    return chosen


def prompts(data: InputTexts, length: int, *, count: int = 3) -> list[list[int]]:
    """The first `length` tokens of a few texts that a model continues, without padding."""
    rows = [
        ids[mask.bool()].tolist()
        for batch in (data.feeds[0], data.feeds[-1])
        for ids, mask in zip(batch.arguments["input_ids"], batch.arguments["attention_mask"], strict=True)
    ]
    return [row[:length] for row in rows[-count:]]


def _read(
    checkpoint: Checkpoint, source: Lines | None, target: Lines | None, sentences: int
) -> tuple[list[str], Sequence[str]]:
    source_text = sample("en") if source is None else source
    if checkpoint.two_sided and (target is not None or source is None):
        target_text = sample("de") if target is None else target
        names = text_name(source_text), text_name(target_text)
        pairs = islice(in_step(read_lines(source_text), read_lines(target_text), names), sentences)
        sources, targets = map(list, zip(*pairs, strict=True))
    else:
        sources = targets = list(islice(read_lines(source_text), sentences))
    checkpoint.encode(sources[:1], side="source", limit=LONGEST)
    return sources, targets


def _random(checkpoint: Checkpoint) -> tuple[ModelInputs, ...]:
    noise = torch.Generator().manual_seed(0)
    model: Any = checkpoint.model
    main = getattr(model, "main_input_name", "input_ids")
    arguments: dict[str, Tensor] = {}
    if main == "pixel_values" or reads_sound(model):
        like = probe_inputs(model)[main]
        arguments = {main: torch.randn(len(LENGTHS), *like.shape[1:], generator=noise).to(like)}
        if not checkpoint.two_sided:
            return (ModelInputs(arguments, None),)
    sizes = vocabularies(checkpoint)
    most = min(max(LENGTHS), checkpoint.limit or max(LENGTHS))

    def draw(size: int, lengths: Sequence[int]) -> Side:
        real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        low = min(5, size - 1)
        ids = torch.randint(low, size, real.shape, generator=noise) * real
        return Side(ids, real, torch.zeros_like(real))

    source = draw(sizes[0], [min(length, most) for length in LENGTHS])
    target = draw(sizes[1], [min(length, most) for length in reversed(LENGTHS)]) if checkpoint.two_sided else None
    if arguments and target is not None:
        target = target.to(checkpoint.device)
        arguments |= {"decoder_input_ids": target.ids, "decoder_attention_mask": target.real.long()}
        return (ModelInputs(arguments, target.real),)
    return (feed(checkpoint, source, target),)


def vocabularies(checkpoint: Checkpoint) -> tuple[int, int]:
    """Number of ids of the source and of the target side."""
    if isinstance(checkpoint.model, Transformer):
        config = checkpoint.model.config
        return (config.encoder or config.decoder).vocabulary, config.decoder.vocabulary
    both_sides: Any = checkpoint.model.config
    return int(text_config(both_sides).vocab_size), int(text_config(both_sides, target=True).vocab_size)


def max_abs_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest expected number (or of 1)."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    same = actual == expected  # -inf too, where a model masks what it must not say; NaN equals nothing
    difference = (actual - expected).abs().masked_fill(same, 0.0).max()
    largest = expected.abs().masked_fill(expected.isinf(), 0.0).max().clamp(min=1.0)
    share = float(difference / largest)
    return share if share == share else float("inf")
