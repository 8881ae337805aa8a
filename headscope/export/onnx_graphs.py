"""Export graphs to ONNX by torch, and compare what onnxruntime computes with the model.

Inputs and outputs have the names of optimum-onnx (exporters/onnx). A decoder is one graph, with keys
`past_key_values.{layer}.key` [b g past k] in and `present.{layer}.key` [b g past+t k] out. An encoder-decoder is three:
encoder, first step, and steps after it; `past_key_values.{layer}.decoder.key` are keys of the tokens decoded so far,
`.encoder.key` those of the source, which the first step computes.
"""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.text import Text
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from headscope.errors import CheckpointError, one_line
from headscope.evaluation.model_inputs import InputTexts
from headscope.export.base import STEPS, greedy_difference
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.forward import ModelInputs, cache_argument, max_abs_difference, of_tokens, outputs, with_cache
from headscope.model.interface import quiet_transformers, takes, through_attend


def run_session(session: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of a graph by name; ignores inputs that the graph does not have."""
    feeds = {entry.name for entry in session.get_inputs()}
    arrays = {name: np.ascontiguousarray(values.numpy()) for name, values in inputs.items() if name in feeds}
    values = (torch.from_numpy(np.asarray(output)) for output in session.run(None, arrays))
    return dict(zip((entry.name for entry in session.get_outputs()), values, strict=True))


def max_logit_diff(logits: Tensor, checkpoint: Checkpoint, batch: ModelInputs) -> float:
    """The largest difference of a graph's logits from the model's, of tokens and not of padding."""
    return max_abs_difference(of_tokens(logits, batch.real), outputs(checkpoint.model, batch))


class Graph(nn.Module):
    """A module whose forward pass is `run`, with the parameters of `model`."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, *inputs: Any) -> Any:
        return self.run(*inputs)


Inputs = dict[str, tuple[Tensor, dict[int, Any]]]
"""Examples of a graph's inputs, and the names of axes whose sizes are free."""


def export_graph(model: Any, run: Callable[..., Any], inputs: Inputs, results: Sequence[str], path: Path) -> Any:
    """Export `run`, a function of the `inputs` in order, with a model's weights; returns its onnxruntime session."""
    onnxruntime = importlib.import_module("onnxruntime")
    try:
        with _quiet(), torch.no_grad(), through_attend(model, implementation="eager"), batched_experts(model):
            torch.onnx.export(
                Graph(model, run).eval(),
                tuple(example for example, _ in inputs.values()),
                str(path),
                input_names=[*inputs],
                output_names=[*results],
                dynamic_shapes={"inputs": tuple(axes for _, axes in inputs.values())},
                dynamo=True,
                verbose=False,
            )
            return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # the exporter raises anything, depending on the architecture
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch wraps the first error in a report of many lines
            cause = cause.__cause__
        lines = [*filter(None, map(one_line, Text.from_ansi(str(cause)).plain.splitlines())), type(cause).__name__]
        raise CheckpointError(f"this model cannot be exported to ONNX: {lines[0][:200]}") from error


@contextmanager
def batched_experts(model: Any) -> Iterator[None]:
    """Within the block mixtures of experts multiply in batches, the only implementation that exports to ONNX."""
    if not hasattr(model, "set_experts_implementation"):  # a native one
        yield
        return
    before = model.config._experts_implementation
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's remarks, and the graphs that torch prints where it fails."""
    logger = logging.getLogger("torch.onnx")
    level, discarded = logger.level, io.StringIO()
    logger.setLevel(logging.ERROR)
    try:
        with quiet_transformers(), warnings.catch_warnings(), redirect_stdout(discarded), redirect_stderr(discarded):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


FILE, ENCODER, FIRST, NEXT = "model.onnx", "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"
LONGEST = 40  # tokens of a text together with its greedy continuation
PAST, NEW, SOURCE = 3, 5, 6  # positions of the texts that graphs are traced with
Past = dict[str, Tensor]


@dataclass(frozen=True)
class CacheShape:
    """The shape of a stack's cache: `sizes` has key/value groups, key width and value width of every layer.

    `layers` are those that have heads.
    """

    sizes: Sequence[tuple[int, int, int]]
    layers: Sequence[int]
    dtype: torch.dtype
    stack: str = ""

    @classmethod
    def of(cls, cache: Any, heads: Mapping[int, int], *, stack: str = "") -> CacheShape | None:
        """The shape of a cache of layers with `heads` each; None for another kind of cache, or without heads."""
        layers: Any = getattr(cache, "layers", ())
        plain = isinstance(cache, DynamicCache) and all(isinstance(entry, DynamicLayer) for entry in layers)
        if not plain or len(layers) != len(heads) or any(layer.keys is None for layer in layers):
            return None
        sizes = [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers]
        numbers = [number for number in range(len(layers)) if heads.get(number)]
        return cls(sizes, numbers, layers[0].keys.dtype, stack) if numbers else None

    @property
    def names(self) -> list[str]:
        """`LAYER.key` and `LAYER.value` of every layer in order; of encoder-decoders with the `stack` in between."""
        return [f"{layer}.{self.stack}{part}" for layer in self.layers for part in ("key", "value")]

    def past(self, sentences: int, length: int) -> Past:
        """Zeros [b g length k] by the names of the graph's inputs."""
        shapes = [(self.sizes[layer][0], width) for layer in self.layers for width in self.sizes[layer][1:]]
        return {
            f"past_key_values.{name}": torch.zeros(sentences, groups, length, width, dtype=self.dtype)
            for name, (groups, width) in zip(self.names, shapes, strict=True)
        }

    def cache(self, past: Sequence[Tensor]) -> DynamicCache:
        """A cache that holds `past` [b g past k], and zeros in layers without heads."""
        pairs, cache = iter(zip(past[::2], past[1::2], strict=True)), DynamicCache()
        rows, length = past[0].shape[0], past[0].shape[2]
        for number, (groups, *widths) in enumerate(self.sizes):
            if number in self.layers:
                keys, values = next(pairs)
            else:
                keys, values = (past[0].new_zeros(rows, groups, length, width) for width in widths)
            cache.layers.append(FilledLayer(keys, values))
        return cache

    def states(self, cache: Any) -> list[Tensor]:
        """Keys and values [b g t k] of the layers that have heads, from a cache."""
        return [states for layer in self.layers for states in (cache.layers[layer].keys, cache.layers[layer].values)]


class FilledLayer(DynamicLayer):
    """A layer of a cache that is filled from the start, even if with zero positions."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def get_seq_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[-2]


def cache_shapes(checkpoint: Checkpoint) -> tuple[CacheShape, ...] | None:
    """The shapes of the cache with which a model decodes; of an encoder-decoder, of target and source.

    None for models that do not decode, read sound, are in half precision, or have another kind of cache.
    """
    model: Any = checkpoint.model
    decodes = checkpoint.needs_target if checkpoint.two_sided else checkpoint.predicts == "words"
    has_cache = checkpoint.two_sided or cache_argument(model) is not None
    if checkpoint.is_native or checkpoint.reads_sound or not (decodes and has_cache):
        return None
    heads: dict[Site, dict[int, int]] = {}
    for site in checkpoint.attention_sites.order:
        heads.setdefault(site.site, {})[site.layer] = site.heads
    if checkpoint.dtype not in (torch.float32, torch.float64) or Site.DECODER_SELF not in heads:
        return None
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    target_ids = {"decoder_input_ids": ids} if checkpoint.two_sided else {}
    with torch.no_grad():
        _, cache = with_cache(model, input_ids=ids, **target_ids)
    if not checkpoint.two_sided:
        shape = None if len(heads) > 1 else CacheShape.of(cache, heads[Site.DECODER_SELF])
        return None if shape is None else (shape,)
    if not isinstance(cache, EncoderDecoderCache):
        return None
    target = CacheShape.of(cache.self_attention_cache, heads[Site.DECODER_SELF], stack="decoder.")
    source = CacheShape.of(cache.cross_attention_cache, heads.get(Site.CROSS, {}), stack="encoder.")
    return None if target is None or source is None else (target, source)


def export_decoder(
    checkpoint: Checkpoint, shapes: Sequence[CacheShape], data: InputTexts, folder: Path
) -> tuple[float, str]:
    """Write a graph that decodes; returns onnxruntime's largest difference, of texts and greedy steps, and a note."""
    model, (shape,) = checkpoint.model, shapes
    new = {0: "batch_size", 1: "sequence_length"}
    dynamic_axes = {0: "batch_size", 1: "past_sequence_length + sequence_length"}
    inputs: Inputs = {"input_ids": (torch.ones(2, NEW, dtype=torch.long), new)}
    inputs["attention_mask"] = torch.ones(2, PAST + NEW, dtype=torch.long), dynamic_axes
    if takes(model, "position_ids"):
        inputs["position_ids"] = torch.arange(PAST, PAST + NEW).expand(2, -1), new
    names, past_axes = [*inputs], {0: "batch_size", 2: "past_sequence_length"}

    def decode(*tensors: Tensor) -> tuple[Tensor, ...]:
        """Logits [b t V] and states [b g past+t k], of ids [b t], mask [b past+t], positions [b t] and a past."""
        arguments = dict(zip(names, tensors, strict=False))
        result, cache = with_cache(model, shape.cache(tensors[len(names) :]), **arguments)
        return (result.logits, *shape.states(cache))

    inputs |= {name: (states, past_axes) for name, states in shape.past(2, PAST).items()}
    results = ["logits", *(f"present.{name}" for name in shape.names)]
    session = export_graph(model, decode, inputs, results, folder / FILE)

    def step(new: Tensor, mask: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        """Logits [b t V] of new ids [b t] with mask [b past+t], after a cache; and the cache that includes them."""
        positions = torch.arange(mask.shape[1] - new.shape[1], mask.shape[1]).expand(len(new), -1)
        inputs = {"input_ids": new, "attention_mask": mask, "position_ids": positions}
        outputs = run_session(session, {**inputs, **(shape.past(len(new), 0) if past is None else past)})
        return outputs["logits"], _next_past(outputs)

    differences = []
    for feed in (data.feeds[0], data.feeds[-1]):
        ids, mask = feed.arguments["input_ids"], feed.arguments["attention_mask"]
        differences.append(max_logit_diff(step(ids, mask, None)[0], checkpoint, feed))
    batch = data.feeds[-1].arguments
    text = batch["input_ids"][-1][batch["attention_mask"][-1].bool()]  # without padding
    prompt = text[: max(LONGEST - STEPS, 1)]
    start = torch.stack([prompt, prompt.flip(0)])  # a second text of the same length: the first one backwards
    difference, note = greedy_difference(step, start, model, runtime="onnxruntime")
    return max(*differences, difference), note


def seq2seq_steps(model: Any, target: CacheShape, source: CacheShape) -> tuple[Callable[..., Any], ...]:
    """The functions of the three graphs: the encoder, the decoder's first step, and its later steps."""

    def encode(ids: Tensor, mask: Tensor) -> Tensor:
        return model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state

    def begin(ids: Tensor, mask: Tensor, states: Tensor, cache: Any = None) -> tuple[Tensor, ...]:
        """Logits [b t V] of the first ids [b t] after source states [b s d]; and all keys and values [b g t k]."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if cache is None else cache
        encoded = {"encoder_outputs": BaseModelOutput(last_hidden_state=states), "attention_mask": mask}
        result, after = with_cache(model, cache, decoder_input_ids=ids, **encoded)
        self_states, cross = target.states(after.self_attention_cache), source.states(after.cross_attention_cache)
        return (result.logits, *self_states, *cross)

    def follow(ids: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Logits [b t V] of ids [b t] after those in the cache; and the decoder's keys and values, with these added."""
        self_states, cross = past[: len(target.names)], past[len(target.names) :]
        unused_states = self_states[0].new_zeros(*mask.shape, 1)  # the source's keys and values are in the cache
        cache = EncoderDecoderCache(target.cache(self_states), source.cache(cross))
        return begin(ids, mask, unused_states, cache)[: 1 + len(target.names)]

    return encode, begin, follow


def export_seq2seq(
    checkpoint: Checkpoint, shapes: Sequence[CacheShape], data: InputTexts, folder: Path
) -> tuple[float, str]:
    """Write the three graphs; returns onnxruntime's largest difference, of texts and greedy steps, and a note."""
    (target, source), model = shapes, cast(Any, checkpoint.model)
    mask, ids = torch.ones(2, SOURCE, dtype=torch.long), torch.ones(2, 2, dtype=torch.long)
    encode, begin, follow = seq2seq_steps(model, target, source)
    with torch.no_grad():
        states = encode(torch.ones_like(mask), mask)
    ids_axes = {0: "batch_size", 1: "decoder_sequence_length"}
    mask_axes = {0: "batch_size", 1: "encoder_sequence_length"}
    step_inputs: Inputs = {"input_ids": (ids, ids_axes), "encoder_attention_mask": (mask, mask_axes)}
    past: Inputs = {
        name: (values, {0: "batch_size", 2: f"{stack}_sequence_length"})
        for stack, shape, length in (("past_decoder", target, PAST), ("encoder", source, SOURCE))
        for name, values in shape.past(2, length).items()
    }
    results = ["logits", *(f"present.{name}" for name in (*target.names, *source.names))]
    texts: Inputs = {"input_ids": (torch.ones_like(mask), mask_axes), "attention_mask": (mask, mask_axes)}
    encoder = export_graph(model, encode, texts, ["last_hidden_state"], folder / ENCODER)
    with_states = step_inputs | {"encoder_hidden_states": (states, mask_axes)}
    first_step = export_graph(model, begin, with_states, results, folder / FIRST)
    later_step = export_graph(model, follow, step_inputs | past, results[: 1 + len(target.names)], folder / NEXT)
    batch = data.feeds[-1]
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    source_ids, real, ids = (batch.arguments[name] for name in names)
    memory = run_session(encoder, {"input_ids": source_ids, "attention_mask": real})["last_hidden_state"]

    def step(new: Tensor, _: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        inputs = {"input_ids": new, "encoder_attention_mask": real}
        graph, state = (first_step, {"encoder_hidden_states": memory}) if past is None else (later_step, past)
        outputs = run_session(graph, {**inputs, **state})
        return outputs["logits"], {**(past or {}), **_next_past(outputs)}

    difference, note = greedy_difference(
        step, ids[:, :1], model, "decoder_input_ids", runtime="onnxruntime", input_ids=source_ids, attention_mask=real
    )
    return max(difference, max_logit_diff(step(ids, real, None)[0], checkpoint, batch)), note


def _next_past(output: Mapping[str, Tensor]) -> Past:
    """The outputs of one step as the past of the next."""
    return {name.replace("present.", "past_key_values."): values for name, values in output.items() if name != "logits"}
