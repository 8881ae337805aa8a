"""The contract of a mixing variant, and the registry that finds it by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from headscope.errors import ConfigError, restate
from headscope.heads import Site
from headscope.registry import Registry


@dataclass(frozen=True)
class Queries:
    """What a mixing may look at beside the contexts: the query side of its attention module.

    `states` [b t d] are the inputs of the query projection, `real` [b t] says which are no padding (None:
    all of them). `causal`: position t must not see what comes after it. `memory` is kept between the steps
    of incremental decoding (None outside it): tensors with the hypothesis as their first axis.
    """

    states: Tensor
    real: Tensor | None = None
    causal: bool = False
    memory: dict[str, Tensor] | None = None


class Mixing(nn.Module, ABC):
    """Maps contexts [b h t k] to contexts; one instance per attention module.

    `identity_at_start`: a fresh instance changes nothing. `folds_in_training`: `fold` is always the same as
    `forward`, with gradients; training then mixes the output projection, which is smaller than the contexts.
    What analyses, swaps and removals need to know they ask the mixing: `foldable`, `matrix`, `gates`, `gate_logits` and
    `experts`, which all answer "no" here. `summary` completes "…, every module has" for `headscope show`.
    """

    identity_at_start: ClassVar[bool] = True
    folds_in_training: ClassVar[bool] = False
    summary: ClassVar[str] = "a mixing of its heads"
    experts: int = 0
    """Number of experts, sets of heads, that a gate mixes (see `headscope.model.mixing.experts`)."""

    def __init__(self, *, heads: int, d_value: int, d_model: int) -> None:
        super().__init__()
        self.heads, self.d_value, self.d_model = heads, d_value, d_model

    @abstractmethod
    def forward(self, context: Tensor, queries: Queries) -> Tensor:
        """Contexts [b h t k] after mixing."""

    @property
    def foldable(self) -> bool:
        """Whether the mixing is linear in the contexts and fixed; else it depends on the input."""
        return False

    def fold(self, w_o: Tensor) -> Tensor:
        """Output weights [d h·k] that do the mixing too, where it is `foldable`."""
        raise NotImplementedError(f"{type(self).__name__} is not foldable")

    @property
    def matrix(self) -> Tensor | None:
        """The parameter [h h] that mixes heads linearly, row i for the new head i."""
        return None

    def gates(self) -> Tensor | None:
        """Fixed factors of heads [h]."""
        return None

    def gate_logits(self) -> Tensor | None:
        """Parameters log α [h] of hard concrete gates, whose values at test time are `gates`."""
        return None


def mixings_of(model: nn.Module) -> Iterator[tuple[Site, int, Mixing]]:
    """(site, layer, mixing) of every attention module that mixes heads; nothing for transformers' models."""
    for site, layer, _, module in getattr(model, "attention_modules", tuple)():
        if module.mixing is not None and module.heads:
            yield site, layer, module.mixing


def head_matrices(model: nn.Module) -> dict[tuple[Site, int], Tensor]:
    """The matrix [h h] of every (site, layer) whose heads one mixes."""
    return {(site, layer): mixing.matrix for site, layer, mixing in mixings_of(model) if mixing.matrix is not None}


M = TypeVar("M", bound=type[Mixing])
MIXINGS: Registry[type[Mixing]] = Registry("mixing", package="headscope.model.mixing", group="headscope.mixings")


def mixing(name: str) -> Callable[[M], M]:
    """Register a `Mixing` class under a name with its version, such as "alpha.v1"."""

    def wrap(cls: M) -> M:
        MIXINGS.register(name, cls, where=cls.__module__)
        return cls

    return wrap


def mixing_name(module: Mixing) -> str:
    """The name that a module's class is registered by."""
    return next((name for name, cls in MIXINGS if cls is type(module)), type(module).__name__)


def build_mixing(
    name: str, *, heads: int, d_value: int, d_model: int, options: Mapping[str, str | int | float | bool]
) -> Mixing:
    """A fresh mixing; ConfigError for a name or an option that does not exist."""
    cls = MIXINGS.get(name)
    with restate(ConfigError, f"mixing {name!r} does not take these options: {{why}}", TypeError):
        return cls(heads=heads, d_value=d_value, d_model=d_model, **options)
