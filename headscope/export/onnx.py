"""`--export onnx`: ONNX graphs of a model, whose outputs in onnxruntime are compared with the model's."""

from __future__ import annotations

import copy
import importlib.metadata
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.errors import CheckpointError
from headscope.evaluation.model_inputs import InputTexts
from headscope.export.base import FLOAT32_TOLERANCE, OUTPUTS, EngineExport, EngineFile, check_difference, engine
from headscope.export.onnx_graphs import (
    ENCODER,
    FILE,
    FIRST,
    NEXT,
    cache_shapes,
    export_decoder,
    export_graph,
    export_seq2seq,
    max_logit_diff,
    run_session,
)
from headscope.formats.base import Checkpoint
from headscope.model.forward import ModelInputs, outputs
from headscope.model.native.layers import SinusoidalPositions

LONGEST = 1024  # positions of the graph of a native model with sinusoids


@engine
class OnnxGraph(EngineExport):
    """Any model that torch can export: a decoder with its cache, others as one forward pass; in float32."""

    name = "onnx"
    summary = "graphs for onnxruntime, of whatever torch exports"
    install = "headscope[onnx]"
    packages = ("onnx", "onnxscript", "onnxruntime")
    endings = ("onnx", "onnx.data")

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises nothing: whether torch can export a model is only known when it tries."""

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, *, quantize: str = "none") -> EngineFile:
        note, shapes = "", None
        if checkpoint.device.type != "cpu":  # graphs are traced, and run, on the CPU
            checkpoint = checkpoint.with_model(copy.deepcopy(checkpoint.model).cpu())
            data = replace(data, feeds=tuple(feed.to(checkpoint.device) for feed in data.feeds))
        try:
            if (shapes := cache_shapes(checkpoint)) is not None:
                export = export_decoder if len(shapes) == 1 else export_seq2seq
                difference, note = export(checkpoint, shapes, data, folder)
        except CheckpointError as error:
            note, shapes = f"without a cache, because a graph with one cannot be exported ({error})", None
            for name in (FILE, ENCODER, FIRST, NEXT):
                for path in (folder / name, folder / f"{name}.data"):
                    path.unlink(missing_ok=True)
        file, sizes = FILE, "decodes through a cache, in float32"
        opens = f"`{FILE}`: {_WITH_CACHE}; the first step is given a past of length 0"
        if shapes is None:
            difference, sizes = export_onnx(checkpoint, data, folder / FILE), _ONE_PASS
            opens = f"`{FILE}`: onnxruntime and other ONNX runtimes; batch and length are free"
        elif len(shapes) > 1:
            file, sizes = ENCODER, f"with {FIRST} and {NEXT}: {sizes}"
            opens = f"`{ENCODER}`, `{FIRST}` and `{NEXT}`: {_WITH_CACHE}"
        uniform = all(len(shape.layers) == len(shape.sizes) and len(set(shape.sizes)) == 1 for shape in shapes or ())
        return EngineFile(
            export=self.name,
            file=file,
            runtime=f"onnxruntime {importlib.metadata.version('onnxruntime')}",
            difference=difference,
            quantity=OUTPUTS,
            limit=check_difference(difference, FLOAT32_TOLERANCE, "the ONNX graph" + "s" * (file == ENCODER), OUTPUTS),
            sizes=sizes,
            opens=(opens,),
            limits=() if uniform else (_ONE_SHAPE,),
            notes=(note,) if note else (),
        )


_ONE_PASS = "one forward pass in float32, without a cache"
_WITH_CACHE = (
    "onnxruntime and other ONNX runtimes, with past_key_values and present in the names that optimum uses; batch and "
    "lengths are free"
)
_ONE_SHAPE = (
    "programs that make an empty cache of one shape for all layers of an ONNX graph: layers keep different numbers of "
    "heads, or none; read the shapes from the session's inputs"
)


def export_onnx(checkpoint: Checkpoint, data: InputTexts, path: Path) -> float:
    """Write one forward pass to `path`; returns the largest difference in onnxruntime, also on other sentences."""
    batch = data.feeds[0]
    model = checkpoint.model
    names, free = list(batch.arguments), torch.export.Dim.DYNAMIC
    for part in model.modules():
        if isinstance(part, SinusoidalPositions):  # compute the whole table now: it cannot grow in the graph
            first = next(model.parameters())
            part(torch.zeros(1, dtype=torch.long, device=first.device), first, bound=LONGEST)
    text_axes, other_axes = {0: free, 1: free}, {0: free}  # only texts [b t] may have other lengths
    inputs: dict[str, tuple[Tensor, dict[int, Any]]] = {
        name: (values, text_axes if values.ndim == 2 else other_axes) for name, values in batch.arguments.items()
    }

    def run(*inputs: Tensor) -> Tensor:
        return outputs(model, ModelInputs(dict(zip(names, inputs, strict=True)), None))

    session, differences = export_graph(model, run, inputs, ["logits"], path), list[float]()
    for feed in (data.feeds[0], data.feeds[-1]):
        (logits,) = run_session(session, feed.arguments).values()
        differences.append(max_logit_diff(logits, checkpoint, feed))
    return max(differences)
