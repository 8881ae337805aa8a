"""A pruned model as one ONNX graph, its outputs compared with onnxruntime's."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headscope.errors import CheckpointError
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.from_native import quiet_transformers
from headscope.model.interface import through_attend
from headscope.model.native.positions import SinusoidalPositions
from headscope.pruning.engines.base import ENGINES, EngineExport, EngineFile, EngineOptions, refuse_difference
from headscope.pruning.removal.model_inputs import InputTexts, ModelInputs, outputs
from headscope.pruning.removal.verify import max_abs_difference

FILE = "model.onnx"
QUANTITY = "outputs differ by"
LONGEST = 1024  # positions of a native model with sinusoids
TOLERANCE = 1e-4  # of the largest logit; onnxruntime fuses and reorders sums in single precision


class OnnxGraph(EngineExport):
    """Any model that torch can export: one forward pass, without a cache."""

    name = "onnx"
    summary = "one graph for onnxruntime"
    extra = "onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")

    def check(self, checkpoint: Checkpoint) -> None:
        """Whether torch can export a model shows when it does."""

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, options: EngineOptions) -> EngineFile:
        difference = export_onnx(checkpoint, data, folder / FILE)
        version = importlib.metadata.version("onnxruntime")
        return EngineFile(
            export=self.name,
            file=FILE,
            runtime=f"onnxruntime {version}",
            quantity=QUANTITY,
            difference=difference,
            limit=TOLERANCE,
            sizes="one forward pass in float32, without a cache",
            opens=(f"`{FILE}`: onnxruntime and other ONNX runtimes; batch and length are free",),
        )


class _Traced(nn.Module):
    """A model with tensors in, one tensor out."""

    def __init__(self, model: nn.Module, names: list[str], *, cached: bool) -> None:
        super().__init__()
        self.model, self.names, self.cached = model, names, cached

    def forward(self, *given: Tensor) -> Tensor:
        """Logits, or the final states of a model without a head."""
        more = {"use_cache": False} if self.cached else {}
        output: Any = self.model(**dict(zip(self.names, given, strict=True)), **more)
        if isinstance(output, Tensor):
            return output
        logits = getattr(output, "logits", None)
        chosen: Tensor = output[0] if logits is None else logits
        return chosen


def export_onnx(checkpoint: Checkpoint, data: InputTexts, path: Path) -> float:
    """Write `path`, run it with onnxruntime on other sentences than it was traced with, return the difference.

    Batch and lengths are free. The graph is one forward pass in float32, without a cache. CheckpointError where
    the model cannot be exported or the graph computes something else.
    """
    onnxruntime = importlib.import_module("onnxruntime")
    batch = data.feeds[0]
    model: Any = checkpoint.model
    names = list(batch.given)
    cached = "use_cache" in getattr(model.config, "to_dict", dict)()
    traced = _Traced(model, names, cached=cached).eval()
    _grow_positions(model)
    try:
        with _quiet(), torch.no_grad(), through_attend(model, implementation="eager"):
            torch.onnx.export(
                traced,
                tuple(batch.given.values()),
                str(path),
                input_names=names,
                output_names=["logits"],
                dynamic_shapes={"given": tuple(_free(name, values) for name, values in batch.given.items())},
                dynamo=True,
                verbose=False,
            )
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever the exporter may raise at an architecture
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"this model cannot be exported to ONNX: {detail}") from error
    far = max(_max_difference(session, checkpoint, inputs) for inputs in (data.feeds[0], data.feeds[-1]))
    refuse_difference(far, TOLERANCE, "the ONNX graph", QUANTITY)
    return far


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _grow_positions(model: nn.Module) -> None:
    """Make the tables of sinusoids large before they are traced: in the graph they cannot grow."""
    for part in model.modules():
        if isinstance(part, SinusoidalPositions):
            first = next(model.parameters())
            part(torch.zeros(1, dtype=torch.long, device=first.device), first, bound=LONGEST)


def _free(name: str, values: Tensor) -> dict[int, Any]:
    """Axes whose size may change: sentences, and positions of texts."""
    batch = torch.export.Dim.DYNAMIC
    return {0: batch, 1: batch} if values.ndim == 2 else {0: batch}


def _max_difference(session: Any, checkpoint: Checkpoint, batch: ModelInputs) -> float:
    known = {entry.name for entry in session.get_inputs()}
    given = {name: values.cpu().numpy() for name, values in batch.given.items() if name in known}
    logits = torch.from_numpy(np.asarray(session.run(None, given)[0]))
    if batch.real is not None and logits.ndim == 3:
        logits = logits[batch.real.cpu()]
    return max_abs_difference(logits, outputs(checkpoint.model, batch).cpu())


ENGINES.register("onnx", OnnxGraph(), where=__name__)
