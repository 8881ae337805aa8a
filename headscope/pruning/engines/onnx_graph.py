"""A pruned model as one ONNX graph, its outputs compared with onnxruntime's."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headscope.errors import CheckpointError
from headscope.formats.base import Checkpoint
from headscope.model.native.layers import SinusoidalPositions
from headscope.pruning.engines.base import (
    FULL,
    EngineExport,
    EngineFile,
    EngineOptions,
    EngineRun,
    engine,
    refuse_difference,
)
from headscope.pruning.engines.onnx_decoder import (
    QUANTITY,
    STEPS,
    GraphDecoder,
    cache_shape,
    export_decoder,
    exported,
    greedy,
    logits_apart,
    prompt_pair,
    ran,
    taken,
)
from headscope.pruning.engines.onnx_seq2seq import (
    ENCODER,
    FIRST,
    NEXT,
    SeqToSeqGraphs,
    export_seq2seq,
    two_caches,
)
from headscope.pruning.model_inputs import InputTexts

FILE = "model.onnx"
FILES = (FILE, ENCODER, FIRST, NEXT)
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
            if (shape := cache_shape(checkpoint)) is not None:
                difference, note = export_decoder(checkpoint, shape, data, folder / FILE)
                sizes = "decodes through a cache, in float32"
                opens = f"`{FILE}`: {_WITH_CACHE}; the first step is given a past of length 0"
                return self._file(FILE, difference, sizes, opens, (note,), uniform=shape.uniform)
            if (caches := two_caches(checkpoint)) is not None:
                difference, note = export_seq2seq(checkpoint, caches, data, folder)
                sizes = f"with {FIRST} and {NEXT}: decodes through a cache, in float32"
                opens = f"`{ENCODER}`, `{FIRST}` and `{NEXT}`: {_WITH_CACHE}"
                uniform = caches.target.uniform and caches.source.uniform
                return self._file(ENCODER, difference, sizes, opens, (note,), uniform=uniform)
        except CheckpointError as error:
            notes = (f"without a cache, as a graph with one cannot be made ({error})",)
            for name in FILES:
                for path in (folder / name, folder / f"{name}.data"):
                    path.unlink(missing_ok=True)
        difference = export_onnx(checkpoint, data, folder / FILE)
        opens = f"`{FILE}`: onnxruntime and other ONNX runtimes; batch and length are free"
        return self._file(FILE, difference, "one forward pass in float32, without a cache", opens, notes)

    def _file(
        self, file: str, difference: float, sizes: str, opens: str, notes: tuple[str, ...], *, uniform: bool = True
    ) -> EngineFile:
        """What is said of graphs; CheckpointError for a difference that is too large."""
        refuse_difference(difference, FULL, "the ONNX graphs" if file == ENCODER else "the ONNX graph", QUANTITY)
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

    @contextmanager
    def running(self, file: EngineFile, checkpoint: Checkpoint, data: InputTexts, folder: Path) -> Iterator[EngineRun]:
        batch = data.feeds[len(data.feeds) // 2]
        arguments = {name: values.cpu() for name, values in batch.arguments.items()}
        session, sentences = _session(folder / file.file), len(next(iter(arguments.values())))
        if file.file == ENCODER:
            graphs = SeqToSeqGraphs(session, _session(folder / FIRST), _session(folder / NEXT))
            source, mask, target = (arguments[name] for name in ("input_ids", "attention_mask", "decoder_input_ids"))

            def translate() -> int:
                return sentences * (graphs.greedy(source, mask, target[:, :1])[0].shape[1] - 1)

            written = f"{source.shape[1]} tokens read, {STEPS} written"
            yield EngineRun(what=written, sentences=sentences, work=translate)
        elif any(entry.name.startswith("past_key_values") for entry in session.get_inputs()):
            shape, prompt = cache_shape(checkpoint), prompt_pair(data)
            assert shape is not None
            decoder, length = GraphDecoder(session, shape), prompt.shape[1]
            written = f"{length} tokens read, {STEPS} written"
            yield EngineRun(what=written, sentences=2, work=lambda: 2 * (greedy(decoder, prompt)[0].shape[1] - length))
        else:
            feed = taken(session, batch.arguments)

            def forward() -> int:
                session.run(None, feed)
                return 0

            yield EngineRun(what="forward", sentences=sentences, work=forward)


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

    def __init__(self, model: nn.Module, names: list[str], *, cached: bool) -> None:
        super().__init__()
        self.model, self.names, self.cached = model, names, cached

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits, or the final states of a model without a head."""
        more = {"use_cache": False} if self.cached else {}
        output: Any = self.model(**dict(zip(self.names, inputs, strict=True)), **more)
        if isinstance(output, Tensor):
            return output
        logits = getattr(output, "logits", None)
        chosen: Tensor = output[0] if logits is None else logits
        return chosen


def export_onnx(checkpoint: Checkpoint, data: InputTexts, path: Path) -> float:
    """Write `path`, run it with onnxruntime on other sentences than it was traced with, return the difference.

    Batch and lengths are free. The graph is one forward pass in float32, without a cache. CheckpointError where
    the model cannot be exported.
    """
    batch = data.feeds[0]
    model: Any = checkpoint.model
    names = list(batch.arguments)
    cached = "use_cache" in getattr(model.config, "to_dict", dict)()
    for part in model.modules():
        if isinstance(part, SinusoidalPositions):  # their tables cannot grow in the graph
            first = next(model.parameters())
            part(torch.zeros(1, dtype=torch.long, device=first.device), first, bound=LONGEST)
    session = exported(
        _Traced(model, names, cached=cached),
        tuple(batch.arguments.values()),
        path,
        names=(names, ["logits"]),
        axes={"inputs": tuple(_free(name, values) for name, values in batch.arguments.items())},
    )
    return max(
        logits_apart(next(iter(ran(session, feed.arguments).values())), checkpoint, feed)
        for feed in (data.feeds[0], data.feeds[-1])
    )


def _free(name: str, values: Tensor) -> dict[int, Any]:
    """Axes whose size may change: sentences, and positions of texts."""
    batch = torch.export.Dim.DYNAMIC
    return {0: batch, 1: batch} if values.ndim == 2 else {0: batch}


def _session(path: Path) -> Any:
    """A graph in onnxruntime, on as many threads as torch has."""
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
