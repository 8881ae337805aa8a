"""Modules as ONNX graphs through torch's exporter, and the session that runs what was written."""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from headscope.errors import CheckpointError, one_line, uncoloured
from headscope.formats.huggingface.native_models.from_native import quiet_transformers
from headscope.model.interface import through_attend

QUANTITY = "outputs differ by"
TOLERANCE = 1e-5  # of the largest logit; onnxruntime sums in another order: 2e-7 to 2e-6 was measured


def exported(
    module: Any, examples: tuple[Any, ...], path: Path, *, names: tuple[list[str], list[str]], axes: Any
) -> Any:
    """Export a module around a model (`module.model`); an onnxruntime session of what was written."""
    onnxruntime = importlib.import_module("onnxruntime")
    try:
        with _quiet(), torch.no_grad(), through_attend(module.model, implementation="eager"):
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
