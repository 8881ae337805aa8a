"""How the weights of a new model are drawn: `--initial`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headscope.model.native.transformer import Transformer


def as_built(model: Transformer) -> None:
    """Glorot-uniform weights, those of query, key and value with gain 1/√2, and zero biases (fairseq until 0.9)."""


def as_fairseq(model: Transformer) -> None:
    """The same, but feed-forward layers and biases of query, key and value as torch draws them (fairseq since 0.10).

    torch's `Linear` draws weights and biases from U(−1/√n, 1/√n) with n inputs: feed-forward weights are smaller than
    Glorot's, and a post-norm model learns faster (benchmarks/RESULTS.md).
    """
    from torch import nn

    from headscope.model.native.layers import Attention, FeedForward

    for module in model.modules():
        if isinstance(module, FeedForward):
            module.inner.reset_parameters()
            module.outer.reset_parameters()
        elif isinstance(module, Attention):
            for projection in (module.query, module.key, module.value):
                if projection.bias is not None and projection.in_features:
                    nn.init.uniform_(projection.bias, -(projection.in_features**-0.5), projection.in_features**-0.5)


INITIAL: Mapping[str, Callable[[Transformer], None]] = {"glorot": as_built, "fairseq": as_fairseq}
