"""Other forward functions for some modules of a model, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

_ABSENT = object()


@contextmanager
def replaced_forwards(forwards: dict[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Within the block the modules run the given forward functions."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            stack.callback(_restore, module, module.__dict__.get("forward", _ABSENT))
            module.__dict__["forward"] = forward
        yield


def _restore(module: nn.Module, before: object) -> None:
    if before is _ABSENT:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = before
