"""Training variants, whose hooks change the model and its training; several can be combined (`mixing+swap`).

This file and the files in `headscope.training.variants` are imported to write `headscope train --help`, so
they import torch inside functions or under TYPE_CHECKING only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, make_dataclass
from functools import cache, partial, wraps
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from headscope.config import NoOptions
from headscope.errors import ConfigError
from headscope.heads import SITES, Site
from headscope.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.data.encoded import Batch
    from headscope.model.native.transformer import Transformer
    from headscope.model.native.transformer_config import TransformerConfig
    from headscope.training.config import TrainConfig, TrainingPosition
    from headscope.training.losses import Sums
    from headscope.training.run_state import TrainingRun

Gradients: TypeAlias = "Callable[[Sequence[Batch]], Sums]"
"""A function that runs forward and backward for each micro-batch, such as `TrainingRun.gradients`."""


class Variant:
    """One way of training; every run has its own instance. Every method has a default that changes nothing.

    Order of calls: `check` → `shape` → the model is built (and filled from `--init`) → `adapt` → `groups` → the
    optimizer is built → `prepare` → (on resume: `load_state_dict`) → per epoch: `before_epoch`;
    per update: `before_update`, `step`, the optimizer's step, `after_update`; then validation, then the
    checkpoint, then `after_epoch`, then the state for resuming. A state may also be saved after any
    `after_update`: training goes on from there with the next `before_update`, and `before_epoch` is not
    called again. Several processes run the same hooks, and must do the same to the model.

    Several variants can train one model (`VariantChain`), so a hook should change nothing that another variant may set.
    `decides` names what only one variant of a run can decide, in words that end "both decide …". `state` names the
    attributes that are saved for resuming: plain values, tensors, optimizer and generator states.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions
    decides: ClassVar[tuple[str, ...]] = ()
    state: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: Any) -> None:
        self.options = options

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError where the shared options lack something; called before anything is read."""

    def shape(self, config: TransformerConfig) -> TransformerConfig:
        """The architecture to train, from the one that the shared options (or `--init`) give."""
        return config

    def adapt(self, model: Transformer, *, fresh: bool) -> None:
        """Change the model after it is built and before the optimizer is; `fresh`: it is not from `--init`."""

    def groups(self, model: Transformer) -> list[dict[str, Any]]:
        """The parameter groups of the main optimizer; by default one with all parameters.

        A group is {"params": [...], "scale": factor of the learning rate, "weight_decay": instead of the run's}. The
        loop does not touch parameters in no group: freeze them in `prepare` with requires_grad_, or train them with an
        optimizer of the variant.
        """
        return [{"params": list(model.parameters())}]

    def prepare(self, run: TrainingRun) -> None:
        """Called first after model, optimizer and data exist; on resume too, before `load_state_dict`."""

    def before_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        """Called before the first update of an epoch."""

    def after_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        """Called after validation and checkpoint of an epoch; `position.epoch` has just ended."""

    def before_update(self, run: TrainingRun, position: TrainingPosition) -> None:
        """Called before the gradients of an update; `position.update` updates are done."""

    def after_update(self, run: TrainingRun, position: TrainingPosition) -> None:
        """Called after the optimizer's step; `position.update` includes it."""

    def step(self, run: TrainingRun, batches: Sequence[Batch], gradients: Gradients) -> Sums:
        """Leave the gradients of one update in the parameters; the loop clips them and steps the optimizer.

        `batches` are this process's micro-batches. `gradients(batches)` runs forward and backward for each, sums over
        processes and divides by all target tokens (`TrainingRun.gradients`; in a chain, the next variant's step). A
        variant may call it several times (MAE: G step, own optimizer, `run.model.zero_grad()`, F step). Returns the
        sums to log.
        """
        return gradients(batches)

    def extra_loss(self, run: TrainingRun, batch: Batch) -> Tensor | None:
        """A loss to add to the criterion of a micro-batch, which is a sum over its `batch.predictions` labels.

        A loss per token must therefore be multiplied by `batch.predictions`; gradients are divided by all tokens later.
        Called after the forward pass of every training micro-batch of every process, never in validation.
        """
        return None

    def remarks(self, run: TrainingRun, *, has_ended: bool) -> list[str]:
        """Remarks on parts of the variant that will not happen in the run or, once it `has_ended`, did not."""
        return []

    def history(self, run: TrainingRun) -> dict[str, float]:
        """The variant's columns of metrics.csv; always the same names (NaN where there is no value yet)."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """The state to save beside the weights: the attributes that `state` names."""
        return {name: getattr(self, name) for name in self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; called after `prepare`."""
        for name, value in state.items():
            setattr(self, name, value)


V = TypeVar("V", bound=type[Variant])
VARIANTS: Registry[type[Variant]] = Registry(
    "variant", package="headscope.training.variants", group="headscope.variants"
)


def variant(cls: V) -> V:
    """Register a `Variant` class under its `name`."""
    VARIANTS.register(cls.name, cls, where=cls.__module__)
    return cls


T = TypeVar("T")


def per_site(option: str, values: Sequence[T]) -> dict[Site, T]:
    """Values of an option by site: one for all, or one each for encoder-self, decoder-self and cross.

    ConfigError for another number of values.
    """
    if len(values) == 1:
        return dict.fromkeys(SITES, values[0])
    if len(values) != len(SITES):
        raise ConfigError(
            f"{option} has {len(values)} values; give one for all sites, or three for {', '.join(map(str, SITES))}"
        )
    return dict(zip(SITES, values, strict=True))


def _call_each(hook: str) -> Any:
    """A method of a chain that calls the hook of that name of every part."""

    @wraps(getattr(Variant, hook))
    def call(chain: VariantChain, *arguments: Any, **options: Any) -> None:
        for part in chain.parts:
            getattr(part, hook)(*arguments, **options)

    return call


class VariantChain(Variant):
    """Variants whose hooks are called one after another, in the order of `parts`.

    Losses are added, steps nested (the first part's is the outermost), parameter groups intersected, and states
    saved under the names of the parts.
    """

    def __init__(self, parts: Sequence[Variant], *, options: Any) -> None:
        super().__init__(options)
        self.parts = tuple(parts)

    def shape(self, config: TransformerConfig) -> TransformerConfig:
        for part in self.parts:
            config = part.shape(config)
        return config

    def groups(self, model: Transformer) -> list[dict[str, Any]]:
        """The parameters that all parts give to the main optimizer, in groups with the settings of all."""
        groups = super().groups(model)
        for part in self.parts:
            common_groups = []
            for group, other in product(groups, part.groups(model)):
                shared = set(map(id, other["params"]))
                parameters = [parameter for parameter in group["params"] if id(parameter) in shared]
                common_groups.append({**group, **other, "params": parameters})
            groups = [group for group in common_groups if group["params"]] or common_groups[:1]
        return groups

    check, adapt, prepare = _call_each("check"), _call_each("adapt"), _call_each("prepare")
    before_epoch, after_epoch = _call_each("before_epoch"), _call_each("after_epoch")
    before_update, after_update = _call_each("before_update"), _call_each("after_update")

    def step(self, run: TrainingRun, batches: Sequence[Batch], gradients: Gradients) -> Sums:
        for part in reversed(self.parts):
            gradients = partial(part.step, run, gradients=gradients)
        return gradients(batches)

    def extra_loss(self, run: TrainingRun, batch: Batch) -> Tensor | None:
        losses = [loss for part in self.parts if (loss := part.extra_loss(run, batch)) is not None]
        return sum(losses[1:], start=losses[0]) if losses else None

    def remarks(self, run: TrainingRun, *, has_ended: bool) -> list[str]:
        return [text for part in self.parts for text in part.remarks(run, has_ended=has_ended)]

    def history(self, run: TrainingRun) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.history(run).items()}

    def state_dict(self) -> Mapping[str, Any]:
        return {part.name: dict(part.state_dict()) for part in self.parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part in self.parts:
            part.load_state_dict(state[part.name])


def find_variant(name: str) -> type[Variant]:
    """The variant called `name`; several joined by "+" give their chain, which is named in alphabetical order.

    ConfigError for a name that no variant has, and variants that cannot train together.
    """
    classes = sorted((VARIANTS.get(part.strip()) for part in name.split("+")), key=lambda cls: cls.name)
    if problem := why_not_together(classes):
        raise ConfigError(f"variant {name!r}: {problem}")
    return classes[0] if len(classes) == 1 else combine(tuple(classes))


def why_not_together(classes: Sequence[type[Variant]]) -> str | None:
    """The reason why these variants cannot train one model together, None if they can."""
    for first, second in combinations(classes, 2):
        if first is second:
            return f"{first.name} stands twice; name each variant once"
        if shared := [decision for decision in first.decides if decision in second.decides]:
            return f"{first.name} and {second.name} both decide {shared[0]}; take one of them"
        defaults = [{entry.name: repr(entry.default) for entry in fields(cls.Options)} for cls in (first, second)]
        if clashes := [name for name in defaults[0].keys() & defaults[1] if defaults[0][name] != defaults[1][name]]:
            name = clashes[0].replace("_", "-")
            return f"{first.name} and {second.name} have options --{name} of their own; take one of them"
    names = [cls.name for cls in classes]
    if "baseline" in names and (other_names := "+".join(name for name in names if name != "baseline")):
        return f"baseline cannot be combined, because it is training without any variant; take {other_names}"
    return None


@cache
def combine(classes: tuple[type[Variant], ...]) -> type[VariantChain]:
    """The chain of several variants as a class, with the options of all; options of the same name are one option."""

    def check(options: Any) -> None:
        for cls in classes:
            options_of(cls, options)

    def initialise(chain: VariantChain, options: Any) -> None:
        VariantChain.__init__(chain, [cls(options_of(cls, options)) for cls in classes], options=options)

    names = "+".join(cls.name for cls in classes)
    bases = [cls.Options for cls in reversed(classes) if cls.Options is not NoOptions]  # fields of the last come first
    namespace = {"__post_init__": check, "__doc__": f"Options of {names}."}
    descriptions = [f"{cls.name}: {inspect.getdoc(cls) or cls.summary}" for cls in classes]
    attributes = {
        "__init__": initialise,
        "__doc__": "\n\n".join(["An option that several of them have is given once, for all.", *descriptions]),
        "name": names,
        "summary": " ".join(cls.summary for cls in classes),
        "Options": make_dataclass("Options", [], bases=tuple(bases) or (NoOptions,), namespace=namespace, frozen=True),
    }
    return type("Composed", (VariantChain,), attributes)


def options_of(cls: type[Variant], options: Any) -> Any:
    """The options of one variant, taken from those of a chain."""
    return cls.Options(**{option.name: getattr(options, option.name) for option in fields(cls.Options)})
