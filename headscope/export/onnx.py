"""A pruned model as one ONNX graph, its outputs compared with onnxruntime's."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headscope.errors import CheckpointError
from headscope.evaluation.model_inputs import InputTexts
from headscope.export.base import FULL, EngineExport, EngineFile, EngineOptions, check_difference, engine
from headscope.export.onnx_graphs import (
    ENCODER,
    FIRST,
    NEXT,
    CacheShape,
    cache_shapes,
    export_decoder,
    export_graph,
    export_seq2seq,
    max_logit_diff,
    run_session,
)
from headscope.formats.base import Checkpoint
from headscope.model.native.layers import SinusoidalPositions

FILE = "model.onnx"
QUANTITY = "outputs differ, as a share of the largest, by"
LONGEST = 1024  # positions of a native model with sinusoids


@engine
class OnnxGraph(EngineExport):
    """Any model that torch can export: a decoder with its cache, others as one forward pass; in float32."""

    name = "onnx"
    summary = "graphs for onnxruntime, of whatever torch exports"
    install = "headscope[onnx]"
    packages = ("onnx", "onnxscript", "onnxruntime")
    endings = ("onnx", "onnx.data")

    def check(self, checkpoint: Checkpoint) -> None:
        """Whether torch can export a model shows when it does."""

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, options: EngineOptions) -> EngineFile:
        notes: tuple[str, ...] = ()
        try:
            if (shapes := cache_shapes(checkpoint)) is not None:
                return self._decoding(checkpoint, shapes, data, folder)
        except CheckpointError as error:
            notes = (f"without a cache, as a graph with one cannot be made ({error})",)
            for name in (FILE, ENCODER, FIRST, NEXT):
                for path in (folder / name, folder / f"{name}.data"):
                    path.unlink(missing_ok=True)
        difference = export_onnx(checkpoint, data, folder / FILE)
        opens = f"`{FILE}`: onnxruntime and other ONNX runtimes; batch and length are free"
        return self._file(FILE, difference, "one forward pass in float32, without a cache", opens, notes)

    def _decoding(
        self, checkpoint: Checkpoint, shapes: tuple[CacheShape, ...], data: InputTexts, folder: Path
    ) -> EngineFile:
        uniform = all(shape.uniform for shape in shapes)
        if len(shapes) == 1:
            difference, note = export_decoder(checkpoint, shapes[0], data, folder / FILE)
            opens = f"`{FILE}`: {_WITH_CACHE}; the first step is given a past of length 0"
            sizes = "decodes through a cache, in float32"
            return self._file(FILE, difference, sizes, opens, (note,), uniform=uniform)
        difference, note = export_seq2seq(checkpoint, shapes, data, folder)
        opens = f"`{ENCODER}`, `{FIRST}` and `{NEXT}`: {_WITH_CACHE}"
        sizes = f"with {FIRST} and {NEXT}: decodes through a cache, in float32"
        return self._file(ENCODER, difference, sizes, opens, (note,), uniform=uniform)

    def _file(
        self, file: str, difference: float, sizes: str, opens: str, notes: tuple[str, ...], *, uniform: bool = True
    ) -> EngineFile:
        """What is said of graphs; CheckpointError for a difference that is too large."""
        what = "the ONNX graphs" if file == ENCODER else "the ONNX graph"
        check_difference(difference, 1.0, torch.float32, what, QUANTITY)
        return EngineFile(
            export=self.name,
            file=file,
            runtime=f"onnxruntime {importlib.metadata.version('onnxruntime')}",
            difference=difference,
            quantity=QUANTITY,
            limit=FULL,
            sizes=sizes,
            opens=(opens,),
            limits=() if uniform else (_ONE_SHAPE,),
            notes=notes,
        )


_WITH_CACHE = (
    "onnxruntime and other ONNX runtimes, with past_key_values and present in the names that optimum uses; batch and "
    "lengths are free"
)
_ONE_SHAPE = (
    "programs that make an empty cache of one shape for all layers of an ONNX graph: layers keep different numbers of "
    "heads, or none; read the shapes from the session's inputs"
)


class _Traced(nn.Module):
    """A model with tensors in, one tensor out."""

    def __init__(self, model: nn.Module, names: list[str], *, has_cache: bool) -> None:
        super().__init__()
        self.model, self.names, self.cached = model, names, has_cache

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits, or the final states of a model without a head."""
        more = {"use_cache": False} if self.cached else {}
        output: Any = self.model(**dict(zip(self.names, inputs, strict=True)), **more)
        if isinstance(output, Tensor):
            return output
        logits = getattr(output, "logits", None)
        result: Tensor = output[0] if logits is None else logits
        return result


def export_onnx(checkpoint: Checkpoint, data: InputTexts, path: Path) -> float:
    """Write `path`, one forward pass; the difference in onnxruntime on other sentences than it was traced with."""
    batch = data.feeds[0]
    model: Any = checkpoint.model
    names, examples, free = list(batch.arguments), tuple(batch.arguments.values()), torch.export.Dim.DYNAMIC
    has_cache = "use_cache" in getattr(model.config, "to_dict", dict)()
    for part in model.modules():
        if isinstance(part, SinusoidalPositions):  # their tables cannot grow in the graph
            first = next(model.parameters())
            part(torch.zeros(1, dtype=torch.long, device=first.device), first, bound=LONGEST)
    session = export_graph(
        _Traced(model, names, has_cache=has_cache),
        examples,
        path,
        names=(names, ["logits"]),
        axes={
            "inputs": tuple({0: free, 1: free} if x.ndim == 2 else {0: free} for x in examples)
        },  # of texts positions too
    )
    return max(
        max_logit_diff(next(iter(run_session(session, feed.arguments).values())), checkpoint, feed)
        for feed in (data.feeds[0], data.feeds[-1])
    )
