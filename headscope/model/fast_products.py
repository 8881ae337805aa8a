"""Products with float32 weights in about half of the time, on CPUs that multiply bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

WITH_WEIGHTS = (linear, torch.addmm)
"""Functions of linear layers. Products within attention are not among them, which are too small to gain."""


class FastProducts(TorchFunctionMode):
    """Within the block float32 factors of these functions are rounded to 8 bits where a CPU is faster so; sums are not.

    It serves to compare many altered models, not to report numbers.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in WITH_WEIGHTS:
            return func(*args, **(kwargs or {}))
        backend: Any = torch.backends.mkldnn
        before, backend.matmul.fp32_precision = backend.matmul.fp32_precision, "bf16"
        try:
            return func(*args, **(kwargs or {}))
        finally:
            backend.matmul.fp32_precision = before
