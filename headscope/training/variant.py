"""Training variants: what each changes of the model, what it does during training, and several at once (`mixing+swap`).

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
"""One forward and backward for each of some micro-batches; what `TrainingRun.gradients` does."""


class Variant:
    """One way of training; a fresh instance per run. Every method has a default that changes nothing.

    Order of calls: `check` → `shape` → the model is built (and filled from `--init`) → `adapt` → `groups` → the
    optimizer is built → `prepare` → (on resume: `load_state_dict`) → per epoch: `before_epoch`;
    per update: `before_update`, `step`, the optimizer's step, `after_update`; then validation, then the
    checkpoint, then `after_epoch`, then the state for resuming. A state may also be saved after any
    `after_update`: training goes on from there with the next `before_update`, and `before_epoch` is not
    called again. Several processes run the same hooks, and must do the same to the model.

    Several variants can train one model (`headscope.training.variant`): hooks should change what is theirs and
    leave the rest. `decides` names what only one variant of a run can decide, in words that end "both decide …".
    `state` names the attributes that are saved for resuming: plain values, tensors, optimizer and generator states.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions
    decides: ClassVar[tuple[str, ...]] = ()
    state: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: Any) -> None:
        self.options = options

    def check(self, config: TrainConfig) -> None:
        """Before anything is read: ConfigError where the shared options lack what it needs."""

    def shape(self, config: TransformerConfig) -> TransformerConfig:
        """The architecture to train, made from what the shared options (or `--init`) say."""
        return config

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

    def before_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        """Before the first update of an epoch."""

    def after_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        """Called after validation and checkpoint of an epoch; `position.epoch` has just ended."""

    def before_update(self, run: TrainingRun, position: TrainingPosition) -> None:
        """Before the gradients of an update; `position.update` updates are done."""

    def after_update(self, run: TrainingRun, position: TrainingPosition) -> None:
        """After the optimizer's step; `position.update` includes it."""

    def step(self, run: TrainingRun, batches: Sequence[Batch], gradients: Gradients) -> Sums:
        """Leave the gradients of one update in the parameters; the engine clips them and steps the optimizer.

        `batches` are this process's micro-batches. `gradients(batches)` does one forward and backward for each,
        sums over processes and divides by all target tokens (`TrainingRun.gradients`; among several variants the next
        one's step); a variant may call it several times (MAE: G step, own optimizer, `run.model.zero_grad()`,
        F step) and returns the sums that are to be logged.
        """
        return gradients(batches)

    def extra_loss(self, run: TrainingRun, batch: Batch) -> Tensor | None:
        """Added to the criterion of a micro-batch, which is a sum over its `batch.predictions` labels.

        Called after the forward of every training micro-batch (never in validation) of every process; so what
        is meant per token is multiplied by `batch.predictions`. Gradients are divided by all tokens later.
        """
        return None

    def remarks(self, run: TrainingRun, *, has_ended: bool) -> list[str]:
        """Remarks on parts of the variant that did not happen in a run, or, before it, will not."""
        return []

    def history(self, run: TrainingRun) -> dict[str, float]:
        """Further columns of metrics.csv; always the same names (NaN where there is no value yet)."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """State beside the weights that survives a restart: the attributes that `state` names."""
        return {name: getattr(self, name) for name in self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`, after `prepare`."""
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

    ConfigError for another number of values, which names the option.
    """
    if len(values) == 1:
        return dict.fromkeys(SITES, values[0])
    if len(values) != len(SITES):
        raise ConfigError(
            f"{option} has {len(values)} values; give one for all sites, or three for {', '.join(map(str, SITES))}"
        )
    return dict(zip(SITES, values, strict=True))


def _of_each(hook: str) -> Any:
    """The hook of a chain that calls this hook of every part."""

    @wraps(getattr(Variant, hook))
    def call(chain: VariantChain, *arguments: Any, **options: Any) -> None:
        for part in chain.parts:
            getattr(part, hook)(*arguments, **options)

    return call


class VariantChain(Variant):
    """Variants whose hooks are called one after another, in the order of `parts`.

    Losses are added, steps nested (the first part's is the outermost), parameter groups intersected, and states
    kept by the names of the parts.
    """

    def __init__(self, parts: Sequence[Variant], *, options: Any) -> None:
        super().__init__(options)
        self.parts = tuple(parts)

    def shape(self, config: TransformerConfig) -> TransformerConfig:
        for part in self.parts:
            config = part.shape(config)
        return config

    def groups(self, model: Transformer) -> list[dict[str, Any]]:
        """Parameter groups that all parts leave to the main optimizer, with the settings of all."""
        groups = super().groups(model)
        for part in self.parts:
            common_groups = []
            for group, other in product(groups, part.groups(model)):
                shared = set(map(id, other["params"]))
                parameters = [parameter for parameter in group["params"] if id(parameter) in shared]
                common_groups.append({**group, **other, "params": parameters})
            groups = [group for group in common_groups if group["params"]] or common_groups[:1]
        return groups

    check, adapt, prepare = _of_each("check"), _of_each("adapt"), _of_each("prepare")
    before_epoch, after_epoch = _of_each("before_epoch"), _of_each("after_epoch")
    before_update, after_update = _of_each("before_update"), _of_each("after_update")

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
    """The variant called `name`, or several joined by "+", in any order; their run is named in alphabetical order.

    ConfigError for a name that no variant has, and variants that cannot train together.
    """
    classes = sorted((VARIANTS.get(part.strip()) for part in name.split("+")), key=lambda cls: cls.name)
    if problem := why_not_together(classes):
        raise ConfigError(f"variant {name!r}: {problem}")
    return classes[0] if len(classes) == 1 else combine(tuple(classes))


def why_not_together(classes: Sequence[type[Variant]]) -> str | None:
    """The reason that these variants cannot train one model. Returns None if they can."""
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
    """A variant made of several, with the options of all; an option that several have is one, for all of them."""

    def check(options: Any) -> None:
        for cls in classes:
            options_of(cls, options)

    def begin(chain: VariantChain, options: Any) -> None:
        VariantChain.__init__(chain, [cls(options_of(cls, options)) for cls in classes], options=options)

    names = "+".join(cls.name for cls in classes)
    bases = [cls.Options for cls in reversed(classes) if cls.Options is not NoOptions]  # fields of the last come first
    texts = {"__post_init__": check, "__doc__": f"Options of {names}."}
    about = [f"{cls.name}: {inspect.getdoc(cls) or cls.summary}" for cls in classes]
    attributes = {
        "__init__": begin,
        "__doc__": "\n\n".join(["An option that several of them have is given once, for all.", *about]),
        "name": names,
        "summary": " ".join(cls.summary for cls in classes),
        "Options": make_dataclass("Options", [], bases=tuple(bases) or (NoOptions,), namespace=texts, frozen=True),
    }
    return type("Composed", (VariantChain,), attributes)


def options_of(cls: type[Variant], options: Any) -> Any:
    """The options of one variant among several variants' options."""
    return cls.Options(**{option.name: getattr(options, option.name) for option in fields(cls.Options)})
