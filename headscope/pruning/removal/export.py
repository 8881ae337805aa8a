"""Which way a smaller checkpoint is written: its format says which ways there are."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace

from headscope.errors import ConfigError
from headscope.formats.base import FORMATS, Checkpoint, Export
from headscope.model.removal_plan import RemovalPlan
from headscope.pruning.engines.base import ENGINES


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
        allowed = ", ".join([*exports, *ENGINES.names()])
        hint = "; it keeps its own format, `headscope convert` makes others of it" if checkpoint.is_native else ""
        raise ConfigError(f"--export {name} is not for a {checkpoint.format} checkpoint, which has {allowed}{hint}")
    return exports[name]


def _padding(name: str | None, exports: dict[str, Export], checkpoint: Checkpoint) -> Export:
    padding = {export.name: export for export in exports.values() if export.padded is not None}
    if not padding or name not in (None, *padding):
        allowed = f"--export {' or '.join(padding)}" if padding else "Hugging Face checkpoints"
        asked = f"--export {name}" if padding else f"a {checkpoint.format} checkpoint"
        raise ConfigError(f"--pad is for {allowed}, not {asked}")
    export = padding[name] if name else next(iter(padding.values()))
    assert export.padded is not None
    return replace(export, build=export.padded, whole_groups=False, after=None, refine=None)


def as_export(checkpoint: Checkpoint, built: Export, plan: RemovalPlan, name: str) -> tuple[Checkpoint, Export]:
    """A shrunk checkpoint, which was `built` for one export, for another one; ConfigError where that cannot be."""
    export = choose_export(name, checkpoint)
    if export.name == built.name:
        return checkpoint, export
    if export.refine is None or export.after != built.name:
        raise ConfigError(
            f"the heads were removed for export={built.name!r}, which cannot become {name!r}; "
            f"say remove(..., export={name!r})"
        )
    return export.refine(checkpoint.with_model(copy.deepcopy(checkpoint.model)), plan), export


def split_export(names: Iterable[str]) -> tuple[str | None, tuple[str, ...]]:
    """The kind of folder (None: the default) and the engines of `--export`, each once."""
    asked = tuple(dict.fromkeys(names))
    kinds = [name for name in asked if name not in ENGINES.names()]
    if len(kinds) > 1:
        engines = " and ".join(ENGINES.names())
        raise ConfigError(f"--export {','.join(asked)}: one kind of folder at a time, and {engines} besides")
    return (kinds[0] if kinds else None), tuple(name for name in asked if name not in kinds)


def export_for(names: Iterable[str], checkpoint: Checkpoint, *, merges: bool = False, pad: bool = False) -> Export:
    """The kind of folder, as far as all engines can follow it; ConfigError where one never can.

    The default for merged key/value heads is a plain class.
    """
    kind, engines = split_export(names)
    if kind is None and merges and any(export.name == "native" for export in FORMATS.get(checkpoint.format).exports):
        kind = "native"
    export, chosen = choose_export(kind, checkpoint, pad=pad), [ENGINES.get(name) for name in engines]
    for engine in chosen:
        engine.check(checkpoint)
    return replace(export, adds_bias=export.adds_bias and all(engine.adds_bias(checkpoint) for engine in chosen))
