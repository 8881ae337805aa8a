"""An encoder-decoder as three ONNX graphs, in the names that optimum uses: encoder, first step, and steps after it.

optimum-onnx, exporters/onnx: `past_key_values.{layer}.decoder.key` are states of what is decoded so far, `.encoder.key`
those of the source, which the first step makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.forward import max_abs_difference, with_cache
from headscope.pruning.engines.onnx_decoder import CacheShape, exported, logits_apart, ran, shape_of
from headscope.pruning.model_inputs import InputTexts

ENCODER, FIRST, NEXT = "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"
STEPS, PAST, SOURCE, NEW = 8, 3, 6, 2
IDS = {0: "batch_size", 1: "decoder_sequence_length"}
MASK = {0: "batch_size", 1: "encoder_sequence_length"}
OF_TARGET = {0: "batch_size", 2: "past_decoder_sequence_length"}
OF_SOURCE = {0: "batch_size", 2: "encoder_sequence_length"}


@dataclass(frozen=True)
class TwoCaches:
    """The caches of a decoder: of its own states, and of those of the source."""

    target: CacheShape
    source: CacheShape

    @property
    def names(self) -> list[str]:
        """`LAYER.decoder.key` and the like, those of the decoder's own states first."""
        return [*self.target.names, *self.source.names]

    def filled(self, target: tuple[Tensor, ...], source: tuple[Tensor, ...]) -> EncoderDecoderCache:
        """A cache that holds states already."""
        caches = []
        for shape, past in ((self.target, target), (self.source, source)):
            cache = DynamicCache()
            cache.layers = shape.layers(past)
            caches.append(cache)
        return EncoderDecoderCache(*caches)

    def states(self, cache: Any) -> list[Tensor]:
        """Keys and values in the order of `names`."""
        return [*self.target.states(cache.self_attention_cache), *self.source.states(cache.cross_attention_cache)]


def two_caches(checkpoint: Checkpoint) -> TwoCaches | None:
    """What an encoder-decoder of transformers keeps; None for others, models of sound, and where no layer keeps any."""
    model: Any = checkpoint.model
    of_text = checkpoint.needs_target and not checkpoint.is_native and not checkpoint.reads_sound
    if not of_text or checkpoint.dtype not in (torch.float32, torch.float64):
        return None
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.no_grad():
        _, cache = with_cache(model, input_ids=ids, decoder_input_ids=ids)
    if not isinstance(cache, EncoderDecoderCache):
        return None
    heads = {(site.site, site.layer): site.heads for site in checkpoint.attention_sites.order}
    shapes = [
        shape_of(part, {layer: count for (site, layer), count in heads.items() if site is wanted}, stack=stack)
        for part, wanted, stack in (
            (cache.self_attention_cache, Site.DECODER_SELF, "decoder."),
            (cache.cross_attention_cache, Site.CROSS, "encoder."),
        )
    ]
    return None if shapes[0] is None or shapes[1] is None else TwoCaches(shapes[0], shapes[1])


class _Encoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Final states [b s d] of ids [b s]."""
        states: Tensor = self.model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return states


class _FirstStep(nn.Module):
    def __init__(self, model: Any, caches: TwoCaches) -> None:
        super().__init__()
        self.model, self.caches = model, caches

    def forward(self, input_ids: Tensor, mask: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """Logits [b t V] of the first ids [b t] after source states [b s d]; and all keys and values."""
        empty = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return _step(self.model, self.caches, input_ids, mask, states, empty)


class _NextStep(nn.Module):
    def __init__(self, model: Any, caches: TwoCaches, width: int) -> None:
        super().__init__()
        self.model, self.caches, self.width = model, caches, width

    def forward(
        self, input_ids: Tensor, mask: Tensor, target: tuple[Tensor, ...], source: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Logits of ids after those in the caches; and the decoder's own keys and values, longer by them."""
        unread = target[0].new_zeros(mask.shape[0], mask.shape[1], self.width)  # its keys are in the cache
        found = _step(self.model, self.caches, input_ids, mask, unread, self.caches.filled(target, source))
        return found[: 1 + len(self.caches.target.names)]


def _step(
    model: Any, caches: TwoCaches, ids: Tensor, mask: Tensor, states: Tensor, cache: EncoderDecoderCache
) -> tuple[Tensor, ...]:
    result, after = with_cache(
        model,
        cache,
        encoder_outputs=BaseModelOutput(last_hidden_state=states),
        attention_mask=mask,
        decoder_input_ids=ids,
    )
    return (result.logits, *caches.states(after))


def export_seq2seq(checkpoint: Checkpoint, caches: TwoCaches, data: InputTexts, folder: Path) -> tuple[float, str]:
    """Write the three graphs; returns the difference in onnxruntime, of texts and greedy steps, and a line on it.

    CheckpointError where the model cannot be exported.
    """
    model: Any = checkpoint.model
    mask, ids = torch.ones(2, SOURCE, dtype=torch.long), torch.ones(2, NEW, dtype=torch.long)
    with torch.no_grad():
        states = _Encoder(model)(torch.ones_like(mask), mask)
    target = tuple(caches.target.past(2, PAST).values())
    source = tuple(caches.source.past(2, SOURCE).values())
    presents = [f"present.{name}" for name in caches.names]
    pasts = [f"past_key_values.{name}" for name in caches.names]
    encoder = exported(
        _Encoder(model),
        (torch.ones_like(mask), mask),
        folder / ENCODER,
        names=(["input_ids", "attention_mask"], ["last_hidden_state"]),
        axes=(MASK, MASK),
    )
    first = exported(
        _FirstStep(model, caches),
        (ids, mask, states),
        folder / FIRST,
        names=(["input_ids", "encoder_attention_mask", "encoder_hidden_states"], ["logits", *presents]),
        axes=(IDS, MASK, MASK),
    )
    following = exported(
        _NextStep(model, caches, states.shape[2]),
        (ids, mask, target, source),
        folder / NEXT,
        names=(["input_ids", "encoder_attention_mask", *pasts], ["logits", *presents[: len(target)]]),
        axes=(IDS, MASK, (OF_TARGET,) * len(target), (OF_SOURCE,) * len(source)),
    )
    return _difference(SeqToSeqGraphs(encoder, first, following), checkpoint, data)


@dataclass(frozen=True)
class SeqToSeqGraphs:
    """Sessions of the three graphs."""

    encoder: Any
    first: Any
    following: Any

    def begun(self, source: Tensor, mask: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """The first step, after source ids [b s]."""
        states = ran(self.encoder, {"input_ids": source, "attention_mask": mask})["last_hidden_state"]
        inputs = {"input_ids": ids, "encoder_attention_mask": mask, "encoder_hidden_states": states}
        return ran(self.first, inputs)

    def greedy(self, source: Tensor, mask: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [b 1+n] of n greedy tokens after `start` [b 1], and the logits [b n V] that chose them."""
        found, ids, rows = self.begun(source, mask, start), start, []
        past = _past(found)
        for step in range(STEPS):
            rows.append(found["logits"][:, -1])
            new = rows[-1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], dim=1)
            if step + 1 < STEPS:
                found = ran(self.following, {"input_ids": new, "encoder_attention_mask": mask, **past})
                past |= _past(found)
        return ids, torch.stack(rows, dim=1)


def _past(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("present.", "past_key_values."): values for name, values in found.items() if name != "logits"}


def _difference(graphs: SeqToSeqGraphs, checkpoint: Checkpoint, data: InputTexts) -> tuple[float, str]:
    """The largest difference of logits, of whole texts and of greedy steps through the cache; and a line on these."""
    batch = data.feeds[-1]
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    source, mask, ids = (batch.arguments[name].cpu() for name in names)
    difference = logits_apart(graphs.begun(source, mask, ids)["logits"], checkpoint, batch)
    text, steps = graphs.greedy(source, mask, ids[:, :1])
    model: Any = checkpoint.model
    inputs = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": text[:, :-1]}
    with torch.no_grad():
        wanted = model(
            **{name: values.to(model.device) for name, values in inputs.items()}, use_cache=False
        ).logits.cpu()
    difference = max(difference, max_abs_difference(steps, wanted))
    same = int((wanted.argmax(-1) == text[:, 1:]).sum())
    return difference, f"greedy tokens through the cache: {same} of {text[:, 1:].numel()} are the same in onnxruntime"
