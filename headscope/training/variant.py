"""The contract of a training variant: what it changes of the model, and what it does during training.

This file and the files in `headscope.training.variants` are imported to write `headscope train --help`, so
they import torch inside functions or under TYPE_CHECKING only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from headscope.config import NoOptions
from headscope.errors import ConfigError
from headscope.heads import SITES, Site
from headscope.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.model.native.transformer import Transformer
    from headscope.model.native.transformer_config import TransformerConfig
    from headscope.training.data.batches import TrainingBatch
    from headscope.training.losses import Sums
    from headscope.training.position import TrainingPosition
    from headscope.training.run_state import TrainingRun

Gradients: TypeAlias = "Callable[[Sequence[TrainingBatch]], Sums]"
"""One forward and backward for each of some micro-batches; what `TrainingRun.gradients` does."""


class Variant:
    """One way of training; a fresh instance per run. Every method has a default that changes nothing.

    Order of calls: `shape` → the model is built (and filled from `--init`) → `adapt` → `groups` → the
    optimizer is built → `prepare` → (on resume: `load_state_dict`, `resumed`) → per epoch: `before_epoch`;
    per update: `before_update`, `step`, the optimizer's step, `after_update`; then validation, then the
    checkpoint, then `after_epoch`, then the state for resuming. A state may also be saved after any
    `after_update`: training goes on from there with the next `before_update`, and `before_epoch` is not
    called again. Several processes run the same hooks, and must do the same to the model.

    Several variants can train one model (`headscope.training.composed`): hooks should change what is theirs and
    leave the rest. `decides` names what only one variant of a run can decide, in words that end "both decide …";
    `alone` says why a variant cannot be combined at all.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions
    uses_all: ClassVar[bool] = False  # every forward uses every parameter, which several processes profit from
    decides: ClassVar[tuple[str, ...]] = ()
    alone: ClassVar[str | None] = None

    def __init__(self, options: Any) -> None:
        self.options = options

    def shape(self, config: TransformerConfig) -> TransformerConfig:
        """The architecture to train, made from what the shared options (or `--init`) say."""
        return config

    def may_lack(self, key: str) -> bool:
        """Whether a weight (by its key in the state dict) may start fresh where `--init` does not have it."""
        return ".mixing." in key

    def adapt(self, model: Transformer, *, fresh: bool) -> None:
        """Change the model after it is built, before the optimizer is; `fresh`: not from `--init`."""

    def groups(self, model: Transformer) -> list[dict[str, Any]]:
        """Parameter groups of the main optimizer: {"params": [...], "scale": factor of the learning rate,
        "weight_decay": instead of the run's}. Default: all parameters. What is in no group is not touched by
        the engine (freeze it in `prepare` with requires_grad_, or train it with an own optimizer).
        """
        return [{"params": list(model.parameters())}]

    def prepare(self, run: TrainingRun) -> None:
        """After model, optimizer and data exist, before anything else; also on resume, before `load_state_dict`."""

    def resumed(self, run: TrainingRun) -> None:
        """After model, optimizer and the variant have their saved state."""

    def before_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        """Before the first update of an epoch."""

    def after_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        """After validation and checkpoint of an epoch; `position.epoch` is the one that ended."""

    def before_update(self, run: TrainingRun, position: TrainingPosition) -> None:
        """Before the gradients of an update; `position.update` updates are done."""

    def after_update(self, run: TrainingRun, position: TrainingPosition) -> None:
        """After the optimizer's step; `position.update` includes it."""

    def step(self, run: TrainingRun, batches: Sequence[TrainingBatch], gradients: Gradients) -> Sums:
        """Leave the gradients of one update in the parameters; the engine clips them and steps the optimizer.

        `batches` are this process's micro-batches. `gradients(batches)` does one forward and backward for each,
        sums over processes and divides by all target tokens (`TrainingRun.gradients`; among several variants the next
        one's step); a variant may call it several times (MAE: G step, own optimizer, `run.clear_gradients()`,
        F step) and returns the sums that are to be logged.
        """
        return gradients(batches)

    def extra_loss(self, run: TrainingRun, batch: TrainingBatch) -> Tensor | None:
        """Added to the criterion of a micro-batch, which is a sum over its `batch.tokens` target tokens.

        Called after the forward of every training micro-batch (never in validation) of every process; so what
        is meant per token is multiplied by `batch.tokens`. Gradients are divided by all tokens later.
        """
        return None

    def remedies(self) -> list[str]:
        """Which of its options may help where the loss is no number, such as "a lower --gamma"."""
        return []

    def remarks(self, run: TrainingRun, *, ended: bool) -> list[str]:
        """What of it did not happen in a run that has `ended`; before that, what will not happen as options stand."""
        return []

    def history(self, run: TrainingRun) -> dict[str, float]:
        """Further columns of metrics.csv; always the same names (NaN where there is no value yet)."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """What must survive a restart and is no weight: plain values, tensors, optimizer and generator states."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`, after `prepare`."""


V = TypeVar("V", bound=type[Variant])
VARIANTS: Registry[type[Variant]] = Registry(
    "variant", package="headscope.training.variants", group="headscope.variants"
)


def variant(cls: V) -> V:
    """Register a `Variant` class under its `name`."""
    VARIANTS.register(cls.name, cls, where=cls.__module__)
    return cls


T = TypeVar("T")


def per_site(flag: str, values: Sequence[T]) -> dict[Site, T]:
    """Values of an option by site: one for all, or one each for encoder-self, decoder-self and cross.

    ConfigError for another number of values, which names the option.
    """
    if len(values) == 1:
        return dict.fromkeys(SITES, values[0])
    if len(values) != len(SITES):
        raise ConfigError(
            f"{flag} has {len(values)} values; give one for all sites, or three for {', '.join(map(str, SITES))}"
        )
    return dict(zip(SITES, values, strict=True))
