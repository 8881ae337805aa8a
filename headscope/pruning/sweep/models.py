"""The models that a sweep keeps, and the functions of heads before and in them.

Models are pruned as `prune remove` does; in formats that cannot lose heads these are closed, by zeros in the output
projection. The `pruning.json` beside each has the numbers of the heads that stay.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from headscope.config import AnalyzeConfig, CheckpointOptions
from headscope.config.declarations import analysis_options, checked_options
from headscope.config.option import restored
from headscope.data.batching import sentence_limit
from headscope.data.corpus import Corpus, open_text
from headscope.data.labels import with_labels
from headscope.engine.base import Analysis
from headscope.engine.plan import analyze, chosen_analyses, run_options, with_stanza
from headscope.errors import CheckpointError, ConfigError, HeadscopeError, restated
from headscope.files.folders import Build
from headscope.files.reading import read_record
from headscope.formats.base import MASKED, Checkpoint, open_configured, write_checkpoint
from headscope.heads import HeadId
from headscope.model.removal_plan import plan_removal
from headscope.model.taps import masked
from headscope.pruning.engines.base import choose_export
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.model_inputs import texts
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.ranking.allocation import removal_sets
from headscope.pruning.removal.record import Shrunk
from headscope.pruning.removal.remove import REMOVAL, remove_planned, write_shrunk
from headscope.pruning.scores_file import read_heads
from headscope.pruning.selection import PRUNED
from headscope.pruning.sweep.cells import UNPRUNED, Cell


def read_functions(run: Path, checkpoint: Checkpoint) -> pd.DataFrame:
    """The labels of heads in a run of `analyze`; ConfigError where it has none."""
    table = read_heads(run, checkpoint.layout)
    if "functions" not in table:
        raise ConfigError(
            f"--functions {run}: its heads.csv has no column functions; name a run of `headscope analyze`"
        )
    return table.assign(functions=table["functions"].astype(object).fillna(""))  # numbers where no head has any


@dataclass(frozen=True)
class Labeller:
    """The options, the text and the analyses of a run of `analyze`, those of the analyses that label heads."""

    options: AnalyzeConfig
    corpus: Corpus
    analyses: Sequence[type[Analysis]]
    digest: str
    """Of all that shaped the labels of that run."""

    def labels(self, checkpoint: Checkpoint, off: Sequence[HeadId]) -> dict[str, str]:
        """Labels of heads, `positional:-1;rare`, with the heads `off` closed; those that have none are left out."""
        config = self.options
        limit = sentence_limit(checkpoint, config.max_length)
        told, _ = run_options(config, checkpoint, self.corpus, self.analyses, limit)
        with masked(checkpoint.model, off):
            found = analyze(checkpoint, self.corpus, analyses=self.analyses, options=told, replicates=config.bootstrap)
        return {str(head): ";".join(labels) for head, labels in found.labels.items() if labels}


def labeller(run: Path, checkpoint: Checkpoint) -> Labeller:
    """What labels heads as this run did; ConfigError where its options or its text are not there any more."""
    record = read_record(run / "run.json")
    recorded, data = record.get("options"), record.get("data")
    if not isinstance(recorded, dict) or not isinstance(data, dict):
        raise ConfigError(f"--relabel: {run / 'run.json'} has no options of `headscope analyze`; analyse CKPT again")
    own = {name: value for name, value in recorded.items() if name in analysis_options()}
    with restated(ConfigError, f"--relabel: the analysis {run} cannot be repeated: {{why}}", HeadscopeError, TypeError):
        config = restored(AnalyzeConfig, {**recorded, "out": run, "analysis_options": checked_options(own)})
        parses = {"parses": config.conllu_file, "target_parses": config.target_parse}
        corpus = open_text(config.text, **parses, max_sentences=config.max_sentences)
        corpus = with_labels(checkpoint, corpus, config.labels)
        analyses = [cls for cls in chosen_analyses(config) if cls.functions]
        if config.parse == "stanza":
            corpus = with_stanza(corpus, config)
    if corpus.digest != data.get("digest"):
        raise ConfigError(f"--relabel: the text of {run} was changed since, or is another here; analyse CKPT again")
    if not analyses:
        raise ConfigError(f"--relabel: the analyses of {run} label no heads; analyse CKPT without --only")
    return Labeller(config, corpus, analyses, str(record.get("signature")))


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
        with restated(ConfigError, "--keep-models: {why}", ConfigError, CheckpointError):
            without_heads(checkpoint, [head for unit in together for head in gating.units[unit]])


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
