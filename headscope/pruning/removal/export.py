"""Which way a smaller checkpoint is written: its format says which ways there are."""

from __future__ import annotations

import copy

from headscope.errors import ConfigError
from headscope.formats.base import FORMATS, Checkpoint, Export
from headscope.model.removal_plan import RemovalPlan


def choose_export(name: str | None, checkpoint: Checkpoint) -> Export:
    """The export of that name, or the default; ConfigError where the checkpoint's format has none such."""
    exports = {export.name: export for export in FORMATS.get(checkpoint.format).exports}
    if name is None:
        return next(iter(exports.values()))
    if name not in exports:
        allowed = ", ".join([*exports, "onnx"])
        hint = "; it keeps its own format, `headscope convert` makes others of it" if checkpoint.is_native else ""
        raise ConfigError(f"--export {name} is not for a {checkpoint.format} checkpoint, which has {allowed}{hint}")
    return exports[name]


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
