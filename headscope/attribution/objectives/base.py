"""The contract of an objective, and the registry that finds it by name.

An objective makes one number per sentence of what a model says. Gradient methods differentiate it,
perturbation methods look at how it changes, and both divide by the same counts. It is split into the pass
through the model (`output`) and the verdict (`judge`), so that whoever gets an output in another way, by running
the upper layers only, asks the same question of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from headscope.data.encoded import Batch
from headscope.errors import ConfigError, NumericalError
from headscope.registry import Registry

if TYPE_CHECKING:
    from headscope.formats.base import Checkpoint


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective makes of one batch.

    `values` [b] is differentiable with respect to the output; `counts` [b] says how many predictions it is a sum
    over (1 where it is no sum): a mean over the corpus is Σ values / Σ counts. `aim` is what was asked for, without
    gradient: hand it to the next call to ask the same of an altered model. `vector` [b d] is there for
    objectives that compare vectors. NumericalError where a value is NaN.
    """

    values: Tensor
    counts: Tensor
    aim: Tensor | None = None
    vector: Tensor | None = None

    def __post_init__(self) -> None:
        if bool(self.values.isnan().any()):  # a probability of 0 is a loss of ∞, and no damage
            raise NumericalError("the objective is NaN on some sentences; take a wider --dtype")


class Objective(ABC):
    """One number per sentence. A file in this folder defines one final subclass and registers it.

    `seed` decides about what is drawn (which tokens are hidden), per sentence number: a batch of N sentences
    is N batches of one. `higher_is_better` says which direction harms.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    version: ClassVar[int] = 1
    higher_is_better: ClassVar[bool] = True

    def __init__(self, *, seed: int = 1) -> None:
        self.seed = seed

    @classmethod
    @abstractmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool) -> str | None:
        """Why a checkpoint is none that this objective is for, None where it is one."""

    def alters(self, checkpoint: Checkpoint) -> bool:
        """Whether the model reads another text than the batch's (see `prepared`)."""
        return False

    def prepared(self, checkpoint: Checkpoint, batch: Batch) -> Batch:
        """The batch as the model reads it; the same batch unless `alters`."""
        return batch

    @abstractmethod
    def output(self, checkpoint: Checkpoint, batch: Batch) -> Tensor:
        """What the model says to a prepared batch, in one forward pass with every head through `attend`."""

    @abstractmethod
    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        """The verdict on an output, for a prepared batch; `aim` is that of an earlier outcome, if any."""

    def outcome(self, checkpoint: Checkpoint, batch: Batch, aim: Tensor | None = None) -> ObjectiveOutput:
        """One forward pass over a batch (as the corpus gives it), and the verdict."""
        ready = self.prepared(checkpoint, batch)
        return self.evaluate(checkpoint, self.output(checkpoint, ready), ready, aim)

    def values(self, checkpoint: Checkpoint, batch: Batch, aim: Tensor | None = None) -> Tensor:
        """One number per sentence [b], differentiable under `torch.enable_grad()`."""
        return self.outcome(checkpoint, batch, aim).values

    def damage(self, intact: ObjectiveOutput, altered: ObjectiveOutput) -> Tensor:
        """How much worse `altered` is than `intact` [b]; `altered` was asked with the aim of `intact`."""
        difference = intact.values - altered.values
        return difference if self.higher_is_better else -difference


OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective", package="headscope.attribution.objectives", group="headscope.attribution.objectives"
)


def objective(cls: type[Objective]) -> type[Objective]:
    """Register an objective under its `name`."""
    return OBJECTIVES.register(cls.name, cls, where=cls.__module__)


DEFAULTS = ("loss", "top1", "representation")


def default_objective(checkpoint: Checkpoint, *, has_target: bool) -> str:
    """`loss` where the model predicts words and is told them, `top1` for classes, `representation` elsewhere."""
    return next(name for name in DEFAULTS if OBJECTIVES.get(name).applies(checkpoint, has_target=has_target) is None)


def choose_objective(name: str, checkpoint: Checkpoint, *, has_target: bool) -> str:
    """The objective's name, or the default where `name` is empty.

    ConfigError for an unknown name, and for one that this checkpoint or corpus is not for.
    """
    if not name:
        return default_objective(checkpoint, has_target=has_target)
    why = OBJECTIVES.get(name).applies(checkpoint, has_target=has_target)
    if why is not None:
        fitting = [its for its, cls in OBJECTIVES if cls.applies(checkpoint, has_target=has_target) is None]
        raise ConfigError(f"--objective {name}: {why}; choose {' or '.join(fitting)}")
    return name
