"""A mixture of attentive experts: each expert is the attention of k of the h heads (Peng et al. 2020).

A mixture of such experts is one factor per head on the contexts. With the membership matrix M [e h] of experts and
responsibilities g [e] the factors are c = (h/k) · g·M. The factors of a position add up to h, and equal
responsibilities give 1 to every head, which is plain attention. The output projection's bias is not mixed.

Axes beyond the usual legend: `e` experts, `p` positions with a gate of their own (see `gating`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Literal, cast

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError, flag, raise_first
from headscope.model.attention import precise_type
from headscope.model.mixing.base import Mixing, Queries, mixing

NORMS = ("batch", "layer", "none")


def masked_mean(queries: Queries, *, window: int = 0) -> tuple[Tensor, Tensor]:
    """Means of the real states [b p d], and a mask of means over at least one real position [b p].

    In a causal stack position t has the mean of positions up to t, with `window` w of the last w positions; otherwise
    the sentence has one mean. Padding never counts. With `queries.memory` positions of earlier steps of incremental
    decoding count too, and the state for later steps is kept there.
    """
    states = queries.states
    real = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    real = real if queries.real is None else queries.real.bool()
    weight = real[..., None].to(states.dtype)  # [b t 1]
    if not queries.causal:
        mean = (states * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)
        return mean, torch.ones_like(real[:, :1])
    real_states = states * weight
    total, count = (_last_positions if window else _so_far)(real_states, weight, queries.memory, window)
    return (total / count.clamp_min(1)).to(states.dtype), real


def _so_far(states: Tensor, weight: Tensor, memory: dict[str, Tensor] | None, _: int) -> tuple[Tensor, Tensor]:
    """Running sums [b t d] and counts [b t 1]; in float32 at least, as sums over long texts need it."""
    exact = precise_type(states.dtype)
    total, count = states.to(exact).cumsum(dim=1), weight.to(exact).cumsum(dim=1)
    if memory is not None:
        if "total" in memory:
            total, count = total + memory["total"], count + memory["count"]
        memory["total"], memory["count"] = total[:, -1:], count[:, -1:]
    return total, count


def _last_positions(
    states: Tensor, weight: Tensor, memory: dict[str, Tensor] | None, window: int
) -> tuple[Tensor, Tensor]:
    """Sums and counts of the last `window` positions: differences of running sums, so in float64."""
    t = states.shape[1]
    summands = torch.cat([states, weight], dim=-1)  # [b t d+1]
    if memory is not None:
        if "recent" in memory:
            summands = torch.cat([memory["recent"], summands], dim=1)
        memory["recent"] = summands[:, max(summands.shape[1] - window + 1, 0) :]
    sums = summands.double().cumsum(dim=1)
    if sums.shape[1] > window:
        sums = torch.cat([sums[:, :window], sums[:, window:] - sums[:, :-window]], dim=1)
    return sums[:, -t:, :-1], sums[:, -t:, -1:]


class RealBatchNorm(nn.Module):
    """Batch norm of [b p d] over sentences and positions, with statistics that ignore padding.

    The running statistics normalise a batch with a single real position, which has no variance, and always in a causal
    stack, where a batch's own statistics would leak later positions.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor, real: Tensor, *, learning: bool, causal: bool = False) -> Tensor:
        """Normalise x; with `learning` by this batch's statistics, which then update the running ones.

        With `causal` by the running statistics of earlier batches, which `learning` then updates.
        """
        rows = x[real] if learning else x[:0, 0]
        is_enough = len(rows) > 1
        mean, variance = self.running_mean, self.running_var
        if is_enough and not causal:
            mean, variance = rows.mean(dim=0), rows.var(dim=0, correction=0)
        normalised_x = (x - mean) * (variance + 1e-5).rsqrt() * self.weight + self.bias
        with torch.no_grad():
            if is_enough:
                self.running_mean.lerp_(rows.mean(dim=0).to(self.running_mean), 0.1)
                self.running_var.lerp_(rows.var(dim=0, correction=1).to(self.running_var), 0.1)
        return normalised_x


class Gate(nn.Module):
    """norm → linear → tanh → dropout → linear → softmax over experts.

    The second linear layer starts at zero, so fresh gates are uniform (the paper does not define the start); training
    initialises it at random. Under autocast a gate computes in its weights' type, as routers of experts do (Fedus et
    al. 2022, "Switch Transformers", §2.4): in bfloat16 responsibilities near 1/8 are 0.4 % apart. The paper normalises
    the input by batch norm; in a causal stack that uses running statistics (`RealBatchNorm`), and layer norm is an
    alternative. Dropout drops the same units at all positions of a sentence, since the paper has one gate a sentence.
    """

    def __init__(self, d_model: int, experts: int, *, hidden: int, norm: str, dropout: float) -> None:
        super().__init__()
        problems = {
            f"norm of the gate is {norm!r}; it must be one of {', '.join(NORMS)}": norm not in NORMS,
            f"gate of {hidden} hidden units with dropout {dropout}; give at least 1, and 0 ≤ p < 1": (
                hidden < 1 or not 0 <= dropout < 1
            ),
        }
        raise_first(ConfigError, problems)
        self.batch_norm = RealBatchNorm(d_model) if norm == "batch" else None
        self.layer_norm = nn.LayerNorm(d_model) if norm == "layer" else None
        self.inner, self.outer = nn.Linear(d_model, hidden), nn.Linear(hidden, experts)
        self.dropout = dropout
        with torch.no_grad():
            nn.init.xavier_uniform_(self.inner.weight)
            for fixed in (self.inner.bias, self.outer.weight, self.outer.bias):
                fixed.zero_()

    def forward(self, x: Tensor, real: Tensor, *, learning: bool, causal: bool = False) -> Tensor:
        """Log responsibilities [b p e] of means x [b p d]; `learning`: with dropout and the batch's own statistics."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.outer.weight.dtype)
            if self.batch_norm is not None:
                x = self.batch_norm(x, real, learning=learning, causal=causal)
            elif self.layer_norm is not None:
                x = self.layer_norm(x)
            inner = torch.tanh(self.inner(x))
            if learning and self.dropout:
                inner = inner * nn.functional.dropout(torch.ones_like(inner[:, :1]), self.dropout)
            return torch.log_softmax(self.outer(inner), dim=-1)


MAX_EXPERTS = 4096  # experts of one module
HIDDEN = 256  # units of a gate at a width of 512 and more
TIE = {torch.float64: 1e-12}  # log responsibilities that differ by less are tied; other dtypes: 1e-6
Mode = Literal["soft", "sampled", "argmax", "random"] | int
"""How a mixture is computed: "soft" by responsibilities, else by one expert, see `Experts.choose`."""


def count_experts(heads: int, size: int) -> int:
    """The number of sets of `size` heads; ConfigError for sets of all heads or none, and for too many sets."""
    if not 1 <= size < heads:
        raise ConfigError(
            f"experts of {size} heads in a layer of {heads}; choose from 1 to {heads - 1}"
            if heads > 1
            else f"a layer of {heads} head has no experts; mixtures need at least 2 heads"
        )
    if comb(heads, size) > MAX_EXPERTS:
        raise ConfigError(f"{heads} heads have {comb(heads, size)} experts of {size}; the most is {MAX_EXPERTS}")
    return comb(heads, size)


@lru_cache(maxsize=32)
def membership(
    heads: int, size: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Membership of heads in experts [e h], 0 or 1: every set of `size` heads, the set without head 0 first.

    For size = heads - 1, expert i is the one that lacks head i (Peng et al. 2020, §2). Errors: `count_experts`.
    """
    with torch.inference_mode(False):  # the cached tensor may be used in training next
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

    The gate reads the mean of the module's query-side inputs: in an encoder over the whole sentence; in a causal stack,
    cross attention included, over positions up to each one (`window`: only the last ones), because the paper's mean
    over the whole target would look ahead. `norm`, `hidden` and `dropout` are the gate's (`hidden` 0: 256 units, as
    published for a width of 512, or half the width if that is less). With `uniform` there is no gate, and all experts
    are equally responsible (Uni-MAE). A layer with fewer than two heads has nothing to mix.
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
        self.foldable = self.gate is None  # evenly mixed experts are plain attention

    def forward(self, context: Tensor, queries: Queries) -> Tensor:
        return scale_context(context, self.factors(queries) if self.experts else None)

    def factors(self, queries: Queries) -> Tensor | None:
        """Factors of heads [b p h]. Returns None if all are 1."""
        if self.mode == "soft":
            if self.gate is None:
                return None
            return head_factors(self.log_gates(queries).exp(), heads=self.heads, size=self.size)
        with torch.no_grad():
            experts = self.choose(queries)  # [b p]
        members = membership(self.heads, self.size, device=experts.device, dtype=queries.states.dtype)
        return members[experts] * (self.heads / self.size)

    def choose(self, queries: Queries) -> Tensor:
        """One expert for each position with a gate of its own [b p], by `mode`.

        "sampled": drawn by responsibility, with one noise vector for each sentence and module, so that the choice
        changes only where the gate does (Gumbel-max; the paper draws once a sentence, which would leak later positions
        in a causal stack). "random": drawn uniformly, one for each sentence. "argmax": the most responsible; of tied
        ones one is drawn uniformly for each sentence. A number: that expert.
        """
        states = queries.states
        if isinstance(self.mode, int):
            return torch.full((len(states), 1), self.mode, device=states.device)
        if self.mode == "random" or self.gate is None:
            return torch.randint(self.experts, (len(states), 1), device=states.device)
        log_gates = self.log_gates(queries)
        if self.mode == "argmax":
            order = torch.rand(len(states), 1, self.experts, device=states.device)
            return order.masked_fill(~most_responsible(log_gates), -1.0).argmax(dim=-1)
        noise = torch.empty(len(states), 1, self.experts, device=states.device).exponential_().log()
        return (log_gates - noise).argmax(dim=-1)

    def log_gates(self, queries: Queries) -> Tensor:
        """Log responsibilities [b p e]; dropout and batch statistics of training apply in soft mode only."""
        assert self.gate is not None
        means, real = masked_mean(queries, window=self.window)
        learning = self.training and self.mode == "soft"
        return self.gate(means, real, learning=learning, causal=queries.causal)

    def fold(self, w_o: Tensor) -> Tensor:
        return w_o if self.foldable else super().fold(w_o)


def scale_context(context: Tensor, factors: Tensor | None) -> Tensor:
    """Contexts [b h t k] of heads times their factors [b p h], p = t or 1; None: all factors are 1."""
    return context if factors is None else context * factors.transpose(1, 2)[..., None].to(context.dtype)


def most_responsible(log_gates: Tensor) -> Tensor:
    """A mask [b p e] of the most responsible experts by log responsibilities [b p e]: several where they tie."""
    return log_gates >= log_gates.amax(dim=-1, keepdim=True) - TIE.get(log_gates.dtype, 1e-6)


def experts_of(model: nn.Module) -> list[Experts]:
    """The mixtures of a model that have experts."""
    return [cast(Experts, module) for module in model.modules() if isinstance(module, Mixing) and module.experts]


@contextmanager
def expert_mode(modules: Iterable[Experts], mode: Mode) -> Iterator[None]:
    """Within the block these mixtures compute in another mode."""
    before = [(module, module.mode) for module in modules]
    try:
        for module, _ in before:
            module.mode = mode
        yield
    finally:
        for module, mode_before in before:
            module.mode = mode_before


@contextmanager
def one_expert(model: nn.Module, choice: str | None, *, seed: int) -> Iterator[None]:
    """Within the block every mixture of a model uses a single expert; None: the mixture is unchanged.

    `choice` is "top", the most responsible expert; "random", one drawn for each module by the seed, the same for all
    sentences (Peng et al. 2020, §5.1); or the number of an expert. ConfigError for models without experts, for "top" if
    a mixture has no gate, and for a number that a layer does not have.
    """
    if choice is None:
        yield
        return
    mixtures = experts_of(model)
    if not mixtures:
        raise ConfigError(f"{flag.expert} {choice}: the model mixes no experts; leave it out")
    modes = _modes(mixtures, choice, torch.Generator().manual_seed(seed))
    drawn_on = [part.device for part in model.parameters() if part.device.type == "cuda"][:1]
    with ExitStack() as stack:
        for mixture, mode in zip(mixtures, modes, strict=True):
            stack.enter_context(expert_mode([mixture], mode))
        stack.enter_context(torch.random.fork_rng(devices=drawn_on))
        torch.manual_seed(seed)  # among equally responsible experts one is drawn
        yield


def _modes(mixtures: Sequence[Experts], choice: str, generator: torch.Generator) -> list[Mode]:
    if choice == "top":
        if any(mixture.gate is None for mixture in mixtures):
            raise ConfigError(f"{flag.expert} top: the experts of this model have no gates; choose random or a number")
        return ["argmax"] * len(mixtures)
    if choice == "random":
        return [int(torch.randint(mixture.experts, (1,), generator=generator)) for mixture in mixtures]
    fewest = min(mixture.experts for mixture in mixtures)
    if not choice.isdecimal() or int(choice) >= fewest:
        raise ConfigError(f"{flag.expert} {choice!r} is not known; take top, random or one of 0 to {fewest - 1}")
    return [int(choice)] * len(mixtures)
