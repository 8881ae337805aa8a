"""Whether a model in double precision computes parts in single precision: then equal models differ by its rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headscope.model.gradients import frozen_parameters


class _Casts(TorchFunctionMode):
    """Notices functions that make single precision of double precision that depends on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.noticed: bool = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.noticed = self.noticed or any(
                isinstance(given, Tensor) and given.dtype == torch.float64 and given.requires_grad for given in args
            )
        return result


def computes_in_single(model: nn.Module, run: Callable[[], object]) -> bool:
    """Whether `run`, a pass of a model in float64, rounds to float32 on its way (mixtures, state spaces, norms)."""
    with frozen_parameters(model, trainable=True), torch.enable_grad(), _Casts() as casts:
        run()
    return bool(casts.noticed)
