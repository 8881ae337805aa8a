"""A decoder as one ONNX graph that decodes: keys and values go in and come out, in the names that optimum uses.

optimum-onnx, exporters/onnx: `past_key_values.{layer}.key` [b g past k] in, `present.{layer}.key` [b g past+t k] out.
Torch's exporter (`exported`) serves the other graphs too.
"""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from headscope.errors import CheckpointError, one_line, uncoloured
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.native_models.from_native import quiet_transformers
from headscope.heads import Site
from headscope.model.forward import ModelInputs, cache_argument, max_abs_difference, of_tokens, outputs, with_cache
from headscope.model.interface import through_attend
from headscope.pruning.model_inputs import InputTexts

STEPS, LONGEST, PAST, NEW = 8, 40, 3, 5
TOTAL = "past_sequence_length + sequence_length"


@dataclass(frozen=True)
class CacheShape:
    """Of every layer that keeps a cache: groups, width of keys and of values; layers without heads keep none."""

    sizes: Mapping[int, tuple[int, int, int]]
    empty: Mapping[int, tuple[int, int, int]]

    dtype: torch.dtype
    stack: str = ""

    @property
    def names(self) -> list[str]:
        """`LAYER.key` and `LAYER.value` of every layer, from the bottom up; with the `stack` between in some models."""
        return [f"{layer}.{self.stack}{part}" for layer in sorted(self.sizes) for part in ("key", "value")]

    @property
    def uniform(self) -> bool:
        """Whether all layers keep states of one shape."""
        return not self.empty and len(set(self.sizes.values())) == 1

    def past(self, sentences: int, length: int) -> dict[str, Tensor]:
        """Zeros by the names of the graph's inputs."""
        sizes = [(groups, width) for _, (groups, *widths) in sorted(self.sizes.items()) for width in widths]
        return {
            f"past_key_values.{name}": torch.zeros(sentences, groups, length, width, dtype=self.dtype)
            for name, (groups, width) in zip(self.names, sizes, strict=True)
        }

    def layers(self, past: Sequence[Tensor]) -> list[Any]:
        """Layers of a cache that hold `past`, zeros where a stand-in takes the place of a layer without heads."""
        pairs = iter(zip(past[::2], past[1::2], strict=True))
        layers = []
        for number in range(len(self.sizes) + len(self.empty)):
            if number in self.sizes:
                layers.append(FilledLayer(*next(pairs)))
            else:
                groups, *widths = self.empty[number]
                zeros = [past[0].new_zeros(past[0].shape[0], groups, past[0].shape[2], width) for width in widths]
                layers.append(FilledLayer(*zeros))
        return layers

    def states(self, cache: Any) -> list[Tensor]:
        """Keys and values of the layers that have heads, out of a cache."""
        layers = [cache.layers[number] for number in sorted(self.sizes)]
        return [states for layer in layers for states in (layer.keys, layer.values)]


def shape_of(cache: Any, heads: Mapping[int, int], *, stack: str = "") -> CacheShape | None:
    """The shape of a cache of layers with so many `heads`; None where it is of another kind, or no layer has any."""
    layers: Any = getattr(cache, "layers", ())
    if not isinstance(cache, DynamicCache) or len(layers) != len(heads):
        return None
    if not all(isinstance(layer, DynamicLayer) and layer.keys is not None for layer in layers):
        return None
    sizes = {n: (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for n, layer in enumerate(layers)}
    kept = {number: size for number, size in sizes.items() if heads.get(number)}
    empty = {number: size for number, size in sizes.items() if number not in kept}
    return CacheShape(kept, empty, layers[0].keys.dtype, stack) if kept else None


def cache_shape(checkpoint: Checkpoint) -> CacheShape | None:
    """What a causal model keeps of each layer; None for models that are none, or keep something else."""
    model: Any = checkpoint.model
    causal = not checkpoint.is_native and not checkpoint.two_sided and checkpoint.predicts == "words"
    sites = {site.layer: site.heads for site in checkpoint.attention_sites.order if site.site is Site.DECODER_SELF}
    if (
        checkpoint.dtype not in (torch.float32, torch.float64)
        or not causal
        or not sites
        or len(sites) < len(checkpoint.attention_sites.order)
    ):
        return None
    if cache_argument(model) is None:
        return None
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.no_grad():
        _, cache = with_cache(model, input_ids=ids)
    return shape_of(cache, sites)


class Decoding(nn.Module):
    """A causal model with tensors in and tensors out: logits, then keys and values of every layer."""

    def __init__(self, model: nn.Module, shape: CacheShape, *, positions: bool) -> None:
        super().__init__()
        self.model, self.shape, self.positions = model, shape, positions

    def forward(self, inputs: tuple[Tensor, ...], past: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Logits [b t V] and states [b g past+t k], of ids [b t], mask [b past+t] and positions [b t]."""
        cache = DynamicCache()
        cache.layers = self.shape.layers(past)
        more = {"position_ids": inputs[2]} if self.positions else {}
        result, after = with_cache(self.model, cache, input_ids=inputs[0], attention_mask=inputs[1], **more)
        return (result.logits, *self.shape.states(after))


class FilledLayer(DynamicLayer):
    """A layer of a cache that holds states already, possibly of no position."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def get_seq_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[-2]


def export_decoder(checkpoint: Checkpoint, shape: CacheShape, data: InputTexts, path: Path) -> tuple[float, str]:
    """Write a graph that decodes; returns the difference in onnxruntime, of texts and greedy steps, and a line on it.

    It is traced with two sentences of which three positions are past. CheckpointError where the model cannot be
    exported.
    """
    positions, past = "position_ids" in inspect.signature(checkpoint.model.forward).parameters, shape.past(2, PAST)
    inputs = {
        "input_ids": torch.ones(2, NEW, dtype=torch.long),
        "attention_mask": torch.ones(2, PAST + NEW, dtype=torch.long),
        **({"position_ids": torch.arange(PAST, PAST + NEW).expand(2, -1)} if positions else {}),
    }
    new = {0: "batch_size", 1: "sequence_length"}
    axes = (new, {0: "batch_size", 1: TOTAL}, *([new] if positions else []))
    session = exported(
        Decoding(checkpoint.model, shape, positions=positions),
        (tuple(inputs.values()), tuple(past.values())),
        path,
        names=([*inputs, *past], ["logits", *(f"present.{name}" for name in shape.names)]),
        axes=(axes, ({0: "batch_size", 2: "past_sequence_length"},) * len(past)),
    )
    return decoding_difference(session, checkpoint, shape, data)


def taken(session: Any, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a graph takes of inputs, as arrays."""
    known = {entry.name for entry in session.get_inputs()}
    return {name: np.ascontiguousarray(values.cpu().numpy()) for name, values in inputs.items() if name in known}


def ran(session: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of a graph by name; inputs that it has not are left aside."""
    values = (torch.from_numpy(np.asarray(output)) for output in session.run(None, taken(session, inputs)))
    return dict(zip((entry.name for entry in session.get_outputs()), values, strict=True))


def logits_apart(logits: Tensor, checkpoint: Checkpoint, batch: ModelInputs) -> float:
    """The largest difference of a graph's logits from the model's, of tokens and not of padding."""
    return max_abs_difference(of_tokens(logits, batch.real), outputs(checkpoint.model, batch).cpu())


class GraphDecoder:
    """An onnxruntime session of a decoding graph, and the cache between its steps."""

    def __init__(self, session: Any, shape: CacheShape) -> None:
        self.session = session
        self.shape = shape

    def run(self, ids: Tensor, mask: Tensor, past: Mapping[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Logits [b t V] of ids [b t] after a cache, with the mask [b past+t] of all; and the cache that follows."""
        past = self.shape.past(len(ids), 0) if past is None else past
        before = mask.shape[1] - ids.shape[1]
        positions = torch.arange(before, mask.shape[1]).expand(len(ids), -1)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
        logits, *states = ran(self.session, inputs).values()
        return logits, {
            f"past_key_values.{name}": tensor for name, tensor in zip(self.shape.names, states, strict=True)
        }


def decoding_difference(session: Any, checkpoint: Checkpoint, shape: CacheShape, data: InputTexts) -> tuple[float, str]:
    """The largest difference of logits, of whole texts and of greedy steps through the cache; and a line on these."""
    decoder, difference = GraphDecoder(session, shape), 0.0
    for batch in (data.feeds[0], data.feeds[-1]):
        ids, mask = batch.arguments["input_ids"].cpu(), batch.arguments["attention_mask"].cpu()
        logits, _ = decoder.run(ids, mask)
        difference = max(difference, logits_apart(logits, checkpoint, batch))
    prompt = prompt_pair(data)
    text, steps = greedy(decoder, prompt)
    with torch.no_grad():
        model: Any = checkpoint.model
        wanted = model(input_ids=text[:, :-1].to(model.device), use_cache=False).logits.cpu()
    difference = max(difference, max_abs_difference(steps, wanted[:, prompt.shape[1] - 1 :]))
    same = int((wanted[:, prompt.shape[1] - 1 :].argmax(-1) == text[:, prompt.shape[1] :]).sum())
    return difference, f"greedy tokens through the cache: {same} of {2 * STEPS} are the same in onnxruntime"


def greedy(decoder: GraphDecoder, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [b t+n] of prompts [b t] and n greedy tokens, and the logits [b n V] that chose them."""
    ids, rows, past, new = prompt, [], None, prompt
    for _ in range(STEPS):
        logits, past = decoder.run(new, torch.ones_like(ids), past)
        rows.append(logits[:, -1])
        new = rows[-1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, new], dim=1)
    return ids, torch.stack(rows, dim=1)


def prompt_pair(data: InputTexts) -> Tensor:
    """The first tokens of the last text, without padding, and the same backwards: [2 t]."""
    batch = data.feeds[-1].arguments
    row = batch["input_ids"][-1][batch["attention_mask"][-1].bool()].cpu()
    start = row[: max(LONGEST - STEPS, 1)]
    return torch.stack([start, start.flip(0)])


QUANTITY = "outputs differ, as a share of the largest, by"


def exported(
    module: Any, examples: tuple[Any, ...], path: Path, *, names: tuple[list[str], list[str]], axes: Any
) -> Any:
    """Export a module around a model (`module.model`); an onnxruntime session of what was written."""
    onnxruntime = importlib.import_module("onnxruntime")
    try:
        with (
            _quiet(),
            torch.no_grad(),
            through_attend(module.model, implementation="eager"),
            _batched_experts(module.model),
        ):
            torch.onnx.export(
                module.eval(),
                examples,
                str(path),
                input_names=names[0],
                output_names=names[1],
                dynamic_shapes=axes,
                dynamo=True,
                verbose=False,
            )
            return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever the exporter may raise at an architecture
        raise CheckpointError(f"this model cannot be exported to ONNX: {_reason(error)}") from error


@contextmanager
def _batched_experts(model: Any) -> Iterator[None]:
    """Within the block mixtures multiply all chosen experts at once, the one way of transformers that ONNX can say."""
    if not hasattr(model, "set_experts_implementation"):  # a native one
        yield
        return
    before = model.config._experts_implementation
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _reason(error: BaseException) -> str:
    """The first line of what began it, which torch wraps in a report of many lines."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in map(one_line, uncoloured(str(error)).splitlines()) if line]
    return (lines or [type(error).__name__])[0][:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks, and without the graphs that torch prints where it fails."""
    logger = logging.getLogger("torch.onnx")
    level, unread = logger.level, io.StringIO()
    logger.setLevel(logging.ERROR)
    try:
        with quiet_transformers(), warnings.catch_warnings(), redirect_stdout(unread), redirect_stderr(unread):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
