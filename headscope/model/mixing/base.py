"""The contract of a mixing variant, the registry that finds it by name, and linear ones: a matrix, or a factor a head.

The matrix is alpha of Azov & Landau's "Multi-Head Rotation"; the factors are gates of story-of-heads checkpoints
(`gate/log_a`, `alive_heads`). As mixings they are part of the model (saved, folded, read by analyses), unlike the
temporary gates of `headscope.model.taps`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError, restate
from headscope.heads import Site, SiteLayer
from headscope.registry import Registry


@dataclass(frozen=True)
class Queries:
    """Inputs of a mixing beside the contexts: the query side of its attention module.

    `states` [b t d] are the inputs of the query projection, `real` [b t] marks those that are not padding (None: all).
    `causal`: position t must not depend on later ones. `memory` holds tensors between the steps of incremental
    decoding, with the hypothesis as their first axis; None outside of it.
    """

    states: Tensor
    real: Tensor | None = None
    causal: bool = False
    memory: dict[str, Tensor] | None = None


class Mixing(nn.Module, ABC):
    """Maps contexts [b h t k] to contexts; one instance per attention module.

    `identity_at_start`: a fresh instance changes nothing. `folds_in_training`: `fold` is equivalent to `forward`, also
    in gradients, so that training can mix the output projection, which is smaller than the contexts. `foldable`,
    `matrix`, `gates`, `log_a` and `experts` tell analyses, swaps and removals the kind of mixing; by default it has
    none of them. `summary` completes "every module has …" for `headscope show`.
    """

    name: ClassVar[str]
    identity_at_start: ClassVar[bool] = True
    folds_in_training: ClassVar[bool] = False
    summary: ClassVar[str] = "a mixing of its heads"
    experts: int = 0
    """Number of experts, sets of heads, that a gate mixes (see `headscope.model.mixing.experts`)."""
    foldable: bool = False
    """Whether the mixing is a fixed linear map of the contexts, independent of the input."""
    log_a: nn.Parameter | None
    """Parameters log α [h] of hard concrete gates, whose values at test time are `gates`."""

    def __init__(self, *, heads: int, d_value: int, d_model: int) -> None:
        super().__init__()
        self.heads, self.d_value, self.d_model = heads, d_value, d_model
        self.log_a = None

    @abstractmethod
    def forward(self, context: Tensor, queries: Queries) -> Tensor:
        """Contexts [b h t k] after mixing."""

    def fold(self, w_o: Tensor) -> Tensor:
        """Output weights [d h·k] that include the mixing, if it is `foldable`."""
        raise NotImplementedError(f"{type(self).__name__} is not foldable")

    @property
    def matrix(self) -> Tensor | None:
        """The parameter [h h] that mixes heads linearly, row i for the new head i."""
        return None

    def gates(self) -> Tensor | None:
        """Fixed factors of heads [h]."""
        return None


def mixings_of(model: nn.Module) -> Iterator[tuple[Site, int, Mixing]]:
    """(site, layer, mixing) of every attention module that mixes heads; nothing for transformers' models."""
    for site, layer, _, module in getattr(model, "attention_modules", tuple)():
        if module.mixing is not None and module.heads:
            yield site, layer, module.mixing


def head_matrices(model: nn.Module) -> dict[SiteLayer, Tensor]:
    """The matrix [h h] of every (site, layer) whose heads are mixed by one."""
    return {(site, layer): mixing.matrix for site, layer, mixing in mixings_of(model) if mixing.matrix is not None}


M = TypeVar("M", bound=type[Mixing])
MIXINGS: Registry[type[Mixing]] = Registry("mixing", package="headscope.model.mixing", group="headscope.mixings")


def mixing(name: str) -> Callable[[M], M]:
    """Register a `Mixing` class under a name with its version, such as "alpha.v1"."""

    def wrap(cls: M) -> M:
        cls.name = name
        MIXINGS.register(name, cls, where=cls.__module__)
        return cls

    return wrap


def build_mixing(
    name: str, *, heads: int, d_value: int, d_model: int, options: Mapping[str, str | int | float | bool]
) -> Mixing:
    """A fresh mixing; ConfigError for a name or an option that does not exist."""
    cls = MIXINGS.get(name)
    with restate(ConfigError, f"mixing {name!r} does not take these options: {{why}}", TypeError):
        return cls(heads=heads, d_value=d_value, d_model=d_model, **options)


@mixing("alpha.v1")
class Alpha(Mixing):
    """Z'[i] = Σ_j alpha[i, j] · Z[j] over the heads' contexts Z; alpha [h h] is the identity at the start.

    Nothing constrains alpha: rows need not sum to one and entries may be negative.
    """

    folds_in_training = foldable = True
    summary = "a matrix that mixes its heads linearly"

    def __init__(self, *, heads: int, d_value: int, d_model: int) -> None:
        super().__init__(heads=heads, d_value=d_value, d_model=d_model)
        self.alpha = nn.Parameter(torch.eye(heads))

    def forward(self, context: Tensor, queries: Queries) -> Tensor:
        b, h, t, k = context.shape
        return torch.matmul(self.alpha, context.reshape(b, h, t * k)).view(b, h, t, k)

    @property
    def matrix(self) -> Tensor:
        return self.alpha

    def fold(self, w_o: Tensor) -> Tensor:
        """W_O · (alpha ⊗ I): column block j is Σ_i W_O[:, block i] · alpha[i, j]."""
        blocks = w_o.view(len(w_o), self.heads, self.d_value)  # [d h k]
        return torch.einsum("dik,ij->djk", blocks, self.alpha).reshape(w_o.shape)


LOW, HIGH, TEMPERATURE = -0.1, 1.1, 0.33


def hard_concrete(log_a: Tensor) -> Tensor:
    """Gates [h] of the trained model: sigmoid(log_a), stretched to [-0.1, 1.1] and clipped (Louizos et al. 2018)."""
    return (torch.sigmoid(log_a) * (HIGH - LOW) + LOW).clamp(0, 1)


def open_probability(log_a: Tensor, *, fully: bool = False) -> Tensor:
    """P(gate ≠ 0) in training, at temperature 0.33; with `fully` P(gate = 1)."""
    shift = TEMPERATURE * torch.log(torch.tensor(-LOW / HIGH, dtype=log_a.dtype))
    return torch.sigmoid(log_a + shift if fully else log_a - shift)


class HeadGates(Mixing):
    """Z'[i] = gate[i] · Z[i]."""

    summary = "a gate on each of its heads"
    foldable = True

    @abstractmethod
    def gates(self) -> Tensor:
        """The factors [h]."""

    def forward(self, context: Tensor, queries: Queries) -> Tensor:
        return context * self.gates()[:, None, None]

    def fold(self, w_o: Tensor) -> Tensor:
        """Column block i times gate[i]."""
        return (w_o.view(len(w_o), self.heads, self.d_value) * self.gates()[:, None]).reshape(w_o.shape)


@mixing("hard-concrete.v1")
class HardConcrete(HeadGates):
    """Hard concrete gates without their noise, which belongs to learning them (Voita et al. 2019, §5.1)."""

    identity_at_start = False
    log_a: nn.Parameter

    def __init__(self, *, heads: int, d_value: int, d_model: int) -> None:
        super().__init__(heads=heads, d_value=d_value, d_model=d_model)
        bound = (3 / max(heads, 1)) ** 0.5  # Glorot, as in the original
        self.log_a = nn.Parameter(torch.empty(heads).uniform_(-bound, bound))

    def gates(self) -> Tensor:
        return hard_concrete(self.log_a)


@mixing("alive.v1")
class Alive(HeadGates):
    """Heads switched on or off for good: a fixed 0 or 1 for each."""

    alive: Tensor

    def __init__(self, *, heads: int, d_value: int, d_model: int) -> None:
        super().__init__(heads=heads, d_value=d_value, d_model=d_model)
        self.register_buffer("alive", torch.ones(heads))

    def gates(self) -> Tensor:
        return self.alive
