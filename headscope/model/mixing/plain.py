"""No mixing: every head keeps its own context."""

from __future__ import annotations

from torch import Tensor

from headscope.model.mixing.base import Mixing, Queries, mixing


@mixing("plain.v1")
class Plain(Mixing):
    """The identity, without parameters."""

    summary = ""

    def forward(self, context: Tensor, queries: Queries) -> Tensor:
        return context

    @property
    def foldable(self) -> bool:
        return True

    def fold(self, w_o: Tensor) -> Tensor:
        return w_o
