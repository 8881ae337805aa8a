"""The models that a sweep keeps: each computes what its row of the table says, without the heads that went.

They are removed as `prune remove` does; in formats that cannot lose heads they are closed, by zeros in the output
projection. The `pruning.json` beside each model has the numbers of the heads that stay.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headscope.config import CheckpointOptions
from headscope.errors import CheckpointError, ConfigError
from headscope.files.folders import Build
from headscope.formats.base import MASKED, Checkpoint, open_configured, write_checkpoint
from headscope.heads import HeadId
from headscope.model.removal_plan import plan_removal
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.model_inputs import texts
from headscope.pruning.options.remove import RemoveConfig
from headscope.pruning.ranking.allocation import removal_sets
from headscope.pruning.removal.export import choose_export
from headscope.pruning.removal.record import Shrunk
from headscope.pruning.removal.remove import REMOVAL, remove_planned, write_shrunk
from headscope.pruning.selection import PRUNED
from headscope.pruning.sweep.cells import UNPRUNED, Cell

SHOWN = 6  # names of cells in a remark
COMPARED = 8  # sentences on which a model with closed heads is compared with the masked one


def keep_model(checkpoint: Checkpoint, removed: Sequence[HeadId], folder: Path, options: CheckpointOptions) -> Path:
    """Write a checkpoint without the heads `removed` into `folder`, in place of what is there; returns what to open."""
    new, companions = folder.with_name(PRUNED), options.companions
    shutil.rmtree(new, ignore_errors=True)
    if not removed:
        new.mkdir(parents=True)
        written = write_checkpoint(checkpoint, new, companions).path
    else:
        heads = ",".join(map(str, removed))
        config = RemoveConfig(checkpoint=checkpoint.path, out=new, heads=heads, **companions.given())
        with Build(new, REMOVAL) as build:
            written = write_shrunk(without_heads(checkpoint, removed), config, (), build).path
    shutil.rmtree(folder, ignore_errors=True)  # only now: dictionaries are copied from there
    new.replace(folder)
    return folder / written.relative_to(new)


def without_heads(checkpoint: Checkpoint, removed: Sequence[HeadId], name: str | None = None) -> Shrunk:
    """A copy of a checkpoint without heads, or with zeros in their place, compared with the model under the mask."""
    export = choose_export(name, checkpoint)
    try:
        plan = plan_removal(checkpoint.attention_sites, removed, whole_groups=export.whole_groups)
        return remove_planned(checkpoint, plan, export=export, data=texts(checkpoint, None, None, sentences=COMPARED))
    except (ConfigError, CheckpointError):
        if export.name == MASKED.name:
            raise
        return without_heads(checkpoint, removed, MASKED.name)


def check_keeping(checkpoint: Checkpoint, gating: GateLayout) -> None:
    """ConfigError where no heads of a checkpoint can be taken out of it, before anything is learnt."""
    units = range(len(gating.units))
    for together in removal_sets(gating, torch.zeros(len(units)), torch.tensor(units))[:1].tolist():
        try:
            without_heads(checkpoint, [head for unit in together for head in gating.units[unit]])
        except (ConfigError, CheckpointError) as error:
            raise ConfigError(f"--keep-models: {error}") from None


def on_one_device(checkpoint: Checkpoint, options: CheckpointOptions) -> Checkpoint:
    """The checkpoint with its weights in one place, from its files where --device-map had spread them."""
    if options.device_map is None:
        return checkpoint
    return open_configured(replace(options, device_map=None, device="cpu"))


def kept_remarks(records: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Of which cells of a sweep in `folder` no model is kept, and why."""
    named = {Cell(**record["cell"]).name: record for record in records if record["cell"]["method"] != UNPRUNED}
    remarks = [
        f"no model of {name} is kept: {record['not_kept']}" for name, record in named.items() if "not_kept" in record
    ]
    before = [
        name
        for name, record in named.items()
        if "not_kept" not in record and not (record.get("model") and (folder / record["model"]).exists())
    ]
    if before:
        names = ", ".join(before[:SHOWN]) + (", …" if len(before) > SHOWN else "")
        remarks.append(f"no model is kept of {names}: finished before without one; --force does the sweep anew")
    return remarks
