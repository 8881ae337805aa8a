"""Whether what a checkpoint computes is finite, at every pass; and the sha256 of its files or weights.

A pass that fails runs a second time, to name the layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from headscope.data.encoded import Batch, Side
from headscope.errors import NumericalError
from headscope.model.discovery import track_calls
from headscope.model.nonfinite import HALVES, deferred_checks, first_non_finite, is_finite


class Runnable(Protocol):
    """The part of a `Checkpoint` that a message about its numbers needs."""

    path: str

    @property
    def model(self) -> nn.Module:
        """The model that runs."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        ...


C = TypeVar("C", bound=Runnable)
P = ParamSpec("P")
R = TypeVar("R")


def finite(method: Callable[Concatenate[C, Batch, P], R]) -> Callable[Concatenate[C, Batch, P], R]:
    """Decorates the methods of a `Checkpoint` that run the model: NumericalError where the result is not finite.

    What a model computes at padding does not matter, and -inf may stand among logits for what it must not say.
    """

    @wraps(method)
    def checked(self: C, batch: Batch, /, *args: P.args, **kwargs: P.kwargs) -> R:
        def run() -> R:
            return method(self, batch, *args, **kwargs)

        def check(result: R) -> R:
            values = _output(result)
            if not (values is None or is_finite(values) or is_finite(at_tokens(values, batch), masked=True)):
                refuse_overflow(self, run, batch)
            return result

        checks = deferred_checks()
        if checks is None:
            return check(run())
        result = run()
        if (values := _output(result)) is not None:
            checks.add(values, lambda: check(run()), masked=True)
        return result

    return checked


def _output(result: Any) -> Tensor | None:
    values = result if isinstance(result, Tensor) else getattr(result, "last_hidden_state", None)
    return values if isinstance(values, Tensor) else None


def at_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Those of values [b t …] that belong to tokens [n …]; all of them where the shape is that of no text."""
    sides: list[Side] = [side for side in (batch.target, batch.source) if side is not None]
    fitting = [side.real for side in sides if values.shape[:2] == side.ids.shape]
    return values[torch.stack(fitting).any(dim=0).to(values.device)] if fitting else values


def refuse_overflow(checkpoint: Runnable, run: Callable[[], object], batch: Batch | None = None) -> NoReturn:
    """NumericalError naming the layer where NaN or infinite numbers first arise in `run`, a pass that had some."""
    counted = (lambda values: values) if batch is None else (lambda values: at_tokens(values, batch))
    with track_calls(checkpoint.model) as tracker:

        def site_name(attention: nn.Module) -> str | None:
            attention_site = tracker.attention_site(attention)
            return None if attention_site is None else f"{attention_site.site}.{attention_site.layer}"

        location = first_non_finite(checkpoint.model, run, site_of=site_name, counted=counted)
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    half = HALVES.get(checkpoint.dtype)
    hint = f"they are too large for {dtype}; take {half}" if half else f"its weights are out of proportion for {dtype}"
    raise NumericalError(f"{checkpoint.path}: NaN or infinite numbers arise at {location or 'the output'}; {hint}")


def file_digest(files: Sequence[Path]) -> str:
    """sha256 over the bytes of files, in the order given."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as handle:
            while block := handle.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """sha256 over the class of a model and the names, types, shapes and bytes of its parameters and buffers."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
