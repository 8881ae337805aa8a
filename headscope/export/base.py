"""Which way a smaller checkpoint is written: as a folder of its format, and as files that engines are proved to run."""

from __future__ import annotations

import copy
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from headscope.config import engines
from headscope.errors import CheckpointError, ConfigError
from headscope.evaluation.model_inputs import InputTexts
from headscope.formats.base import FORMATS, Checkpoint, Export
from headscope.model.attention import is_half
from headscope.model.removal_plan import RemovalPlan
from headscope.registry import Registry, unknown

QUANTITY = "log-probabilities differ by"
HALF, FULL = 5e-2, 1e-4
"""Largest difference as a share of the largest number (or of 1), in half precision and in float32.

In float32 engines sum in another order: 2e-7 to 1.4e-5 was measured on random models, 1.2e-5 on a language model of 30
trained layers, whose largest activations are thousands of times the others.
"""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How weights are stored: `quantize` "none" is as the checkpoint stores them. ConfigError for an unknown one."""

    quantize: str = "none"

    def __post_init__(self) -> None:
        if self.quantize == "none":
            return  # no engine needs to be asked, nor what it is made with imported
        kinds = ["none", *dict.fromkeys(kind for _, engine in ENGINES for kind in engine.quantizations)]
        if self.quantize not in kinds:
            raise ConfigError(unknown("quantization", self.quantize, kinds))


@dataclass(frozen=True, kw_only=True)
class EngineFile:
    """What was written for an engine, and how it was proved.

    `runtime` is the program that ran it, `difference` the largest difference of its outputs, `quantity` says of what,
    `limit` is the tolerance. `sizes` is what the file holds in words. `opens` and `limits` are lines of the card: what
    opens the file, and what does not.
    """

    export: str
    file: str
    runtime: str
    difference: float
    limit: float
    sizes: str
    opens: tuple[str, ...]
    quantity: str = QUANTITY
    limits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def proof(self) -> str:
        """One line: the difference, and who measured it."""
        measurement = f"{self.quantity} {self.difference:.1e} (tolerance {self.limit:.0e})"
        return f"{self.file} ({self.sizes}): {measurement}, run by {self.runtime}"


class EngineExport(ABC):
    """One kind of file for one engine; its docstring says what it can hold, `summary` what it is for `--help`.

    `packages` are imported to write it, `install` is what pip installs for that. `quantizations` are other ways to
    store matrices. `endings` are those of its files. `allocation`: how heads must be spread over layers ("": in any
    way). All are literals, because help reads them without importing the file.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    install: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    quantizations: ClassVar[Mapping[str, str]] = {}
    endings: ClassVar[tuple[str, ...]] = ()
    allocation: ClassVar[str] = ""

    def require(self, options: EngineOptions) -> None:
        """ConfigError naming the extra where a package is not installed, and for a quantization that it has not."""
        if missing := [name for name in self.packages if importlib.util.find_spec(name) is None]:
            raise ConfigError(f'{self.name} needs {", ".join(missing)}; install with pip install "{self.install}"')
        if options.quantize not in ("none", *self.quantizations):
            available = ", ".join(("none", *self.quantizations))
            raise ConfigError(f"--quantize {options.quantize} is not for {self.name}; available: {available}")

    @abstractmethod
    def check(self, checkpoint: Checkpoint) -> None:
        """ConfigError for a checkpoint that can never be written, whichever heads go."""

    def check_layout(self, checkpoint: Checkpoint) -> None:
        """ConfigError for numbers of heads, by layer, that the engine cannot say; nothing is written or run."""
        self.check(checkpoint)

    def adds_bias(self, checkpoint: Checkpoint) -> bool:
        """Whether output projections may have a bias that the checkpoint's class builds without."""
        return True

    @abstractmethod
    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, options: EngineOptions) -> EngineFile:
        """Write the file and run it on `data`; CheckpointError where it computes something else."""


ENGINES: Registry[EngineExport] = engines.ENGINES


def engine(cls: type[EngineExport]) -> type[EngineExport]:
    """Register an engine under its `name`."""
    ENGINES.register(cls.name, cls(), where=cls.__module__)
    return cls


def engines_named(names: Any, options: EngineOptions) -> tuple[EngineExport, ...]:
    """The engines of these names, with their packages there; ConfigError where one is missing."""
    engines = tuple(ENGINES.get(name) for name in names)
    for engine in engines:
        engine.require(options)
    if options.quantize != "none" and not engines:
        engines_with_it = ", ".join(name for name, engine in ENGINES if options.quantize in engine.quantizations)
        raise ConfigError(f"--quantize {options.quantize} is for exports that have it: {engines_with_it}")
    return engines


def check_difference(
    difference: float, largest: float, dtype: torch.dtype, what: str, quantity: str = QUANTITY
) -> float:
    """The tolerance of numbers as large as `largest`; CheckpointError where an engine computes something else."""
    limit = (HALF if is_half(dtype) else FULL) * max(1.0, largest)
    refuse_difference(difference, limit, what, quantity)
    return limit


def refuse_difference(difference: float, limit: float, what: str, quantity: str) -> None:
    """CheckpointError where an engine computes something else."""
    if not difference <= limit:
        raise CheckpointError(
            f"{what} computes something else than the model ({quantity} {difference:.1e}, tolerance {limit:.0e}); "
            "nothing was saved. Please report this with the output of `headscope show`"
        )


def choose_export(name: str | None, checkpoint: Checkpoint, *, pad: bool = False) -> Export:
    """The export of that name, or the default; ConfigError where the checkpoint's format has none such.

    With `pad` the one that fills layers up with heads of zeros.
    """
    exports = {export.name: export for export in FORMATS.get(checkpoint.format).exports}
    if pad:
        return _padding(name, exports, checkpoint)
    if name is None:
        return next(iter(exports.values()))
    if name not in exports:
        available = ", ".join([*exports, *ENGINES.names()])
        hint = "; it keeps its own format, `headscope convert` makes others of it" if checkpoint.is_native else ""
        raise ConfigError(f"--export {name} is not for a {checkpoint.format} checkpoint, which has {available}{hint}")
    return exports[name]


def _padding(name: str | None, exports: dict[str, Export], checkpoint: Checkpoint) -> Export:
    padding = {export.name: export for export in exports.values() if export.padded is not None}
    if not padding or name not in (None, *padding):
        padding_exports = f"--export {' or '.join(padding)}" if padding else "Hugging Face checkpoints"
        request = f"--export {name}" if padding else f"a {checkpoint.format} checkpoint"
        raise ConfigError(f"--pad is for {padding_exports}, not {request}")
    export = padding[name] if name else next(iter(padding.values()))
    assert export.padded is not None
    return replace(export, build=export.padded, whole_groups=False, after=None, refine=None)


def as_export(checkpoint: Checkpoint, source_export: Export, plan: RemovalPlan, name: str) -> tuple[Checkpoint, Export]:
    """A shrunk checkpoint, built for `source_export`, for another export; ConfigError where that cannot be."""
    export = choose_export(name, checkpoint)
    if export.name == source_export.name:
        return checkpoint, export
    if export.refine is None or export.after != source_export.name:
        raise ConfigError(
            f"the heads were removed for export={source_export.name!r}, which cannot become {name!r}; "
            f"say remove(..., export={name!r})"
        )
    return export.refine(checkpoint.with_model(copy.deepcopy(checkpoint.model)), plan), export


def split_export(names: Iterable[str]) -> tuple[str | None, tuple[str, ...]]:
    """The kind of folder (None: the default) and the engines of `--export`, each once."""
    names_once = tuple(dict.fromkeys(names))
    kinds = [name for name in names_once if name not in ENGINES.names()]
    if len(kinds) > 1:
        engines = " and ".join(ENGINES.names())
        raise ConfigError(f"--export {','.join(names_once)}: one kind of folder at a time, and {engines} besides")
    return (kinds[0] if kinds else None), tuple(name for name in names_once if name not in kinds)


def export_for(names: Iterable[str], checkpoint: Checkpoint, *, merges: bool = False, pad: bool = False) -> Export:
    """The kind of folder, as far as all engines can follow it; ConfigError where one never can.

    The default for merged key/value heads is a plain class.
    """
    kind, engines = split_export(names)
    if kind is None and merges and any(export.name == "native" for export in FORMATS.get(checkpoint.format).exports):
        kind = "native"
    export, engines_chosen = choose_export(kind, checkpoint, pad=pad), [ENGINES.get(name) for name in engines]
    for engine in engines_chosen:
        engine.check(checkpoint)
    return replace(
        export, adds_bias=export.adds_bias and all(engine.adds_bias(checkpoint) for engine in engines_chosen)
    )
