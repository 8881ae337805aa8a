"""A removal on the model hub: the folder that was written, and the command that its card names."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path

from headscope.config import CheckpointOptions, flag
from headscope.files.hub import HubTarget, push
from headscope.files.reading import is_file
from headscope.pruning.removal.record import Removed


def pushed(removed: Removed, target: HubTarget | None) -> Removed:
    """The same, once its folder is on the hub too; OutputError where that fails."""
    if target is None:
        return removed
    counts = f"{removed.after.attention_heads} of {removed.before.attention_heads} attention heads"
    return replace(removed, pushed=push(removed.out, target, title=f"{counts}, by headscope prune remove"))


def typed_command(config: CheckpointOptions) -> str:
    """The command with its options, files by their names; not where it wrote to, nor on what machine it ran."""
    words = []
    for entry in fields(config):
        value = getattr(config, entry.name)
        if entry.metadata.get("identity") and value != entry.default and value not in (None, ()):
            shown = ",".join(value) if isinstance(value, tuple) else str(value)
            shown = Path(shown).name if is_file(shown) else shown
            words += [flag(entry.name)] if value is True else [flag(entry.name), shlex.quote(shown)]
    return " ".join(["prune remove", shlex.quote(Path(config.checkpoint).name), *words])
