"""A mixture of attentive experts: each expert is the attention of k of the h heads (Peng et al. 2020).

What is unusual here: a mixture of such experts is one factor per head on the contexts. With the membership
matrix M [e h] of experts, c = (h/k) · g·M for responsibilities g [e]; the factors of a position always add up
to h, and equal responsibilities give 1 to every head, which is plain attention. The output projection's bias
stands outside the mixture.

Axes beyond the usual legend: `e` experts, `p` positions with a gate of their own (see `gating`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Literal, cast

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError
from headscope.model.mixing.base import Mixing, Queries, mixing
from headscope.model.mixing.gating import Gate, masked_mean

MOST = 4096  # experts of one module
HIDDEN = 256  # units of a gate at a width of 512 and more
TIE = {torch.float64: 1e-12}  # log responsibilities that are nearer than this are equal; others: 1e-6
Mode = Literal["soft", "sampled", "argmax", "random"]


def count_experts(heads: int, size: int) -> int:
    """How many sets of `size` heads there are; ConfigError where an expert would be all heads or none, or too many."""
    if not 1 <= size < heads:
        raise ConfigError(
            f"experts of {size} heads in a layer of {heads}; choose from 1 to {heads - 1}"
            if heads > 1
            else f"a layer of {heads} head has no experts; mixtures need at least 2 heads"
        )
    if comb(heads, size) > MOST:
        raise ConfigError(
            f"{heads} heads have {comb(heads, size)} experts of {size}, the most is {MOST}; take larger experts"
        )
    return comb(heads, size)


@lru_cache(maxsize=32)
def membership(
    heads: int, size: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Which head is in which expert [e h], 0 or 1: every set of `size` heads, those without head 0 first.

    For size = heads - 1, expert i is the one that lacks head i (Peng et al. 2020, §2). Errors: `count_experts`.
    """
    with torch.inference_mode(False):  # it is kept, and training may want it next
        members = torch.ones(count_experts(heads, size), heads, dtype=dtype)
        for row, missing in enumerate(combinations(range(heads), heads - size)):
            members[row, list(missing)] = 0
        return members.to(device)


def head_factors(gates: Tensor, *, heads: int, size: int) -> Tensor:
    """Factors of heads [… h] for responsibilities [… e] of the experts of `size` heads: (h/k) · g·M."""
    return gates @ membership(heads, size, device=gates.device, dtype=gates.dtype) * (heads / size)


@mixing("experts.v1")
class Experts(Mixing):
    """Each head's context times its factor under a mixture of experts of `size` heads (0: all but one).

    The gate reads the mean of the module's query-side inputs: of the whole sentence in an encoder; in a causal
    stack, in cross attention too, of positions up to each one (`window`: the last so many), because the
    paper's mean over the whole target would look ahead. `norm`, `hidden`, `dropout` are the gate's (`hidden` 0:
    256 units, as published for a width of 512, or half the width where that is less); with `uniform`
    there is no gate, and all experts are equally responsible (Uni-MAE). A layer with fewer than two heads has
    nothing to mix.
    """

    summary = "experts, sets of its heads, that a gate weighs"

    def __init__(
        self,
        *,
        heads: int,
        d_value: int,
        d_model: int,
        size: int = 0,
        hidden: int = 0,
        norm: str = "layer",
        window: int = 0,
        dropout: float = 0.1,
        uniform: bool = False,
    ) -> None:
        super().__init__(heads=heads, d_value=d_value, d_model=d_model)
        if window < 0:
            raise ConfigError(f"window of the gate is {window}; give a number of positions, or 0 for all of them")
        self.size = size or heads - 1
        self.experts = count_experts(heads, self.size) if heads > 1 else 0
        self.window = window
        self.mode: Mode = "soft"
        self.gate: Gate | None = None
        if self.experts and not uniform:
            units = hidden or max(min(d_model // 2, HIDDEN), 1)
            self.gate = Gate(d_model, self.experts, hidden=units, norm=norm, dropout=dropout)

    def forward(self, context: Tensor, queries: Queries) -> Tensor:
        return weighted(context, self.factors(queries) if self.experts else None)

    def factors(self, queries: Queries) -> Tensor | None:
        """Factors of heads [b p h], None where all are 1."""
        if self.mode == "soft":
            if self.gate is None:
                return None
            return head_factors(self.log_gates(queries).exp(), heads=self.heads, size=self.size)
        with torch.no_grad():
            experts = self.choose(queries)  # [b p]
        members = membership(self.heads, self.size, device=experts.device, dtype=queries.states.dtype)
        return members[experts] * (self.heads / self.size)

    def choose(self, queries: Queries) -> Tensor:
        """One expert for each position with a gate of its own [b p].

        "sampled": drawn by responsibility, with one noise vector for each sentence and module, so that where
        the gate does not change the choice does not either (Gumbel-max; the paper draws once per sentence,
        which in a causal stack would tell early positions about later ones). "random": drawn evenly, one for
        each sentence. "argmax": the most responsible; where several are, one of them drawn evenly for each sentence.
        """
        states = queries.states
        if self.mode == "random" or self.gate is None:
            return torch.randint(self.experts, (len(states), 1), device=states.device)
        log_gates = self.log_gates(queries)
        if self.mode == "argmax":
            order = torch.rand(len(states), 1, self.experts, device=states.device)
            return order.masked_fill(~most_responsible(log_gates), -1.0).argmax(dim=-1)
        noise = torch.empty(len(states), 1, self.experts, device=states.device).exponential_().log()
        return (log_gates - noise).argmax(dim=-1)

    def log_gates(self, queries: Queries) -> Tensor:
        """Log responsibilities [b p e]; dropout and batch statistics are those of training in soft mode only."""
        assert self.gate is not None
        means, real = masked_mean(queries, window=self.window)
        learning = self.training and self.mode == "soft"
        log_gates: Tensor = self.gate(means, real, learning=learning, causal=queries.causal)
        return log_gates

    @property
    def foldable(self) -> bool:
        """Evenly mixed experts are plain attention; with a gate the mixture depends on the input."""
        return self.gate is None

    def fold(self, w_o: Tensor) -> Tensor:
        return w_o if self.foldable else super().fold(w_o)


def weighted(context: Tensor, factors: Tensor | None) -> Tensor:
    """Contexts [b h t k] of heads times their factors [b p h], p = t or 1; None: all factors are 1."""
    return context if factors is None else context * factors.transpose(1, 2)[..., None].to(context.dtype)


def most_responsible(log_gates: Tensor) -> Tensor:
    """The most responsible experts [b p e] by log responsibilities [b p e]: several where they tie."""
    return log_gates >= log_gates.amax(dim=-1, keepdim=True) - TIE.get(log_gates.dtype, 1e-6)


def experts_of(model: nn.Module) -> list[Experts]:
    """The mixtures of a model that have something to mix."""
    return [cast(Experts, module) for module in model.modules() if isinstance(module, Mixing) and module.experts]


@contextmanager
def using(modules: Iterable[Experts], mode: Mode) -> Iterator[None]:
    """Within the block these mixtures are "soft", or use one expert for each sentence or position."""
    before = [(module, module.mode) for module in modules]
    try:
        for module, _ in before:
            module.mode = mode
        yield
    finally:
        for module, mode_before in before:
            module.mode = mode_before
