"""Graphs of ONNX: how torch writes them, and what onnxruntime computes of them."""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.errors import CheckpointError, one_line, uncoloured
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.native_models.from_native import quiet_transformers
from headscope.model.forward import ModelInputs, max_abs_difference, of_tokens, outputs
from headscope.model.interface import through_attend


def run_session(session: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of a graph by name; inputs that it has not are left aside."""
    known = {entry.name for entry in session.get_inputs()}
    arrays = {name: np.ascontiguousarray(values.cpu().numpy()) for name, values in inputs.items() if name in known}
    values = (torch.from_numpy(np.asarray(output)) for output in session.run(None, arrays))
    return dict(zip((entry.name for entry in session.get_outputs()), values, strict=True))


def max_logit_diff(logits: Tensor, checkpoint: Checkpoint, batch: ModelInputs) -> float:
    """The largest difference of a graph's logits from the model's, of tokens and not of padding."""
    return max_abs_difference(of_tokens(logits, batch.real), outputs(checkpoint.model, batch).cpu())


def exported(
    module: Any, examples: tuple[Any, ...], path: Path, *, names: tuple[list[str], list[str]], axes: Any
) -> Any:
    """Export a module around a model (`module.model`); an onnxruntime session of what was written."""
    onnxruntime = importlib.import_module("onnxruntime")
    try:
        with _quiet(), torch.no_grad(), through_attend(module.model, implementation="eager"), _batched(module.model):
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
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch wraps what began it in a report of many lines
            cause = cause.__cause__
        lines = [*filter(None, map(one_line, uncoloured(str(cause)).splitlines())), type(cause).__name__]
        raise CheckpointError(f"this model cannot be exported to ONNX: {lines[0][:200]}") from error


@contextmanager
def _batched(model: Any) -> Iterator[None]:
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
